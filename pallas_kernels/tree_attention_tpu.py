"""Tree attention for TPUs: block-sparse Mosaic kernels, forward and backward.

Time follows the blocks of keys that some query of a tile can see; lengths, tokens and trees are data:
nothing recompiles when they change. This module lays the arrays out in tiles and back.

Key j is visible to query i iff ``k_offset[j] <= q_offset[i] < subtree_end[j]`` and, with a window,
``q_position[i] - k_position[j] < window``. A query with a negative offset and a key with
``subtree_end <= k_offset`` are invalid: what they hold, NaN included, reaches nothing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_lists import LARGE, visible_blocks, work_lists
from pallas_kernels.tree_backward_tpu import backward_keys, backward_queries
from pallas_kernels.tree_forward_tpu import forward_tiles
from pallas_kernels.tree_tiles_tpu import LANES, LOG2_E, Tiling

# Tokens × heads of a tile, and bytes of a head vector up to which that fits: the key gradients hold four
# tiles of scores and several buffers of operands in the 16 MB of vector memory a kernel gets by default.
_TILE_ROWS, _HEAD_BYTES = 1024, 512
_MAX_HEAD_DIM = 256


def refusal(head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why there is no kernel for these arrays; None if there is one."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"tree attention on TPU takes bfloat16 and float32, not {jnp.dtype(dtype).name}"
    if head_dim > _MAX_HEAD_DIM:
        return f"tree attention on TPU takes head sizes up to {_MAX_HEAD_DIM}, not {head_dim}"
    return None


def forward(
    q: jax.Array,  # [R, Tq, H, D]
    k: jax.Array,  # [R, Tk, Hkv, D]
    v: jax.Array,  # [R, Tk, Hkv, D]
    q_offset: jax.Array,  # [R, Tq] int32
    k_offset: jax.Array,  # [R, Tk] int32
    subtree_end: jax.Array,  # [R, Tk] int32, exclusive
    q_position: jax.Array | None,  # [R, Tq] int32, read with a window only
    k_position: jax.Array | None,  # [R, Tk] int32
    *,
    scale: float,
    window: int | None,
    block_q: int | None = None,  # tokens, a multiple of 128; None: as fits the shapes
    block_k: int | None = None,
    interpret: object = False,  # a pltpu.InterpretParams runs the kernels on a CPU
) -> tuple[jax.Array, jax.Array]:
    """(output [R, Tq, H, D] in q's dtype, log-sum-exp of the scaled scores [R, Tq, H] float32). A query
    that sees no key gets output 0 and log-sum-exp -inf. Raises ValueError for arrays without a kernel."""
    tiling = _tiling(q, k, v, q_position, k_position, scale, window, block_q, block_k, interpret)
    tiled = _tiles(q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, tiling)
    lists = work_lists(*visible_blocks(tiled.queries, tiled.keys, tiling.block_q, tiling.block_k, window))
    out, lse = forward_tiles(*tiled, lists, tiling)
    return _tokens_first(out, q.shape[1]), _from_row_tiles(lse, q.shape[1], tiling.block_q)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_offset: jax.Array,
    k_offset: jax.Array,
    subtree_end: jax.Array,
    q_position: jax.Array | None,
    k_position: jax.Array | None,
    out: jax.Array,  # [R, Tq, H, D], over all keys the queries see, of which these may be a part
    lse: jax.Array,  # [R, Tq, H], likewise
    d_out: jax.Array,
    d_lse: jax.Array,
    *,
    scale: float,
    window: int | None,
    block_q: int | None = None,
    block_k: int | None = None,
    interpret: object = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv) in the dtypes of q, k, v: these keys' share of dq, and their own gradients."""
    tiling = _tiling(q, k, v, q_position, k_position, scale, window, block_q, block_k, interpret)
    tiled = _tiles(q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, tiling)
    # Neither an invalid query's numbers nor those of one that saw nothing may enter, whatever they are.
    seen = (lse > -jnp.inf) & (q_offset >= 0)[..., None]
    d_out = jnp.where(seen[..., None], d_out, 0).astype(q.dtype)
    out = jnp.where(seen[..., None], out, 0)
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - jnp.where(seen, d_lse, 0)
    saved = (
        _query_tiles(d_out, tiling),
        _row_tiles(jnp.where(seen, lse * LOG2_E, 0), tiling),
        _row_tiles(delta, tiling),
    )
    visible, full = visible_blocks(tiled.queries, tiled.keys, tiling.block_q, tiling.block_k, window)
    dq = backward_queries(*tiled, *saved, work_lists(visible, full), tiling)
    dk, dv = backward_keys(*tiled, *saved, work_lists(visible.swapaxes(1, 2), full.swapaxes(1, 2)), tiling)
    dk, dv = (jnp.moveaxis(x, 1, 2)[:, : k.shape[1]] for x in (dk, dv))
    return _tokens_first(dq, q.shape[1]), dk, dv


class _Tiles(NamedTuple):
    """The arguments as the kernels take them: whole blocks, zeros in what is invalid."""

    q: jax.Array  # [R, H / g, g, Tq padded, D]
    k: jax.Array  # [R, Hkv, Tk padded, D]
    v: jax.Array  # [R, Hkv, Tk padded, D]
    queries: jax.Array  # [R, 1 or 2, Tq padded] int32, as `visible_blocks` takes them
    keys: jax.Array  # [R, 2 or 3, Tk padded] int32


def _tiles(q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, tiling) -> _Tiles:
    valid_q, valid_k = q_offset >= 0, k_offset < subtree_end
    queries = [(jnp.where(valid_q, q_offset, -LARGE), -LARGE)]
    keys = [(jnp.where(valid_k, k_offset, LARGE), LARGE), (jnp.where(valid_k, subtree_end, -LARGE), -LARGE)]
    if tiling.window is not None:
        queries, keys = [*queries, (q_position, 0)], [*keys, (k_position, 0)]
    q, k, v = (jnp.where(valid[..., None, None], x, 0) for valid, x in ((valid_q, q), (valid_k, k), (valid_k, v)))
    return _Tiles(
        _query_tiles(q, tiling),
        _key_tiles(k, tiling),
        _key_tiles(v, tiling),
        jnp.stack([_pad(x, tiling.block_q, fill) for x, fill in queries], 1),
        jnp.stack([_pad(x, tiling.block_k, fill) for x, fill in keys], 1),
    )


def _tiling(q, k, v, q_position, k_position, scale, window, block_q, block_k, interpret) -> Tiling:
    """A tile takes all heads that share a KV head, or the largest part of them that fits with 128 tokens
    each."""
    if (problem := refusal(q.shape[3], q.dtype)) is not None:
        raise ValueError(problem)
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: they must be of one dtype")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads")
    if window is not None and (q_position is None or k_position is None):
        raise ValueError("a window is counted in logical positions: give q_position and k_position")
    head_bytes = q.shape[3] * q.dtype.itemsize
    tile_rows = _TILE_ROWS if head_bytes <= _HEAD_BYTES else _TILE_ROWS // 2
    heads = q.shape[2] // k.shape[2]
    group = max(g for g in range(1, tile_rows // LANES + 1) if heads % g == 0)
    block_q = block_q or min(512, tile_rows // group // LANES * LANES)
    block_k = block_k or (512 if head_bytes < _HEAD_BYTES else 256)
    whole_q, whole_k = (math.ceil(x.shape[1] / LANES) * LANES for x in (q, k))
    return Tiling(min(block_q, whole_q), min(block_k, whole_k), group, scale, window, interpret)


def _pad(x, block, fill=0):
    """[R, T, ...] with T filled up to whole blocks."""
    widths = [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=fill)


def _query_tiles(x, tiling):
    """[R, T, H, D] -> [R, H / g, g, T padded, D]"""
    x = jnp.moveaxis(_pad(x, tiling.block_q), 1, 2)
    return x.reshape(x.shape[0], -1, tiling.group, *x.shape[2:])


def _key_tiles(x, tiling):
    """[R, T, h, D] -> [R, h, T padded, D]"""
    return jnp.moveaxis(_pad(x, tiling.block_k), 1, 2)


def _row_tiles(x, tiling):
    """[R, T, H] -> [R, H / g, n, 1, g · block]: a number per query of a tile, in the tile's order."""
    x = _query_tiles(x[..., None], tiling)[..., 0]
    x = x.reshape(*x.shape[:3], -1, tiling.block_q).swapaxes(2, 3)
    return x.reshape(*x.shape[:3], 1, -1)


def _from_row_tiles(x, num_tokens, block):
    """The inverse: [R, H / g, n, 1, g · block] -> [R, T, H]."""
    x = x.reshape(*x.shape[:3], -1, block).swapaxes(2, 3)
    return _tokens_first(x.reshape(*x.shape[:3], -1), num_tokens)


def _tokens_first(x, num_tokens):
    """[R, H / g, g, T padded, ...] -> [R, T, H, ...]"""
    x = x.reshape(x.shape[0], -1, *x.shape[3:])
    return jnp.moveaxis(x, 2, 1)[:, :num_tokens]
