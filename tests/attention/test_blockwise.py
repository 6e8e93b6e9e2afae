"""The blockwise implementation against the dense reference: values, gradients, memory, poison."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.attention.blockwise import _key_blocks, _Queries, _visible_blocks, blockwise_attention
from jaxrl.attention.naive import naive_attention, visible


def random_forest(rng, num_tokens, num_valid=None, max_segment=40):
    """subtree_end [T] of a random pre-order forest over the first num_valid tokens, then padding."""
    num_valid = num_tokens if num_valid is None else num_valid
    end = np.arange(1, num_tokens + 1)

    def grow(start, stop):
        while start < stop:
            tree_stop = rng.integers(start, stop) + 1
            length = min(rng.integers(1, max_segment + 1), tree_stop - start)
            end[start : start + length] = tree_stop
            grow(start + length, tree_stop)
            start = tree_stop

    grow(0, num_valid)
    return end.astype(np.int32)


def positions_of(end):
    """Logical positions [T]: the number of tokens before each on its path."""
    offset = np.arange(len(end))
    return (np.asarray(visible(offset[None], offset[None], end[None]))[0].sum(-1) - 1).astype(np.int32)


def error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def inputs(rng, rows, num_queries, num_keys, heads, kv_heads, size, dtype):
    shapes = [(rows, num_queries, heads, size), (rows, num_keys, kv_heads, size), (rows, num_keys, kv_heads, size)]
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


@partial(jax.jit, static_argnums=0)
def values_and_gradients(f, q, k, v, *places, weights):
    """Output, log-sum-exp and the gradients of a loss in which both take part."""

    def loss(q, k, v):
        out, lse = f(q, k, v, *places)
        seen = jnp.isfinite(lse)
        out_weights, lse_weights = weights
        total = jnp.where(seen[..., None], out * out_weights, 0).sum() + jnp.where(seen, lse * lse_weights, 0).sum()
        return total, (out, jnp.where(seen, lse, 0))

    gradients, (out, lse) = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def compare(rng, rows, num_tokens, heads, kv_heads, size, block_q, block_k, window, dtype):
    end = np.stack([random_forest(rng, num_tokens, int(num_tokens * rng.uniform(0.6, 1))) for _ in range(rows)])
    offset = np.broadcast_to(np.arange(num_tokens, dtype=np.int32), end.shape)
    q, k, v = inputs(rng, rows, num_tokens, num_tokens, heads, kv_heads, size, dtype)
    weights = jnp.asarray(rng.standard_normal(q.shape), dtype), jnp.asarray(rng.standard_normal(q.shape[:3]), dtype)
    position = np.stack([positions_of(row) for row in end])
    settings = {"scale": size**-0.5, "window": window}
    blockwise, naive = (
        partial(f, **settings) for f in (partial(blockwise_attention, block_q=block_q, block_k=block_k), naive_attention)
    )
    places = offset, offset, end, position, position
    got, want = (values_and_gradients(f, q, k, v, *places, weights=weights) for f in (blockwise, naive))
    return {name: error(got[name], want[name]) for name in got}


SHAPES = [  # rows, tokens, heads, KV heads, head size, query block, key block, window
    (2, 63, 8, 8, 32, 64, 16, None),
    (2, 500, 8, 4, 16, 64, 128, None),
    (1, 500, 4, 1, 128, 128, 64, None),
    (1, 1000, 8, 2, 64, 128, 128, None),
    (1, 1000, 8, 1, 24, 96, 200, None),
    (2, 63, 4, 2, 16, 8, 16, 1),
    (2, 500, 8, 4, 16, 64, 48, 37),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_equals_naive(shape):
    errors = compare(np.random.default_rng(0), *shape, jnp.float32)
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[6]], ids=str)
def test_float64_equals_naive(shape):
    with jax.enable_x64(True):
        errors = compare(np.random.default_rng(1), *shape, jnp.float64)
    assert max(errors.values()) <= 1e-12, errors


def test_bfloat16_accumulates_in_float32():
    """Against float64 on the same (rounded) inputs, errors stay at bf16's rounding, not at its sums'."""
    rng = np.random.default_rng(2)
    num_tokens, size = 1000, 32
    end = random_forest(rng, num_tokens)[None]
    offset = np.arange(num_tokens, dtype=np.int32)[None]
    q, k, v = inputs(rng, 1, num_tokens, num_tokens, 4, 2, size, jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal(q.shape), jnp.bfloat16), jnp.zeros(q.shape[:3])
    run = partial(blockwise_attention, scale=size**-0.5, block_q=128, block_k=128)
    got = values_and_gradients(run, q, k, v, offset, offset, end, weights=weights)
    assert got["out"].dtype == got["dk"].dtype == jnp.bfloat16 and got["lse"].dtype == jnp.float32
    exact = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    weights = tuple(w.astype(jnp.float32) for w in weights)
    want = values_and_gradients(partial(naive_attention, scale=size**-0.5), *exact, offset, offset, end, weights=weights)
    errors = {name: error(got[name], want[name]) for name in got}
    assert max(errors.values()) <= 2**-7, errors
    assert errors["lse"] <= 1e-5, errors  # never rounded to bf16


@pytest.mark.parametrize("window", [None, 20])
def test_any_selection_of_tokens_in_any_order(window):
    """Queries and keys drawn and shuffled independently, some of them invalid."""
    rng = np.random.default_rng(3)
    num_tokens = 300
    end = random_forest(rng, num_tokens)
    q_offset = rng.permutation(num_tokens)[None, :140].astype(np.int32)
    k_offset = rng.permutation(num_tokens)[None, :210].astype(np.int32)
    q_offset[:, ::9] = -1
    subtree_end = end[k_offset]
    subtree_end[:, ::7] = 0
    q, k, v = inputs(rng, 1, 140, 210, 4, 2, 16, jnp.float32)
    weights = jnp.asarray(rng.standard_normal(q.shape), jnp.float32), jnp.ones(q.shape[:3])
    position = positions_of(end)
    places = q_offset, k_offset, subtree_end, position[q_offset], position[k_offset]
    settings = {"scale": 0.3, "window": window}
    blockwise = partial(blockwise_attention, block_q=32, block_k=64, **settings)
    got = values_and_gradients(blockwise, q, k, v, *places, weights=weights)
    want = values_and_gradients(partial(naive_attention, **settings), q, k, v, *places, weights=weights)
    unseen = ~np.asarray(visible(*places, window)).any(-1)
    assert unseen.sum() > (q_offset < 0).sum()  # valid queries without a key among them
    assert not np.asarray(got["out"])[unseen].any() and not np.asarray(got["dq"])[unseen].any()
    errors = {name: error(got[name], want[name]) for name in got}
    assert max(errors.values()) <= 1e-5, errors


def test_log_sum_exp_of_an_empty_query_is_minus_infinity():
    q, k, v = inputs(np.random.default_rng(4), 1, 4, 4, 1, 1, 8, jnp.float32)
    offset = jnp.arange(4)[None]
    out, lse = blockwise_attention(q, k, v, offset, offset, jnp.zeros((1, 4), jnp.int32), scale=1.0, block_q=2, block_k=2)
    assert np.all(np.asarray(lse) == -np.inf) and not np.asarray(out).any()


@pytest.mark.parametrize("window", [None, 25])
def test_invalid_tokens_holding_nan_change_no_bit(window):
    """Their positions are arbitrary too."""
    rng = np.random.default_rng(5)
    num_tokens, num_valid = 200, 130
    end = random_forest(rng, num_tokens, num_valid)[None]
    q_offset = np.where(np.arange(num_tokens) < num_valid, np.arange(num_tokens), -1).astype(np.int32)[None]
    k_offset = np.arange(num_tokens, dtype=np.int32)[None]
    end[:, num_valid:] = 0
    clean = inputs(rng, 1, num_tokens, num_tokens, 4, 2, 16, jnp.float32)
    poisoned = [x.at[:, num_valid:].set(jnp.nan) for x in clean]
    weights = jnp.ones(clean[0].shape), jnp.ones(clean[0].shape[:3])
    bad_weights = tuple(w.at[:, num_valid:].set(jnp.nan) for w in weights)
    run = partial(blockwise_attention, scale=0.25, window=window, block_q=32, block_k=32)
    position = positions_of(end[0])[None]
    bad_position = np.where(np.arange(num_tokens) < num_valid, position, rng.integers(-9, 999, num_tokens)).astype(np.int32)
    want = values_and_gradients(run, *clean, q_offset, k_offset, end, position, position, weights=weights)
    for name, cotangents in (("inputs", weights), ("inputs and cotangents", bad_weights)):
        got = values_and_gradients(run, *poisoned, q_offset, k_offset, end, bad_position, bad_position, weights=cotangents)
        for key in want:
            np.testing.assert_array_equal(got[key], want[key], err_msg=f"{key}, NaN in {name}")


def test_memory_is_linear_in_tokens(optimized):
    """Doubling the tokens doubles the temporaries of forward and backward, within a fixed part."""

    def temporaries(num_tokens):
        q = jax.ShapeDtypeStruct((1, num_tokens, 4, 32), jnp.float32)
        k = jax.ShapeDtypeStruct((1, num_tokens, 2, 32), jnp.float32)
        offset = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)

        def loss(q, k, v, *o):
            return blockwise_attention(q, k, v, *o, scale=0.2, block_q=128, block_k=128)[0].sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, offset, offset, offset).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one, two, four = (temporaries(n) for n in (2048, 4096, 8192))
    assert two <= 2.05 * one and four <= 2.05 * two, (one, two, four)
    assert four < 8192 * 8192 * 4 / 4  # a quarter of one head's score matrix


@pytest.mark.parametrize("window", [None, 20])
def test_blocks_without_a_visible_pair_are_skipped(window):
    """Every block with a visible pair is visited, no key block from a finished tree or before the window is."""
    rng = np.random.default_rng(8)
    num_tokens, block = 256, 16
    end = np.concatenate([random_forest(rng, 64) + 64 * i for i in range(3)] + [np.full(64, 256, np.int32)])[None]
    offset, position = np.arange(num_tokens, dtype=np.int32)[None], positions_of(end[0])[None]
    _, k, v = inputs(rng, 1, 1, num_tokens, 1, 1, 4, jnp.float32)
    keys = _key_blocks(k, v, offset, end, position, block, window)
    seen = np.asarray(visible(offset, offset, end, position, position, window))[0].reshape(16, block, 16, block).any((1, 3))
    for i in range(16):
        queries = slice(i * block, (i + 1) * block)
        blocks, count = _visible_blocks(_Queries(offset[:, queries], position[:, queries]), keys, window)
        visited = set(np.asarray(blocks)[: int(count)].tolist())
        may_visit = set(range(i // 4 * 4, i + 1))
        if window and i >= 12:  # a chain of 64 tokens: the first of these queries sees 19 tokens back
            may_visit = set(range(max(12, i - 2), i + 1))
        assert set(np.flatnonzero(seen[i]).tolist()) <= visited <= may_visit


def test_lengths_and_trees_do_not_recompile():
    rng = np.random.default_rng(6)
    q, k, v = inputs(rng, 1, 100, 100, 2, 1, 8, jnp.float32)
    offset = jnp.arange(100, dtype=jnp.int32)[None]
    run = jax.jit(partial(blockwise_attention, scale=1.0, block_q=32, block_k=32))
    for num_valid in (100, 37, 1, 0):
        run(q, k, v, offset, offset, jnp.asarray(random_forest(rng, 100, num_valid))[None])
    assert run._cache_size() == 1


def test_heads_that_do_not_divide_are_refused():
    q, k, v = inputs(np.random.default_rng(7), 1, 8, 8, 3, 2, 8, jnp.float32)
    offset = jnp.arange(8)[None]
    with pytest.raises(ValueError, match="3 query heads"):
        blockwise_attention(q, k, v, offset, offset, offset + 1, scale=1.0, block_q=8, block_k=8)
