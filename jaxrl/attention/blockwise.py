"""Tree attention in plain JAX, block by block: memory linear in the number of tokens.

For each block of queries an online softmax runs over the blocks of keys that some query of it can
see; the backward pass recomputes the scores per block from the log-sum-exp (FlashAttention-2, Dao
2023). Which blocks are visited follows from the smallest and largest offsets per block, at run time:
the tree changes the trip counts, never a shape.

Letters: R rows, T tokens, H query heads, h KV heads, g query heads per KV head, D head size,
q and k the tokens of a block, n blocks.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NO_QUERY = -1  # a query offset that sees nothing
_LAST = np.iinfo(np.int32).max


def blockwise_attention(
    q: jax.Array,  # [R, Tq, H, D]
    k: jax.Array,  # [R, Tk, Hkv, D]
    v: jax.Array,  # [R, Tk, Hkv, D]
    q_offset: jax.Array,  # [R, Tq] int32
    k_offset: jax.Array,  # [R, Tk] int32
    subtree_end: jax.Array,  # [R, Tk] int32, exclusive
    *,
    scale: float,
    block_q: int,
    block_k: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns (output [R, Tq, H, D] in q's dtype, log-sum-exp of the scaled scores [R, Tq, H] in the
    accumulation dtype: float32, or float64 for float64 inputs). Both are differentiable in q, k, v.

    Key j is visible to query i iff ``k_offset[j] <= q_offset[i] < subtree_end[j]``, so the tokens of
    either side may be any selection of a row in any order. A query with a negative offset and a key
    with ``subtree_end <= k_offset`` are invalid: what they hold, NaN included, reaches no valid
    output or gradient. A query that sees no key gets output 0 and log-sum-exp -inf.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads")
    block_q, block_k = min(block_q, q.shape[1]), min(block_k, k.shape[1])
    return _attention(q, k, v, q_offset, k_offset, subtree_end, scale, block_q, block_k)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _attention(q, k, v, q_offset, k_offset, subtree_end, scale, block_q, block_k):
    return _forward(q, k, v, q_offset, k_offset, subtree_end, scale, block_q, block_k)[0]


def _forward(q, k, v, q_offset, k_offset, subtree_end, scale, block_q, block_k):
    query, key = _query_blocks(q, q_offset, k.shape[2], block_q), _key_blocks(k, v, k_offset, subtree_end, block_k)
    q_nRhgqD, offset_nRq = query
    k_nRhkD, v_nRhkD, _, _ = key
    dtype = _accumulation_dtype(q)

    def one_query_block(_, xs):
        q_RhgqD, offset_Rq = xs
        blocks, count = _visible_blocks(offset_Rq, key)

        def one_key_block(i, carry):
            top, total, acc = carry
            j = _block(blocks, i)
            scores, mask = _scores(q_RhgqD, offset_Rq, key, j, scale, dtype)
            scores = jnp.where(mask, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            # While nothing has been seen the maximum is -inf, and -inf - (-inf) would be NaN.
            base = jnp.where(new_top == -jnp.inf, 0, new_top)
            weights = jnp.exp(scores - base[..., None])
            decay = jnp.exp(top - base)
            total = total * decay + weights.sum(-1)
            values = jnp.einsum("Rhgqk,RhkD->RhgqD", weights.astype(v.dtype), _block(v_nRhkD, j), preferred_element_type=dtype)
            return new_top, total, acc * decay[..., None] + values

        stat = jnp.zeros(q_RhgqD.shape[:-1], dtype)
        start = (stat - jnp.inf, stat, jnp.zeros(q_RhgqD.shape, dtype))
        top, total, acc = lax.fori_loop(0, count, one_key_block, start)
        seen = total > 0
        total = jnp.where(seen, total, 1)
        return None, ((acc / total[..., None]).astype(q.dtype), jnp.where(seen, top + jnp.log(total), -jnp.inf))

    _, (out_nRhgqD, lse_nRhgq) = lax.scan(one_query_block, None, (q_nRhgqD, offset_nRq))
    out = _tokens(out_nRhgqD, q.shape[1])
    lse = _tokens(lse_nRhgq[..., None], q.shape[1])[..., 0]
    return (out, lse), (q, k, v, q_offset, k_offset, subtree_end, out, lse)


def _backward(scale, block_q, block_k, saved, cotangents):
    q, k, v, q_offset, k_offset, subtree_end, out, lse = saved
    d_out, d_lse = cotangents
    dtype = _accumulation_dtype(q)
    seen = (q_offset >= 0)[..., None] & (lse > -jnp.inf)
    # The softmax's row term: d_scores = weights * (d_weights - delta).
    delta = jnp.where(seen, (d_out.astype(dtype) * out.astype(dtype)).sum(-1) - d_lse, 0)
    lse = jnp.where(seen, lse, 0)

    hkv = k.shape[2]
    q_nRhgqD, offset_nRq = _query_blocks(q, q_offset, hkv, block_q)
    key = _key_blocks(k, v, k_offset, subtree_end, block_k)
    k_nRhkD, v_nRhkD, _, _ = key
    d_out_nRhgqD, _ = _query_blocks(jnp.where(seen[..., None], d_out, 0), q_offset, hkv, block_q)
    lse_nRhgq = _query_blocks(lse[..., None], q_offset, hkv, block_q)[0][..., 0]
    delta_nRhgq = _query_blocks(delta[..., None], q_offset, hkv, block_q)[0][..., 0]

    def one_query_block(carry, xs):
        q_RhgqD, offset_Rq, d_out_RhgqD, lse_Rhgq, delta_Rhgq = xs
        blocks, count = _visible_blocks(offset_Rq, key)

        def one_key_block(i, carry):
            dq, dk, dv = carry
            j = _block(blocks, i)
            scores, mask = _scores(q_RhgqD, offset_Rq, key, j, scale, dtype)
            weights = jnp.where(mask, jnp.exp(scores - lse_Rhgq[..., None]), 0)
            d_weights = jnp.einsum("RhgqD,RhkD->Rhgqk", d_out_RhgqD, _block(v_nRhkD, j), preferred_element_type=dtype)
            d_scores = (weights * (d_weights - delta_Rhgq[..., None]) * scale).astype(q.dtype)
            weights = weights.astype(q.dtype)
            dq += jnp.einsum("Rhgqk,RhkD->RhgqD", d_scores, _block(k_nRhkD, j), preferred_element_type=dtype)
            dk = _add_block(dk, j, jnp.einsum("Rhgqk,RhgqD->RhkD", d_scores, q_RhgqD, preferred_element_type=dtype))
            dv = _add_block(dv, j, jnp.einsum("Rhgqk,RhgqD->RhkD", weights, d_out_RhgqD, preferred_element_type=dtype))
            return dq, dk, dv

        dq, dk, dv = lax.fori_loop(0, count, one_key_block, (jnp.zeros(q_RhgqD.shape, dtype), *carry))
        return (dk, dv), dq.astype(q.dtype)

    start = (jnp.zeros(k_nRhkD.shape, dtype), jnp.zeros(v_nRhkD.shape, dtype))
    xs = (q_nRhgqD, offset_nRq, d_out_nRhgqD, lse_nRhgq, delta_nRhgq)
    (dk, dv), dq = lax.scan(one_query_block, start, xs)
    dk = _tokens(dk[:, :, :, None], k.shape[1]).astype(k.dtype)
    dv = _tokens(dv[:, :, :, None], v.shape[1]).astype(v.dtype)
    no_gradient = tuple(np.zeros(x.shape, jax.dtypes.float0) for x in (q_offset, k_offset, subtree_end))
    return _tokens(dq, q.shape[1]), dk, dv, *no_gradient


_attention.defvjp(_forward, _backward)


def _accumulation_dtype(x):
    return jnp.promote_types(x.dtype, jnp.float32)


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


def _query_blocks(x, q_offset, num_kv_heads, block):
    """[R, T, H, D] -> [n, R, h, g, q, D], zeros at invalid queries; offsets [n, R, q]."""
    x = _split(jnp.where((q_offset >= 0)[..., None, None], x, 0), block, 0)
    n, rows, _, heads, size = x.shape
    x = x.reshape(n, rows, block, num_kv_heads, heads // num_kv_heads, size)
    return x.transpose(0, 1, 3, 4, 2, 5), _split(q_offset, block, NO_QUERY)


def _key_blocks(k, v, k_offset, subtree_end, block):
    """k, v [R, T, h, D] -> [n, R, h, k, D], zeros at invalid keys; offsets and ends [n, R, k]."""
    valid = (k_offset < subtree_end)[..., None, None]
    k, v = (_split(jnp.where(valid, x, 0), block, 0).swapaxes(2, 3) for x in (k, v))
    return k, v, _split(k_offset, block, 0), _split(subtree_end, block, 0)


def _tokens(x, num_tokens):
    """[n, R, h, g, block, D] -> [R, T, h * g, D]: the inverse of the split."""
    n, rows, h, g, block, size = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(rows, n * block, h * g, size)[:, :num_tokens]


def _visible_blocks(offset_Rq, key):
    """The key blocks some query of this block may see, in order: (indices [n], how many of them count).

    A pair of blocks is empty if the last query comes before the first key, or if every subtree has
    ended at the first query; it is skipped if it is empty in every row.
    """
    _, _, k_nRk, end_nRk = key
    valid_Rq, valid_nRk = offset_Rq >= 0, k_nRk < end_nRk
    first_R, last_R = jnp.where(valid_Rq, offset_Rq, _LAST).min(-1), offset_Rq.max(-1)
    first_key_nR = jnp.where(valid_nRk, k_nRk, _LAST).min(-1)
    last_end_nR = jnp.where(valid_nRk, end_nRk, 0).max(-1)
    visible = ((first_key_nR <= last_R) & (last_end_nR > first_R)).any(-1)
    return jnp.nonzero(visible, size=visible.size, fill_value=0)[0], visible.sum(dtype=jnp.int32)


def _scores(q_RhgqD, offset_Rq, key, j, scale, dtype):
    """Scaled scores [R, h, g, q, k] against key block j, and their mask [R, 1, 1, q, k]."""
    k_nRhkD, _, k_nRk, end_nRk = key
    scores = jnp.einsum("RhgqD,RhkD->Rhgqk", q_RhgqD, _block(k_nRhkD, j), preferred_element_type=dtype) * scale
    offset = offset_Rq[:, :, None]
    mask = (_block(k_nRk, j)[:, None, :] <= offset) & (offset < _block(end_nRk, j)[:, None, :])
    return scores, mask[:, None, None]
