"""The TPU kernels under the TPU interpreter against the reference: output, log-sum-exp, every gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from tpu_topology import kernels_for

from jaxrl.attention.kernel import Kernel, differentiable
from jaxrl.attention.naive import naive_attention
from pallas_kernels.block_lists import LARGE, visible_blocks, work_lists
from pallas_kernels.tree_attention_tpu import backward, forward


def random_tree(rng, num_tokens, longest):
    """(subtree_end, position) of trees in pre-order whose segments have 1 … `longest` tokens, one third
    of them a single one."""
    end, position, path = np.empty(num_tokens, np.int32), np.empty(num_tokens, np.int32), []
    start = 0
    while start < num_tokens:
        length = min(1 if rng.random() < 1 / 3 else rng.integers(1, longest + 1), num_tokens - start)
        first = sum(n for _, n in path)
        position[start : start + length] = first + np.arange(length)
        path.append((start, length))
        start += length
        while path and (start == num_tokens or rng.random() < 0.45):
            begin, n = path.pop()
            end[begin : begin + n] = start
    for begin, n in path:
        end[begin : begin + n] = num_tokens
    return end, position


def random_case(seed, rows, num_tokens, heads, kv_heads, size, dtype, longest, shuffle):
    """(tensors, integers, cotangents, valid tokens): trees over half of a row, invalid tokens strewn in."""
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, num_tokens, longest) for _ in range(rows)]
    end, position = (np.stack(x) for x in zip(*trees, strict=True))
    offset = np.broadcast_to(np.arange(num_tokens, dtype=np.int32), end.shape)
    invalid = rng.random(end.shape) < 0.1
    invalid[:, num_tokens // 3 : num_tokens // 3 + num_tokens // 4] = True  # whole blocks of them
    order = np.stack([rng.permutation(num_tokens) if shuffle else np.arange(num_tokens) for _ in range(rows)])
    q_offset = np.where(invalid, -1, offset)
    end = np.where(invalid, offset, end)
    integers = [np.take_along_axis(x, order, 1) for x in (q_offset, offset, end, position, position)]
    invalid = np.take_along_axis(invalid, order, 1)

    def normal(heads):
        return jnp.asarray(rng.normal(size=(rows, num_tokens, heads, size)), dtype)

    tensors, cotangents = (normal(heads), normal(kv_heads), normal(kv_heads)), (normal(heads), normal(heads)[..., 0])
    return tensors, [jnp.asarray(x) for x in integers], (cotangents[0], cotangents[1].astype(jnp.float32)), ~invalid


def with_gradients(attention):
    @jax.jit
    def run(tensors, integers, cotangents):
        (out, lse), vjp = jax.vjp(lambda *x: attention(*x, *integers), *tensors)
        return out, lse, *vjp((cotangents[0].astype(out.dtype), cotangents[1]))

    return run


def the_kernel(scale, window, **settings):
    kernel = Kernel(*(partial(f, **{"interpret": pltpu.InterpretParams()} | settings) for f in (forward, backward)))
    return with_gradients(differentiable(kernel, scale=scale, window=window))


def check(kernel, case, bound, *, scale, window):
    tensors, integers, cotangents, valid = case
    reference = with_gradients(partial(naive_attention, scale=scale, window=window))
    expected = reference([x.astype(jnp.float32) for x in tensors], integers, cotangents)
    poisoned = [jnp.where(valid[..., None, None], x, jnp.nan) for x in tensors]
    with kernels_for("TPU v5"):
        results = kernel(poisoned, integers, cotangents)
    np.testing.assert_array_equal(np.isinf(results[1]), np.isinf(expected[1]))
    assert np.isinf(results[1]).any() and np.all(np.asarray(results[0])[~valid] == 0)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), results, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        finite = np.isfinite(b)
        assert np.isfinite(a[finite]).all() and b[finite].any(), name
        assert np.linalg.norm(a[finite] - b[finite]) < bound * np.linalg.norm(b[finite]), name


def test_one_compilation_serves_every_tree_and_every_order_of_tokens():
    settings = {"scale": 0.125, "window": None}
    kernel = the_kernel(**settings, block_q=128, block_k=128)
    check(kernel, random_case(0, 1, 300, 2, 1, 64, jnp.float32, longest=150, shuffle=False), 2e-6, **settings)
    check(kernel, random_case(1, 1, 300, 2, 1, 64, jnp.float32, longest=20, shuffle=True), 2e-6, **settings)
    assert kernel._cache_size() == 1


def test_heads_beyond_a_tile_window_and_bfloat16_without_races(capfd):
    settings = {"scale": 128**-0.5, "window": 7}
    kernel = the_kernel(**settings, interpret=pltpu.InterpretParams(detect_races=True))
    case = random_case(2, 2, 63, 16, 1, 128, jnp.bfloat16, longest=12, shuffle=False)
    # bfloat16 keeps 8 bits: 0.4% in the weights, in the operands of each gradient and in the result.
    check(kernel, case, 1e-2, **settings)
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_a_thousand_tokens_in_a_window():
    settings = {"scale": 96**-0.5, "window": 150}
    kernel = the_kernel(**settings, block_q=256, block_k=384)
    check(kernel, random_case(3, 1, 1000, 1, 1, 96, jnp.float32, longest=300, shuffle=False), 2e-6, **settings)


def test_lists_hold_what_is_visible_and_no_more():
    """Bounds against the mask itself: a block with a visible pair is listed, a full one has only such."""
    window, block_q, block_k = 40, 4, 8
    _, (q_offset, k_offset, end, position, _), _, valid = random_case(4, 2, 400, 1, 1, 2, jnp.float32, 60, shuffle=False)
    queries = jnp.stack([jnp.where(valid, q_offset, -LARGE), position], 1)
    keys = jnp.stack([jnp.where(valid, k_offset, LARGE), jnp.where(valid, end, -LARGE), position], 1)
    visible, full = visible_blocks(queries, keys, block_q, block_k, window)
    q, p = np.asarray(q_offset)[:, :, None], np.asarray(position)
    mask = (np.asarray(k_offset)[:, None] <= q) & (q < np.asarray(end)[:, None]) & (p[:, :, None] - p[:, None] < window)
    blocks = mask.reshape(2, 100, block_q, 50, block_k)
    assert np.all(np.asarray(visible) >= blocks.any((2, 4)))
    assert np.all(np.asarray(full) <= blocks.all((2, 4))) and full.any() and (visible & ~full).any()
    assert np.asarray(visible).sum() < 1.5 * blocks.any((2, 4)).sum(), "bounds are tight in pre-order"

    lists = work_lists(visible, full)
    words, start = np.asarray(lists.words), np.asarray(lists.start)
    for row in range(2):
        for block in range(100):
            chunk, i = divmod(block, lists.chunk)
            begin, stop = start[row, chunk, i : i + 2]
            seen = np.flatnonzero(visible[row, block])
            expected = [j << 2 | int(full[row, block, j]) for j in seen] or [2]
            assert words[row, chunk, i, : stop - begin].tolist() == expected


@pytest.mark.parametrize(
    "dtype, heads, size, window, message",
    [
        (jnp.float16, 2, 64, None, "takes bfloat16 and float32, not float16"),
        (jnp.float32, 2, 512, None, "head sizes up to 256, not 512"),
        (jnp.float32, 3, 64, None, "3 query heads are not a multiple of 2 KV heads"),
        (jnp.float32, 2, 64, 5, "give q_position and k_position"),
    ],
)
def test_what_it_cannot_take_is_refused(dtype, heads, size, window, message):
    q, k, offset = jnp.zeros((1, 8, heads, size), dtype), jnp.zeros((1, 8, 2, size), dtype), jnp.zeros((1, 8), jnp.int32)
    with pytest.raises(ValueError, match=message):
        forward(q, k, k, offset, offset, offset, None, None, scale=1.0, window=window)
