"""Tree attention in plain JAX, block by block: memory linear in the number of tokens.

For each block of queries an online softmax runs over the blocks of keys that some query of it can
see; the backward pass recomputes the scores per block from the log-sum-exp (FlashAttention-2, Dao
2023). Which blocks are visited follows from the smallest and largest offsets and positions per block, at
run time: the tree changes the trip counts, never a shape.

Letters: R rows, T tokens, H query heads, h KV heads, g query heads per KV head, D head size,
q and k the tokens of a block, n blocks.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.attention.kernel import Kernel, accumulation_dtype, differentiable

NO_QUERY = -1  # a query offset that sees nothing
_LAST = np.iinfo(np.int32).max


def blockwise(block_q: int, block_k: int) -> Kernel:
    """The kernel with these blocks, or smaller ones where there are fewer tokens."""
    blocks = {"block_q": block_q, "block_k": block_k}
    return Kernel(partial(_forward, **blocks), partial(_backward, **blocks))


def blockwise_attention(
    q: jax.Array,  # [R, Tq, H, D]
    k: jax.Array,  # [R, Tk, Hkv, D]
    v: jax.Array,  # [R, Tk, Hkv, D]
    q_offset: jax.Array,  # [R, Tq] int32
    k_offset: jax.Array,  # [R, Tk] int32
    subtree_end: jax.Array,  # [R, Tk] int32, exclusive
    q_position: jax.Array | None = None,  # [R, Tq] int32
    k_position: jax.Array | None = None,  # [R, Tk] int32
    *,
    scale: float,
    window: int | None = None,
    block_q: int,
    block_k: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns (output [R, Tq, H, D] in q's dtype, log-sum-exp of the scaled scores [R, Tq, H] in the
    accumulation dtype: float32, or float64 for float64 inputs). Both are differentiable in q, k, v.
    The semantic is that of every kernel, see `jaxrl.attention.kernel`.
    """
    attend = differentiable(blockwise(block_q, block_k), scale=scale, window=window)
    return attend(q, k, v, q_offset, k_offset, subtree_end, q_position, k_position)


class _Keys(NamedTuple):
    """The key side in n blocks, zeros at invalid keys."""

    k: jax.Array  # [n, R, h, k, D]
    v: jax.Array  # [n, R, h, k, D]
    offset: jax.Array  # [n, R, k]
    end: jax.Array  # [n, R, k]
    position: jax.Array | None  # [n, R, k], with a window


class _Queries(NamedTuple):
    """Where the queries of a block are, or of n blocks with a leading n."""

    offset: jax.Array  # [R, q]
    position: jax.Array | None  # [R, q], with a window


