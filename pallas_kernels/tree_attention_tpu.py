"""Tree attention for TPUs: block-sparse Mosaic kernels, forward and backward.

Same semantic and signature as every implementation of it. Time follows the blocks that some query of
a tile can see; lengths, tokens and trees are data: nothing recompiles when they change.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_lists import LARGE, visible_blocks, work_lists
from pallas_kernels.tree_backward_tpu import backward_keys, backward_queries
from pallas_kernels.tree_forward_tpu import forward
from pallas_kernels.tree_tiles_tpu import LANES, LOG2_E, Tiling

# Tokens × heads of a tile, and bytes of a head vector up to which that fits: the key gradients hold four
# tiles of scores and several buffers of operands in the 16 MB of vector memory a kernel gets by default.
_TILE_ROWS, _HEAD_BYTES = 1024, 512


def tree_attention_tpu(
    q: jax.Array,  # [R, Tq, H, D]
    k: jax.Array,  # [R, Tk, Hkv, D]
    v: jax.Array,  # [R, Tk, Hkv, D]
    q_offset: jax.Array,  # [R, Tq] int32
    k_offset: jax.Array,  # [R, Tk] int32
    subtree_end: jax.Array,  # [R, Tk] int32, exclusive
    q_position: jax.Array | None = None,  # [R, Tq] int32; read with a window only
    k_position: jax.Array | None = None,  # [R, Tk] int32
    *,
    scale: float,
    window: int | None = None,
    block_q: int | None = None,  # tokens, a multiple of 128; None: as fits the shapes
    block_k: int | None = None,
    interpret: object = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (output [R, Tq, H, D] in q's dtype, log-sum-exp of the scaled scores [R, Tq, H] float32).
    Both are differentiable in q, k, v. Inputs are bfloat16 or float32; products accumulate in float32.

    Key j is visible to query i iff ``k_offset[j] <= q_offset[i] < subtree_end[j]`` and, with a window,
    ``q_position[i] - k_position[j] < window``. A query with a negative offset and a key with
    ``subtree_end <= k_offset`` are invalid: what they hold, NaN included, reaches nothing. A query
    that sees no key gets output 0 and log-sum-exp -inf. `interpret`: a pltpu.InterpretParams runs the
    kernels on a CPU.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float32) or q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(
            f"q {q.dtype}, k {k.dtype}, v {v.dtype}: tree attention on TPU takes all in bfloat16 or all in float32"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads")
    if window is not None and (q_position is None or k_position is None):
        raise ValueError("a sliding window needs q_position and k_position")
    group, block_q, block_k = _blocks(q, k, block_q, block_k)
    tiling = Tiling(block_q, block_k, scale, window, interpret)

    valid_q, valid_k = q_offset >= 0, k_offset < subtree_end
    queries = [jnp.where(valid_q, q_offset, -LARGE)]
    keys = [jnp.where(valid_k, k_offset, LARGE), jnp.where(valid_k, subtree_end, -LARGE)]
    if window is not None:
        queries, keys = [*queries, q_position], [*keys, k_position]
    queries = _pad(jnp.stack(queries, 1), block_q, 2, -LARGE)
    # A padding key is invalid by its offset; its end and its position follow from that one fill.
    keys = jnp.stack(keys, 1)
    fill = jnp.array([LARGE, -LARGE, 0][: keys.shape[1]], jnp.int32)[None, :, None]
    padding = -keys.shape[2] % block_k
    keys = jnp.concatenate([keys, jnp.broadcast_to(fill, (*keys.shape[:2], padding))], 2)

    q, k, v = (jnp.where(valid[..., None, None], x, 0) for valid, x in ((valid_q, q), (valid_k, k), (valid_k, v)))
    return _attention(q, k, v, queries, keys, group, tiling)


def _blocks(q, k, block_q, block_k):
    """(query heads of a tile, block_q, block_k): a tile takes all heads that share a KV head, or the
    largest part of them that fits with 128 tokens each."""
    head_bytes = q.shape[3] * q.dtype.itemsize
    tile_rows = _TILE_ROWS if head_bytes <= _HEAD_BYTES else _TILE_ROWS // 2
    heads = q.shape[2] // k.shape[2]
    group = max(g for g in range(1, tile_rows // LANES + 1) if heads % g == 0)
    block_q = block_q or min(512, tile_rows // group // LANES * LANES)
    block_k = block_k or (512 if head_bytes < _HEAD_BYTES else 256)
    whole_q, whole_k = (math.ceil(x.shape[1] / LANES) * LANES for x in (q, k))
    return group, min(block_q, whole_q), min(block_k, whole_k)


def _pad(x, block, axis, fill=0):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, constant_values=fill)


def _query_tiles(x, block, group):
    """[R, T, H, D] -> [R, H / g, g, T padded, D]"""
    x = jnp.moveaxis(_pad(x, block, 1), 1, 2)
    return x.reshape(x.shape[0], -1, group, *x.shape[2:])


def _key_tiles(x, block):
    """[R, T, h, D] -> [R, h, T padded, D]"""
    return jnp.moveaxis(_pad(x, block, 1), 1, 2)


def _row_tiles(x, block, group):
    """[R, T, H] -> [R, H / g, n, 1, g · block]: a number per query of a tile, in the tile's order."""
    x = _query_tiles(x[..., None], block, group)[..., 0]
    x = x.reshape(*x.shape[:3], -1, block).swapaxes(2, 3)
    return x.reshape(*x.shape[:3], 1, -1)


