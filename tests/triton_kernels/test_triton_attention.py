"""Tree attention in Triton, interpreted, against the dense reference: values and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.attention.kernel import Kernel, differentiable
from jaxrl.attention.naive import naive_attention

NAMES = ("q", "k", "v")


def tree_attention(q, k, v, *tokens, scale, window=None):
    from triton_kernels.tree_attention import backward, forward  # after the interpreter is chosen

    return differentiable(Kernel(forward, backward), scale=scale, window=window)(q, k, v, *tokens)


def tree(rng, length: int, depth: int = 3) -> list[int]:
    """subtree_end of a random tree of at most `length` tokens in pre-order, one-token segments included."""
    ends = []

    def grow(budget, depth):
        start = len(ends)
        own = int(rng.integers(1, max(2, budget // 2)))
        ends.extend([0] * own)
        for _ in range(int(rng.integers(0, 4)) if depth else 0):
            left = budget - (len(ends) - start)
            if left > 1:
                grow(int(rng.integers(1, left)), depth - 1)
        ends[start : start + own] = [len(ends)] * own

    while len(ends) < length:
        grow(length - len(ends), depth)
    return ends


def inputs(seed, rows, num_queries, num_keys, heads, kv_heads, head_dim, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = ((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads), (num_queries, heads))
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((rows, *s, head_dim)), dtype) for s in shapes)
    d_lse = jnp.asarray(rng.standard_normal((rows, num_queries, heads)), jnp.float32)
    end = np.array([tree(rng, num_keys) for _ in range(rows)], np.int32)
    k_offset = np.tile(np.arange(num_keys, dtype=np.int32), (rows, 1))
    q_offset = np.sort(np.stack([rng.permutation(num_keys)[:num_queries] for _ in range(rows)])).astype(np.int32)
    end[:, -num_keys // 10 :] = 0  # invalid keys
    q_offset[:, num_queries // 2 : num_queries // 2 + 2] = -1  # invalid queries
    return (q, k, v), (q_offset, k_offset, end), (d_out, d_lse)


def poison(qkv, offsets):
    (q, k, v), (q_offset, k_offset, end) = qkv, offsets
    valid = (k_offset < end)[..., None, None]
    return jnp.where((q_offset >= 0)[..., None, None], q, jnp.nan), *(jnp.where(valid, x, jnp.nan) for x in (k, v))


def check(actual, expected, tolerance, name):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error < tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("rows", "num_queries", "num_keys", "heads", "kv_heads", "head_dim", "dtype", "tolerance"),
    [
        (2, 63, 100, 2, 1, 64, jnp.float32, 1e-5),
        (1, 130, 140, 2, 2, 96, jnp.float16, 2e-3),
        (1, 40, 70, 1, 1, 256, jnp.float16, 2e-3),
    ],
)
def test_values_and_gradients(rows, num_queries, num_keys, heads, kv_heads, head_dim, dtype, tolerance):
    qkv, offsets, cotangents = inputs(0, rows, num_queries, num_keys, heads, kv_heads, head_dim, dtype)
    poisoned = poison(qkv, offsets)
    (out, lse), pullback = jax.vjp(lambda *x: tree_attention(*x, *offsets, None, None, scale=0.2), *poisoned)
    wide = tuple(x.astype(jnp.float32) for x in qkv)
    (expected, expected_lse), reference_pullback = jax.vjp(lambda *x: naive(x, offsets), *wide)
    used = (offsets[0] >= 0)[..., None] & np.isfinite(expected_lse)
    assert (np.asarray(out)[~used] == 0).all() and (np.asarray(lse)[~used] == -np.inf).all()
    check(out, jnp.where(used[..., None], expected, 0), tolerance, "out")
    check(jnp.where(used, lse, 0), jnp.where(used, expected_lse, 0), tolerance, "lse")
    d_out, d_lse = cotangents
    gradients = pullback((d_out, d_lse))
    d_out, d_lse = jnp.where(used[..., None], d_out, 0), jnp.where(used, d_lse, 0)
    for name, actual, wanted in zip(NAMES, gradients, reference_pullback((d_out.astype(jnp.float32), d_lse)), strict=True):
        check(actual, wanted, tolerance, f"d{name}")


def naive(qkv, offsets):
    return naive_attention(*qkv, *offsets, scale=0.2)


def test_window_by_logical_position():
    qkv, offsets, cotangents = inputs(1, 1, 100, 100, 2, 1, 64)
    q_offset, k_offset, end = offsets
    parent = np.array([[max((j for j in range(i) if end[0, j] > i), default=-1) for i in range(100)]])
    position = np.zeros((1, 100), np.int32)
    for i in range(100):
        position[0, i] = 0 if parent[0, i] < 0 else position[0, parent[0, i]] + 1
    q_position = np.take_along_axis(position, np.maximum(q_offset, 0), axis=1)

    def ours(q, k, v):
        return tree_attention(q, k, v, *offsets, q_position, position, scale=0.2, window=5)[0]

    def reference(q, k, v):
        return naive_attention(q, k, v, *offsets, q_position, position, scale=0.2, window=5)[0]

    (out, pullback), (expected, reference_pullback) = jax.vjp(ours, *qkv), jax.vjp(reference, *qkv)
    check(out, expected, 1e-5, "out")
    for name, actual, wanted in zip(NAMES, pullback(cotangents[0]), reference_pullback(cotangents[0]), strict=True):
        check(actual, wanted, 1e-5, f"d{name}")


def test_block_lists_name_every_pair_that_sees():
    from triton_kernels.block_lists import block_lists

    _, (q_offset, k_offset, end), _ = inputs(2, 3, 160, 192, 1, 1, 64)
    by_query, by_key = block_lists(q_offset, k_offset, end, None, None, None, 16, 16)
    visible = (k_offset[:, None, :] <= q_offset[:, :, None]) & (q_offset[:, :, None] < end[:, None, :])
    tiles = visible.reshape(3, 10, 16, 12, 16).swapaxes(2, 3)
    for lists, pairs in ((by_query, tiles), (by_key, tiles.swapaxes(1, 2))):
        some, every = pairs.any((-1, -2)), pairs.all((-1, -2))
        for a, (some_a, every_a) in enumerate(
            zip(some.reshape(-1, some.shape[2]), every.reshape(-1, some.shape[2]), strict=True)
        ):
            full, listed = (set(np.asarray(lists.blocks[a, :n]).tolist()) for n in (lists.num_full[a], lists.num_listed[a]))
            assert full == set(np.flatnonzero(every_a)) and listed >= set(np.flatnonzero(some_a))
        counts = np.asarray(lists.num_listed)[np.asarray(lists.order)]
        assert (np.diff(counts) <= 0).all() and sorted(lists.order.tolist()) == list(range(len(counts)))


def test_what_has_no_kernel_is_named():
    qkv, offsets, _ = inputs(0, 1, 16, 16, 2, 2, 80)
    with pytest.raises(ValueError, match="80"):
        tree_attention(*qkv, *offsets, None, None, scale=1.0)
