"""Context parallelism against the dense reference on one device: every workload on 2, 4 and 8 devices, by either
transport, with and without a window and a sink; outputs and every gradient."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.attention import tree_attention
from jaxrl.attention.naive import naive_attention
from jaxrl.attention.plan import plan_row
from jaxrl.bench.workloads import WORKLOADS, layout, workload
from jaxrl.config import AttentionConfig, MeshConfig
from jaxrl.mesh import make_mesh

# 65 tokens on each of eight devices: odd halves for the ring, and blocks that do not divide them.
ROWS, TOKENS, HEADS, KV_HEADS, SIZE = 1, 520, 4, 2, 8
SCALE, WINDOW = 0.3, 90


@lru_cache
def case(name):
    """(q, k, v, output weights, sink) and (offset, subtree_end, positions), of one row or several."""
    rng = np.random.default_rng(WORKLOADS.index(name))
    forests = [workload(name, seed, TOKENS) for seed in range(ROWS)]
    rows = [layout(forest, TOKENS) for forest in forests]
    used = np.array([[sum(tree.total for tree in forest)] for forest in forests])
    offset = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (ROWS, TOKENS))
    offset = np.where(offset < used, offset, -1)
    values = [rng.standard_normal((ROWS, TOKENS, n, SIZE)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    sink = rng.standard_normal(HEADS).astype(np.float32)
    return (*values, sink), (offset, np.stack([r.subtree_end for r in rows]), np.stack([r.positions for r in rows]))


def values_and_gradients(attention, q, k, v, weights, sink, *tokens):
    def loss(q, k, v, sink):
        out = attention(q, k, v, sink, *tokens)
        return (out * weights).sum(), out

    gradients, out = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, sink)
    return dict(zip(("out", "dq", "dk", "dv", "dsink"), (out, *gradients), strict=True))


def dense(q, k, v, sink, offset, end, positions, window_and_sink):
    end = jnp.where(offset < 0, -1, end)
    extra = {"window": WINDOW, "sink": sink} if window_and_sink else {}
    out, _ = naive_attention(q, k, v, offset, offset, end, positions, positions, scale=SCALE, **extra)
    return jnp.where((offset >= 0)[..., None, None], out, 0)


@lru_cache
def run_dense(window_and_sink):
    return jax.jit(partial(values_and_gradients, partial(dense, window_and_sink=window_and_sink)))


@lru_cache
def reference(name, window_and_sink):
    values, tokens = case(name)
    return jax.tree.map(np.asarray, run_dense(window_and_sink)(*values, *tokens))


@pytest.mark.parametrize("window_and_sink", [False, True], ids=["plain", "window, sink"])
@pytest.mark.parametrize("transport", ["gather", "ring"])
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_every_workload_equals_naive(num_devices, transport, window_and_sink):
    """By one compiled program: trees and the plan are data."""
    mesh = make_mesh(MeshConfig(context=num_devices), jax.devices()[:num_devices])
    config = AttentionConfig(block_q=16, block_k=32, transport=transport)

    def attention(q, k, v, sink, offset, end, positions):
        extra = {"positions": positions, "window": WINDOW, "sink": sink} if window_and_sink else {}
        return tree_attention(q, k, v, offset, end, scale=SCALE, config=config, mesh=mesh, **extra)

    run = jax.jit(partial(values_and_gradients, attention))
    for name in WORKLOADS:
        values, (offset, end, positions) = case(name)
        used = (offset >= 0).sum(1)
        order = np.stack([plan_row(*row, num_devices).order for row in zip(end, used, strict=True)])
        back = np.argsort(order, axis=1)

        def move(x, by):
            return np.take_along_axis(x, by[..., None, None] if x.ndim == 4 else by, axis=1)

        *by_token, sink = values
        placed = [move(x, order) for x in by_token], [move(x, order) for x in (offset, end, positions)]
        got = run(*placed[0], sink, *placed[1])
        for key, want in reference(name, window_and_sink).items():
            value = np.asarray(got[key]) if key == "dsink" else move(np.asarray(got[key]), back)
            if key == "dsink" and not window_and_sink:
                assert not value.any()
                continue
            error = np.linalg.norm(value - want) / np.linalg.norm(want)
            assert error <= 1e-5, (name, key, error)
    assert run._cache_size() == 1
