"""`read_logprobs` against log_softmax over all logits: values, gradients, memory, layouts."""

import re
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.config import ConfigError, MeshConfig
from jaxrl.mesh import ROW_AXES, make_mesh
from jaxrl.models.head import read_logprobs


def dense(states, head, target, temperature):
    """The definition, all logits at once."""
    used = target >= 0
    logits = jnp.where(used[..., None], states, 0) @ head / jnp.where(used, temperature, 1)[..., None]
    log_probs = jax.nn.log_softmax(logits)
    logp = jnp.take_along_axis(log_probs, jnp.maximum(target, 0)[..., None], -1)[..., 0]
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return jnp.where(used, logp, 0), jnp.where(used, entropy, 0)


def chunks_of_16(*args):
    return read_logprobs(*args, 16)


def case(seed, shape, width=24, vocab=101, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    target = rng.integers(-1, vocab, shape)
    target[..., ::5] = -1
    temperature = rng.uniform(0.5, 1.5, shape)
    states, head = rng.standard_normal((*shape, width)), rng.standard_normal((width, vocab)) * 0.5
    weights = rng.standard_normal((2, *shape))
    floats = (jnp.asarray(x, dtype) for x in (states, head, temperature, weights))
    states, head, temperature, weights = floats
    return states, head, jnp.asarray(target, jnp.int32), temperature, weights


@partial(jax.jit, static_argnums=0)
def run(f, states, head, target, temperature, weights):
    def loss(states, head):
        logp, entropy = f(states, head, target, temperature)
        return (logp * weights[0] + entropy * weights[1]).sum(), (logp, entropy)

    gradients, results = jax.grad(loss, (0, 1), has_aux=True)(states, head)
    return dict(zip(("logp", "entropy", "d_states", "d_head"), (*results, *gradients), strict=True))


def errors(got, want):
    def as64(x):
        return np.asarray(x, np.float64)

    return {n: np.linalg.norm(as64(got[n]) - as64(want[n])) / np.linalg.norm(as64(want[n])) for n in want}


@pytest.mark.parametrize(("shape", "chunk"), [((63,), 16), ((63,), 1000), ((3, 50), 8)], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-12)])
def test_equals_log_softmax(shape, chunk, dtype, bound):
    with jax.enable_x64(dtype == "float64"):
        args = case(0, shape, dtype=dtype)
        got = run(lambda *a: read_logprobs(*a, chunk), *args)
        assert all(x.dtype == dtype for x in got.values())
        found = errors(got, run(dense, *args))
    assert max(found.values()) <= bound, found


def test_bfloat16_accumulates_in_float32():
    states, head, target, temperature, weights = case(1, (2, 50), width=256, dtype=jnp.bfloat16)
    temperature, weights, head = temperature.astype(jnp.float32), weights.astype(jnp.float32), head / 8
    got = run(lambda *a: read_logprobs(*a, 16), states, head, target, temperature, weights)
    assert got["logp"].dtype == got["entropy"].dtype == jnp.float32 and got["d_head"].dtype == jnp.bfloat16
    want = run(dense, states.astype(jnp.float32), head.astype(jnp.float32), target, temperature, weights)
    found = errors(got, want)
    assert max(found["logp"], found["entropy"]) <= 1e-5, found
    assert max(found["d_states"], found["d_head"]) <= 2**-7, found


def test_ignored_reads_holding_nan_change_no_bit():
    states, head, target, temperature, weights = case(2, (2, 30))
    ignored = target < 0
    poisoned = jnp.where(ignored[..., None], jnp.nan, states)

    def f(*a):
        return read_logprobs(*a, 8)

    want = run(f, states, head, target, temperature, weights)
    got = run(f, poisoned, head, target, jnp.where(ignored, jnp.nan, temperature), jnp.where(ignored, jnp.nan, weights))
    for name in ("d_states", "d_head", "logp", "entropy"):
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    for name in ("d_states", "logp", "entropy"):
        assert not np.asarray(got[name])[ignored].any()


def test_logits_of_one_chunk_at_a_time():
    """Temporaries do not grow with the reads by more than the reads' own states."""
    num_reads, width, vocab, chunk = 4096, 16, 4096, 128

    def loss(states, head, target, temperature):
        logp, entropy = read_logprobs(states, head, target, temperature, chunk)
        return (logp + entropy).sum()

    shapes = (
        ((num_reads, width), jnp.float32),
        ((width, vocab), jnp.float32),
        ((num_reads,), jnp.int32),
        ((num_reads,), jnp.float32),
    )
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < num_reads * vocab * 4 / 4


LAYOUTS = [{"tensor": 8}, {"fsdp": 2, "context": 2, "tensor": 2}]


def placed(args, layout):
    mesh = make_mesh(MeshConfig(**{"data": 1, **layout}))
    reads = PartitionSpec(ROW_AXES, "context")
    specs = reads, PartitionSpec("fsdp", "tensor"), reads, reads, PartitionSpec(None, *reads)
    return jax.device_put(args, tuple(NamedSharding(mesh, s) for s in specs)), mesh


@lru_cache
def dense_result():
    return run(dense, *case(3, (8, 48), vocab=104))


def names(layout):
    return " ".join(f"{axis}{size}" for axis, size in layout.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
def test_gspmd_equals_log_softmax(layout):
    args, _ = placed(case(3, (8, 48), vocab=104), layout)
    found = errors(run(chunks_of_16, *args), dense_result())
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("layout", [{"data": 4, "fsdp": 2}, {"context": 8}, *LAYOUTS], ids=names)
def test_layouts_equal_log_softmax(layout):
    args, mesh = placed(case(3, (8, 48), vocab=104), layout)
    got = run(lambda *a: read_logprobs(*a, 4, mesh=mesh), *args)
    found = errors(got, dense_result())
    assert max(found.values()) <= 1e-5, found


def test_the_gradient_of_the_head_is_reduced_once():
    """Inside the loops over chunks no collective is larger than a chunk's logits."""
    width, vocab, chunk = 64, 512, 4
    args, mesh = placed(case(4, (8, 64), width=width, vocab=vocab), {"data": 2, "context": 2, "fsdp": 2})

    def loss(states, head, target, temperature):
        logp, entropy = read_logprobs(states, head, target, temperature, chunk, mesh=mesh)
        return (logp + entropy).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(*args[:4]).compile().as_text()
    loops, entry = text.split("\nENTRY ")
    assert "all-reduce" in entry and " while(" in entry
    assert not re.search(r"all-reduce|all-gather|all-to-all|collective-permute", loops)


def test_reads_that_cannot_be_split_name_their_key():
    mesh = make_mesh(MeshConfig(context=8))
    with pytest.raises(ConfigError, match="packing.reads"):
        read_logprobs(*case(5, (8, 44))[:4], 4, mesh=mesh)