def _forward(
    q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, *, scale, window, block_q, block_k
):  # fmt: skip
    q_nRhgqD, queries = _query_blocks(q, q_offset, q_position, k.shape[2], block_q, window)
    keys = _key_blocks(k, v, k_offset, subtree_end, k_position, block_k, window)
    dtype = accumulation_dtype(q)

    def one_query_block(_, xs):
        q_RhgqD, queries = xs
        blocks, count = _visible_blocks(queries, keys, window)

        def one_key_block(i, carry):
            top, total, acc = carry
            j = _block(blocks, i)
            scores, mask = _scores(q_RhgqD, queries, keys, j, scale, window, dtype)
            scores = jnp.where(mask, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            # While nothing has been seen the maximum is -inf, and -inf - (-inf) would be NaN.
            base = jnp.where(new_top == -jnp.inf, 0, new_top)
            weights = jnp.exp(scores - base[..., None])
            decay = jnp.exp(top - base)
            total = total * decay + weights.sum(-1)
            values = jnp.einsum("Rhgqk,RhkD->RhgqD", weights.astype(v.dtype), _block(keys.v, j), preferred_element_type=dtype)
            return new_top, total, acc * decay[..., None] + values

        stat = jnp.zeros(q_RhgqD.shape[:-1], dtype)
        start = (stat - jnp.inf, stat, jnp.zeros(q_RhgqD.shape, dtype))
        top, total, acc = lax.fori_loop(0, count, one_key_block, start)
        seen = total > 0
        total = jnp.where(seen, total, 1)
        return None, ((acc / total[..., None]).astype(q.dtype), jnp.where(seen, top + jnp.log(total), -jnp.inf))

    _, (out_nRhgqD, lse_nRhgq) = lax.scan(one_query_block, None, (q_nRhgqD, queries))
    return _tokens(out_nRhgqD, q.shape[1]), _tokens(lse_nRhgq[..., None], q.shape[1])[..., 0]


def _backward(
    q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, out, lse, d_out, d_lse,
    *, scale, window, block_q, block_k,
):  # fmt: skip
    dtype = accumulation_dtype(q)
    seen = (q_offset >= 0)[..., None] & (lse > -jnp.inf)
    # The softmax's row term: d_scores = weights * (d_weights - delta).
    delta = jnp.where(seen, (d_out.astype(dtype) * out.astype(dtype)).sum(-1) - d_lse, 0)
    lse = jnp.where(seen, lse, 0)

    def query_blocks(x):
        return _query_blocks(x, q_offset, q_position, k.shape[2], block_q, window)

    q_nRhgqD, queries = query_blocks(q)
    keys = _key_blocks(k, v, k_offset, subtree_end, k_position, block_k, window)
    d_out_nRhgqD, _ = query_blocks(jnp.where(seen[..., None], d_out, 0))
    lse_nRhgq, delta_nRhgq = (query_blocks(x[..., None])[0][..., 0] for x in (lse, delta))

    def one_query_block(carry, xs):
        q_RhgqD, queries, d_out_RhgqD, lse_Rhgq, delta_Rhgq = xs
        blocks, count = _visible_blocks(queries, keys, window)

        def one_key_block(i, carry):
            dq, dk, dv = carry
            j = _block(blocks, i)
            scores, mask = _scores(q_RhgqD, queries, keys, j, scale, window, dtype)
            weights = jnp.where(mask, jnp.exp(scores - lse_Rhgq[..., None]), 0)
            d_weights = jnp.einsum("RhgqD,RhkD->Rhgqk", d_out_RhgqD, _block(keys.v, j), preferred_element_type=dtype)
            d_scores = (weights * (d_weights - delta_Rhgq[..., None]) * scale).astype(q.dtype)
            weights = weights.astype(q.dtype)
            dq += jnp.einsum("Rhgqk,RhkD->RhgqD", d_scores, _block(keys.k, j), preferred_element_type=dtype)
            dk = _add_block(dk, j, jnp.einsum("Rhgqk,RhgqD->RhkD", d_scores, q_RhgqD, preferred_element_type=dtype))
            dv = _add_block(dv, j, jnp.einsum("Rhgqk,RhgqD->RhkD", weights, d_out_RhgqD, preferred_element_type=dtype))
            return dq, dk, dv

        dq, dk, dv = lax.fori_loop(0, count, one_key_block, (jnp.zeros(q_RhgqD.shape, dtype), *carry))
        return (dk, dv), dq

    start = (jnp.zeros(keys.k.shape, dtype), jnp.zeros(keys.v.shape, dtype))
    (dk, dv), dq = lax.scan(one_query_block, start, (q_nRhgqD, queries, d_out_nRhgqD, lse_nRhgq, delta_nRhgq))
    return _tokens(dq, q.shape[1]), *(_tokens(x[:, :, :, None], k.shape[1]) for x in (dk, dv))


def _block(x, j):
    return lax.dynamic_index_in_dim(x, j, keepdims=False)


def _add_block(x, j, update):
    # An update in place of one slice; x.at[j].add would be a scatter.
    return lax.dynamic_update_index_in_dim(x, _block(x, j) + update, j, 0)


def _split(x, block, fill):
    """[R, T, ...] -> [n, R, block, ...], the last block filled up."""
    num_blocks = math.ceil(x.shape[1] / block)
    x = jnp.pad(x, [(0, 0), (0, num_blocks * block - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], num_blocks, block, *x.shape[2:]), 1, 0)


def _query_blocks(x, q_offset, q_position, num_kv_heads, block, window):
    """[R, T, H, D] -> [n, R, h, g, q, D], zeros at invalid queries; and their places."""
    block = min(block, x.shape[1])
    x = _split(jnp.where((q_offset >= 0)[..., None, None], x, 0), block, 0)
    n, rows, _, heads, size = x.shape
    if heads % num_kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {num_kv_heads} KV heads")
    x = x.reshape(n, rows, block, num_kv_heads, heads // num_kv_heads, size)
    position = None if window is None else _split(q_position, block, 0)
    return x.transpose(0, 1, 3, 4, 2, 5), _Queries(_split(q_offset, block, NO_QUERY), position)


def _key_blocks(k, v, k_offset, subtree_end, k_position, block, window):
    """k, v [R, T, h, D] and the places of keys, in blocks."""
    block = min(block, k.shape[1])
    valid = (k_offset < subtree_end)[..., None, None]
    k, v = (_split(jnp.where(valid, x, 0), block, 0).swapaxes(2, 3) for x in (k, v))
    position = None if window is None else _split(k_position, block, 0)
    return _Keys(k, v, _split(k_offset, block, 0), _split(subtree_end, block, 0), position)


def _tokens(x, num_tokens):
    """[n, R, h, g, block, D] -> [R, T, h * g, D]: the inverse of the split."""
    n, rows, h, g, block, size = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(rows, n * block, h * g, size)[:, :num_tokens]


def _visible_blocks(queries, keys, window):
    """The key blocks some query of this block may see, in order: (indices [n], how many of them count).

    A pair of blocks is empty if the last query comes before the first key, if every subtree has ended at
    the first query, or if the last position of a key is out of the window at the first of a query. It is
    skipped if it is empty in every row.
    """
    valid_Rq, valid_nRk = queries.offset >= 0, keys.offset < keys.end
    first_R, last_R = jnp.where(valid_Rq, queries.offset, _LAST).min(-1), queries.offset.max(-1)
    first_key_nR = jnp.where(valid_nRk, keys.offset, _LAST).min(-1)
    last_end_nR = jnp.where(valid_nRk, keys.end, 0).max(-1)
    visible = (first_key_nR <= last_R) & (last_end_nR > first_R)
    if window is not None:
        first_position_R = jnp.where(valid_Rq, queries.position, _LAST).min(-1)
        last_position_nR = jnp.where(valid_nRk, keys.position, -_LAST).max(-1)
        visible &= first_position_R < last_position_nR + window
    visible = visible.any(-1)
    return jnp.nonzero(visible, size=visible.size, fill_value=0)[0], visible.sum(dtype=jnp.int32)


def _scores(q_RhgqD, queries, keys, j, scale, window, dtype):
    """Scaled scores [R, h, g, q, k] against key block j, and their mask [R, 1, 1, q, k]."""
    scores = jnp.einsum("RhgqD,RhkD->Rhgqk", q_RhgqD, _block(keys.k, j), preferred_element_type=dtype) * scale
    offset = queries.offset[:, :, None]
    mask = (_block(keys.offset, j)[:, None, :] <= offset) & (offset < _block(keys.end, j)[:, None, :])
    if window is not None:
        mask &= queries.position[:, :, None] - _block(keys.position, j)[:, None, :] < window
    return scores, mask[:, None, None]
