"""Which implementation and which transport run where, and that it is said."""

import importlib.util
import logging

import jax
import pytest

from jaxrl.attention.choice import choose_kernel, choose_transport, compiler_options
from jaxrl.config import AttentionConfig


@pytest.fixture(autouse=True)
def forget():
    """A choice is logged when it is first made, which another test may have done."""
    choose_kernel.cache_clear(), choose_transport.cache_clear()


def said(caplog, level):
    return [r.message for r in caplog.records if r.levelno == level]


def test_a_cpu_runs_the_reference_and_says_so_once(caplog):
    config = AttentionConfig(block_q=8, block_k=8)
    with caplog.at_level(logging.INFO, "jaxrl.attention"):
        assert choose_kernel(config, "cpu", None, 64, "float32", False) is choose_kernel(
            config, "cpu", None, 64, "float32", False
        )
    assert said(caplog, logging.INFO) == ["tree attention: plain JAX, blocks of 8 queries × 8 keys, on cpu"]
    assert not said(caplog, logging.WARNING)


def test_a_tpu_runs_pallas_where_it_can(caplog):
    with caplog.at_level(logging.INFO, "jaxrl.attention"):
        pallas = choose_kernel(AttentionConfig(), "tpu", None, 128, "bfloat16", False)
        assert said(caplog, logging.INFO) == ["tree attention: the Pallas kernel, head size 128 in bfloat16"]
        fallback = choose_kernel(AttentionConfig(), "tpu", None, 128, "float64", False)
        asked_for = choose_kernel(AttentionConfig(impl="reference"), "tpu", None, 128, "bfloat16", False)
    assert pallas.forward.__module__.startswith("pallas_kernels")
    assert not any(k.forward.func.__module__.startswith("pallas_kernels") for k in (fallback, asked_for))
    (warning,) = said(caplog, logging.WARNING)
    assert "slow on a TPU, because" in warning and "float64" in warning


def test_a_gpu_without_its_extra_is_told_what_to_install(caplog, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else found(name))
    choose_kernel(AttentionConfig(), "gpu", "8.0", 128, "bfloat16", False)
    (warning,) = said(caplog, logging.WARNING)
    assert "jax_triton is not installed: make install EXTRAS=dev,gpu" in warning


def test_a_hopper_gpu_runs_its_own_kernel_unless_there_is_a_window(caplog):
    with caplog.at_level(logging.INFO, "jaxrl.attention"):
        hopper = choose_kernel(AttentionConfig(), "gpu", "9.0", 128, "bfloat16", False)
        windowed = choose_kernel(AttentionConfig(), "gpu", "9.0", 128, "bfloat16", True)
    assert hopper.forward.__module__ == "pallas_kernels.tree_attention_hopper"
    assert windowed.forward is not hopper.forward
    assert "tree attention: the Hopper kernel, head size 128 in bfloat16" in said(caplog, logging.INFO)


def test_keys_travel_by_ring_on_tpus_unless_told_otherwise():
    chosen = [
        choose_transport(AttentionConfig(transport=t), p) for t in ("auto", "gather", "ring") for p in ("tpu", "gpu", "cpu")
    ]
    assert chosen == ["ring", "gather", "gather"] + ["gather"] * 3 + ["ring"] * 3


def test_triton_calls_stay_out_of_cuda_graphs():
    options = {
        capability: dict(choose_kernel(AttentionConfig(), "gpu", capability, 128, "bfloat16", False).compiler_options)
        for capability in ("8.0", "9.0")
    }
    assert options == {"8.0": {"xla_gpu_enable_command_buffer": ""}, "9.0": {}}
    mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
    assert compiler_options(AttentionConfig(), mesh, 64, "float32") is None, "jax.jit on a CPU knows no such option"