def _from_row_tiles(x, num_tokens, block):
    """The inverse: [R, H / g, n, 1, g · block] -> [R, T, H]."""
    x = x.reshape(*x.shape[:3], -1, block).swapaxes(2, 3)
    return _tokens_first(x.reshape(*x.shape[:3], -1), num_tokens)


def _tokens_first(x, num_tokens):
    """[R, H / g, g, T padded, ...] -> [R, T, H, ...]"""
    x = x.reshape(x.shape[0], -1, *x.shape[3:])
    return jnp.moveaxis(x, 2, 1)[:, :num_tokens]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q, k, v, queries, keys, group, tiling):
    return _forward(q, k, v, queries, keys, group, tiling)[0]


def _forward(q, k, v, queries, keys, group, tiling):
    lists = work_lists(*visible_blocks(queries, keys, tiling.block_q, tiling.block_k, tiling.window))
    k_tiles, v_tiles = _key_tiles(k, tiling.block_k), _key_tiles(v, tiling.block_k)
    out, lse = forward(_query_tiles(q, tiling.block_q, group), k_tiles, v_tiles, queries, keys, lists, tiling)
    out, lse = _tokens_first(out, q.shape[1]), _from_row_tiles(lse, q.shape[1], tiling.block_q)
    return (out, lse), (q, k, v, queries, keys, out, lse)


def _backward(group, tiling, saved, cotangents):
    q, k, v, queries, keys, out, lse = saved
    d_out, d_lse = cotangents
    seen = lse > -jnp.inf
    d_out = jnp.where(seen[..., None], d_out, 0)
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - jnp.where(seen, d_lse, 0)
    lse = jnp.where(seen, lse * LOG2_E, 0)

    visible, full = visible_blocks(queries, keys, tiling.block_q, tiling.block_k, tiling.window)
    operands = (
        _query_tiles(q, tiling.block_q, group),
        _key_tiles(k, tiling.block_k),
        _key_tiles(v, tiling.block_k),
        _query_tiles(d_out, tiling.block_q, group),
        _row_tiles(lse, tiling.block_q, group),
        _row_tiles(delta, tiling.block_q, group),
        queries,
        keys,
    )
    dq = backward_queries(*operands, work_lists(visible, full), tiling)
    dk, dv = backward_keys(*operands, work_lists(visible.swapaxes(1, 2), full.swapaxes(1, 2)), tiling)
    dk, dv = (jnp.moveaxis(x, 1, 2)[:, : k.shape[1]] for x in (dk, dv))
    no_gradient = tuple(np.zeros(x.shape, jax.dtypes.float0) for x in (queries, keys))
    return _tokens_first(dq, q.shape[1]), dk, dv, *no_gradient


_attention.defvjp(_forward, _backward)
