"""`tree_attention` over eight devices, each axis alone and together, and over rows with padding. Trees of
every shape over the context axis alone: test_context.py."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.attention import tree_attention
from jaxrl.attention.naive import naive_attention
from jaxrl.config import AttentionConfig, ConfigError, MeshConfig
from jaxrl.mesh import ROW_AXES, make_mesh, row_sharding

CONFIG = AttentionConfig(block_q=16, block_k=32)
LAYOUTS = [
    {"data": 8},
    {"context": 8},
    {"tensor": 8},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"data": 2, "context": 2, "expert": 2},
]


def rows_of(rng, rows, num_tokens):
    """subtree_end [R, T]: three segments with two children each, then padding."""
    end = np.arange(1, num_tokens + 1) * np.ones((rows, 1), int)
    for row in end:
        cut = np.sort(rng.choice(np.arange(1, num_tokens - 10), 9, replace=False))
        for a, b, c in cut.reshape(3, 3):
            row[a:b] = c
        row[: cut[0]] = cut[-1]
        for _, b, c in cut.reshape(3, 3):
            row[b : (b + c) // 2], row[(b + c) // 2 : c] = (b + c) // 2, c
    return jnp.asarray(end, jnp.int32)


def case(seed, rows=8, num_tokens=64, heads=16, kv_heads=8, size=8):
    rng = np.random.default_rng(seed)
    shapes = [(rows, num_tokens, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, weights = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
    offset = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (rows, num_tokens))
    return q, k, v, offset, rows_of(rng, rows, num_tokens), weights


@partial(jax.jit, static_argnums=0)
def run(attention, q, k, v, offset, end, weights):
    def loss(q, k, v):
        out = attention(q, k, v, offset, end)
        return (out * weights).sum(), out

    gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


def dense(q, k, v, offset, end):
    return naive_attention(q, k, v, offset, offset, end, scale=0.3)[0]


@lru_cache
def dense_result():
    return run(dense, *case(0))


def largest_error(got, want):
    return max(np.linalg.norm(got[n] - want[n]) / np.linalg.norm(want[n]) for n in want)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(f"{a}{n}" for a, n in layout.items()))
def test_layouts_equal_naive(layout):
    mesh = make_mesh(MeshConfig(**{"data": 1, **layout}))
    args = case(0)
    heads = NamedSharding(mesh, PartitionSpec(ROW_AXES, "context", "tensor"))
    tokens = row_sharding(mesh, tokens=True)
    placed = jax.device_put(args, (heads, heads, heads, tokens, tokens, heads))
    got = run(partial(tree_attention, scale=0.3, config=CONFIG, mesh=mesh), *placed)
    assert got["out"].sharding.is_equivalent_to(heads, 4)
    assert largest_error(got, dense_result()) <= 1e-5


@pytest.mark.parametrize("layout", [None, {"context": 2, "data": 4}], ids=str)
def test_padding_holding_nan_changes_no_bit(layout):
    """Padding gets output 0 and gives no gradient, to the sink neither."""
    mesh = layout and make_mesh(MeshConfig(**layout))
    q, k, v, offset, end, weights = case(1)
    valid = np.arange(64) < 64 - 10
    offset, end = jnp.where(valid, offset, -1), jnp.where(valid, end, jnp.arange(1, 65))
    sink = jnp.asarray(np.random.default_rng(2).standard_normal(q.shape[2]), jnp.float32)

    @jax.jit
    def run(q, k, v, weights):
        def loss(q, k, v, sink):
            out = tree_attention(q, k, v, offset, end, scale=0.3, config=CONFIG, mesh=mesh, sink=sink)
            return jnp.where(valid[:, None, None], out * weights, 0).sum(), out

        gradients, out = jax.grad(lambda *x: loss(*x), (0, 1, 2, 3), has_aux=True)(q, k, v, sink)
        return dict(zip(("out", "dq", "dk", "dv", "dsink"), (out, *gradients), strict=True))

    def poison(x):
        return jnp.where(valid[:, None, None], x, jnp.nan)

    want = run(q, k, v, jnp.where(valid[:, None, None], weights, 0))
    got = run(poison(q), poison(k), poison(v), poison(weights))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        assert name == "dsink" or not np.asarray(want[name])[:, ~valid].any()


def test_a_window_without_positions_is_refused():
    with pytest.raises(ValueError, match="positions"):
        tree_attention(*case(2)[:5], scale=1.0, config=CONFIG, mesh=None, window=4)


@pytest.mark.parametrize(
    ("layout", "shape", "key"),
    [
        ({"tensor": 4}, {"heads": 8, "kv_heads": 2}, "mesh.tensor"),
        ({"context": 8}, {"num_tokens": 60}, "packing.row_length"),
        ({"data": 8}, {"rows": 4}, "packing.rows"),
    ],
)
def test_what_cannot_be_split_names_its_key(layout, shape, key):
    with pytest.raises(ConfigError, match=key) as error:
        tree_attention(*case(3, **shape)[:5], scale=1.0, config=CONFIG, mesh=make_mesh(MeshConfig(**layout)))
    assert error.value.key == key
