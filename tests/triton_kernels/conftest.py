"""Triton kernels are interpreted here: the switch is read when a kernel is defined, so it comes before every import."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    import interpret

    import triton_kernels.tree_attention

    monkeypatch.setattr(triton_kernels.tree_attention, "triton_call", interpret.triton_call)
