"""The head by a platform's kernel: which is chosen and said, and that it is right over devices."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.config import ConfigError, MeshConfig
from jaxrl.mesh import ROW_AXES, make_mesh
from jaxrl.models.head import read_logprobs
from jaxrl.models.head_kernel import _choose, choose_head, kernel_logprobs
from pallas_kernels import head_hopper, head_tpu


@pytest.fixture(autouse=True)
def forget():
    """A choice is logged when it is first made, which another test may have done."""
    _choose.cache_clear()


def test_each_platform_gets_its_kernel_or_a_reason(caplog):
    with caplog.at_level(logging.INFO, "jaxrl.models"):
        assert _choose("auto", "gpu", "9.0", "bfloat16", 1) is head_hopper.read_logprobs
        assert _choose("auto", "tpu", None, "float32", 1) is head_tpu.read_logprobs
        said = [r.message for r in caplog.records]
        assert said == ["head over reads: the Hopper kernel in bfloat16", "head over reads: the Pallas kernel in float32"]
        caplog.clear()
        assert _choose("auto", "gpu", "9.0", "float32", 1) is _choose("auto", "tpu", None, "bfloat16", 2) is None
        assert _choose("auto", "gpu", "8.0", "bfloat16", 1) is None
        first, second, third = (r.message for r in caplog.records)
        assert "slower on a GPU, because" in first and "float32" in first
        assert "mesh.tensor = 2" in second and "9.0, not 8.0" in third
        caplog.clear()
        assert _choose("reference", "tpu", None, "bfloat16", 1) is None
        assert choose_head("auto", make_mesh(MeshConfig()), "bfloat16") is None, "a CPU has none"
    assert not caplog.records


def case(vocab_major):
    rng = np.random.default_rng(7)
    shape, width, vocab = (4, 48), 128, 300
    states, head = rng.standard_normal((*shape, width)), rng.standard_normal((width, vocab)) * 0.2
    target = rng.integers(-1, vocab, shape)
    target[..., ::5] = -1
    temperature = np.where(target < 0, np.nan, rng.uniform(0.5, 1.5, shape))
    states[target < 0] = np.nan
    weights = rng.standard_normal((2, *shape))
    states, head, temperature, weights = (jnp.asarray(x, jnp.float32) for x in (states, head, temperature, weights))
    return states, head.T if vocab_major else head, jnp.asarray(target, jnp.int32), temperature, weights


def results(f, states, head, target, temperature, weights):
    def loss(states, head):
        logp, entropy = f(states, head, target, temperature)
        return (logp * weights[0] + entropy * weights[1]).sum(), (logp, entropy)

    gradients, values = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(states, head)
    return dict(zip(("logp", "entropy", "d_states", "d_head"), (*values, *gradients), strict=True))


@pytest.mark.parametrize(
    ("layout", "vocab_major"), [({"data": 2, "fsdp": 2, "context": 2}, True), ({"context": 8}, False), ({"fsdp": 4}, True)]
)
def test_a_kernel_over_devices_equals_plain_chunks(layout, vocab_major):
    arrays = case(vocab_major)
    mesh = make_mesh(MeshConfig(**{"data": 1, **layout}), jax.devices()[: int(np.prod(list(layout.values())))])
    reads, matrix = (
        PartitionSpec(ROW_AXES, "context"),
        PartitionSpec(*(("tensor", "fsdp") if vocab_major else ("fsdp", "tensor"))),
    )
    specs = reads, matrix, reads, reads, PartitionSpec(None, *reads)
    placed = jax.device_put(arrays, tuple(NamedSharding(mesh, s) for s in specs))
    tiling = head_tpu.HeadTiling(reads=128, vocab=128, width=128, chunk=256, interpret=pltpu.InterpretParams())
    kernel = partial(head_tpu.read_logprobs, tiling=tiling)
    got = results(partial(kernel_logprobs, kernel, vocab_major=vocab_major, mesh=mesh), *placed)
    want = results(lambda s, h, *rest: read_logprobs(s, h.T if vocab_major else h, *rest, 16), *arrays)
    for name, x in want.items():
        error = np.linalg.norm(got[name] - np.asarray(x)) / np.linalg.norm(x)
        assert error <= 1e-5, (name, error)


def test_reads_that_cannot_be_split_name_their_key():
    states, head, target, temperature, _ = case(False)
    with pytest.raises(ConfigError, match="packing.reads"):
        kernel_logprobs(
            head_tpu.read_logprobs,
            states[:, :44],
            head,
            target[:, :44],
            temperature[:, :44],
            vocab_major=False,
            mesh=make_mesh(MeshConfig(context=8)),
        )
