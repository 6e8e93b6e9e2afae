"""Layouts of 8 devices against one device. Every layout: tests/proofs/proof_layouts.py."""

import pytest
from layouts import compare, make_batches, step_on

# Every axis at 2, 4 and 8, (data, fsdp, context, tensor).
LAYOUTS = [(8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8), (4, 2, 1, 1), (1, 1, 2, 4), (1, 4, 1, 2), (2, 1, 4, 1)]


@pytest.fixture(scope="module")
def reference():
    return step_on({"data": 1}, make_batches())


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "x".join(map(str, sizes)))
def test_layout_equals_one_device(reference, sizes):
    result = step_on(dict(zip(("data", "fsdp", "context", "tensor"), sizes, strict=True)), make_batches())
    gradient_error, adam_error = compare(result, reference)
    print(f"{sizes}: gradients {gradient_error:.1e}, after Adam {adam_error:.1e} lr")
    assert gradient_error <= 1e-5 and adam_error <= 1e-2
