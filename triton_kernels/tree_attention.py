"""Tree attention on NVIDIA GPUs through jax-triton: forward and backward, deterministic, without atomics.

The backward pass is two kernels, dq over query tiles and dk, dv over key tiles (the structure of FlashAttention-2, Dao 2023),
each of which recomputes the scores from the log-sum-exp. Which blocks meet is read from lists (`block_lists`), so a tree costs what
its visible tiles cost and its shape is data.

Key j is visible to query i iff ``k_offset[j] <= q_offset[i] < subtree_end[j]`` and, with a window,
``q_position[i] - k_position[j] < window``. A query with a negative offset and a key with ``subtree_end <= k_offset`` are invalid:
what they hold, NaN included, reaches no valid result.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from triton_kernels.block_lists import BlockLists, block_lists
from triton_kernels.launch import triton_call
from triton_kernels.tree_attention_kernels import dkdv_kernel, dq_kernel, forward_kernel

LOG2E = math.log2(math.e)
HEAD_DIMS = (64, 96, 128, 256)
_PADDING = 128  # every tile divides it
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Tile:
    """A kernel's tile and how it is compiled. Sizes are powers of two."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    forward: Tile
    dq: Tile
    dkdv: Tile


def default_tiles(head_dim: int, dtype: jnp.dtype) -> Tiles:
    """What measured fastest on an H200 among what fits its registers and shared memory."""
    if jnp.dtype(dtype) == jnp.float32:
        small = Tile(32, 32, 4, 1) if head_dim <= 128 else Tile(16, 16, 4, 1)
        return Tiles(small, small, small)
    if head_dim > 128:
        return Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 8, 1))
    return Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))


def refusal(head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why there is no kernel for these arrays; None if there is one."""
    if jnp.dtype(dtype).name in DTYPES and head_dim in HEAD_DIMS:
        return None
    return f"Triton tree attention takes {', '.join(DTYPES)} and head sizes {HEAD_DIMS}, not {jnp.dtype(dtype).name} and {head_dim}"


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
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(output [R, Tq, H, D] in q's dtype, natural log-sum-exp of the scaled scores [R, Tq, H] float32). A query that sees
    nothing gets output 0 and log-sum-exp -inf. Raises ValueError for a dtype or head size without a kernel."""
    problem = _prepare(q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, window, tiles)
    num_rows, num_queries, num_heads, head_dim = problem.q.shape
    out_type = (
        jax.ShapeDtypeStruct((num_rows * num_queries, num_heads * head_dim), q.dtype),
        jax.ShapeDtypeStruct((num_heads, num_rows * num_queries), jnp.float32),
    )
    tile = problem.tiles.forward
    grid = num_heads * num_rows * num_queries // tile.queries
    lists, _ = problem.lists(tile)
    out, lse2 = _call(forward_kernel, problem, tile, lists, (scale * LOG2E,), out_type, grid)
    lse = (lse2 / LOG2E).T.reshape(num_rows, num_queries, num_heads)
    return out.reshape(problem.q.shape)[:, : q.shape[1], :, : q.shape[3]], lse[:, : q.shape[1]]


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
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv) in the dtypes of q, k, v: these keys' share of dq, and their own gradients."""
    problem = _prepare(q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, window, tiles)
    num_rows, num_queries, num_heads, head_dim = problem.q.shape
    seen = lse > -jnp.inf
    d_out = jnp.where(seen[..., None], d_out, 0)
    # The softmax's row term: d_scores = weights * (d_weights - delta).
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d_lse
    delta, lse2 = (_by_head(jnp.where(seen, x, 0), num_queries) for x in (delta, lse * LOG2E))
    d_out = _padded(d_out.astype(q.dtype), num_queries, head_dim)
    given = (scale * LOG2E, scale, d_out.reshape(-1, num_heads * head_dim), lse2, delta)
    q_type = jax.ShapeDtypeStruct((num_rows * num_queries, num_heads * head_dim), q.dtype)
    kv_type = jax.ShapeDtypeStruct((num_rows * problem.k.shape[1], k.shape[2] * head_dim), k.dtype)
    tile = problem.tiles.dq
    lists, _ = problem.lists(tile)
    (dq,) = _call(dq_kernel, problem, tile, lists, given, (q_type,), num_heads * q_type.shape[0] // tile.queries)
    tile = problem.tiles.dkdv
    _, lists = problem.lists(tile)
    grid = k.shape[2] * kv_type.shape[0] // tile.keys
    dk, dv = _call(dkdv_kernel, problem, tile, lists, given, (kv_type, kv_type), grid)
    shapes = (problem.q.shape, problem.k.shape, problem.k.shape)
    gradients = (x.reshape(shape) for x, shape in zip((dq, dk, dv), shapes, strict=True))
    return tuple(g[:, : x.shape[1], :, : x.shape[3]] for g, x in zip(gradients, (q, k, v), strict=True))


@dataclass(frozen=True)
class _Problem:
    """The arguments as the kernels take them: whole tiles, head sizes that are powers of two, zeros in what is invalid."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_offset: jax.Array
    k_offset: jax.Array
    subtree_end: jax.Array
    q_position: jax.Array | None
    k_position: jax.Array | None
    window: int | None
    tiles: Tiles

    def lists(self, tile: Tile) -> tuple[BlockLists, BlockLists]:
        tokens = (self.q_offset, self.k_offset, self.subtree_end, self.q_position, self.k_position)
        return block_lists(*tokens, self.window, tile.queries, tile.keys)

    def tokens(self) -> tuple[jax.Array, ...]:
        """q_offset, k_offset, reach (0: seen by nothing), q_position, k_position, all [R * T]."""
        reach = jnp.maximum(self.subtree_end - self.k_offset, 0)
        positions = (self.q_offset, self.k_offset) if self.window is None else (self.q_position, self.k_position)  # or unread
        return tuple(x.reshape(-1) for x in (self.q_offset, self.k_offset, reach, *positions))


def _prepare(q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, window, tiles) -> _Problem:
    head_dim = q.shape[3]
    if (problem := refusal(head_dim, q.dtype)) is not None:
        raise ValueError(problem)
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads")
    num_queries, num_keys = (-(-x.shape[1] // _PADDING) * _PADDING for x in (q, k))
    head_dim = 1 << (head_dim - 1).bit_length()
    q = _padded(jnp.where((q_offset >= 0)[..., None, None], q, 0), num_queries, head_dim)
    valid = (k_offset < subtree_end)[..., None, None]
    k, v = (_padded(jnp.where(valid, x, 0), num_keys, head_dim) for x in (k, v))
    q_offset = _filled(q_offset, num_queries, -1)
    k_offset, subtree_end = (_filled(x, num_keys, 0) for x in (k_offset, subtree_end))
    if window is not None:
        q_position, k_position = _filled(q_position, num_queries, 0), _filled(k_position, num_keys, 0)
    tiles = tiles or default_tiles(head_dim, q.dtype)
    return _Problem(q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, window, tiles)


def _call(kernel, problem: _Problem, tile: Tile, lists: BlockLists, given, out_type, grid: int) -> tuple[jax.Array, ...]:
    q, k, v = problem.q, problem.k, problem.v
    num_rows, num_queries, num_heads, head_dim = q.shape
    return triton_call(
        *(x.reshape(-1, x.shape[2] * head_dim) for x in (q, k, v)),
        *problem.tokens(),
        *lists,
        *given,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        NUM_ROWS=num_rows,
        TQ=num_queries,
        TK=k.shape[1],
        H=num_heads,
        HKV=k.shape[2],
        D=head_dim,
        M=tile.queries,
        N=tile.keys,
        WINDOW=problem.window or 0,
        PRECISION="tf32x3" if q.dtype == jnp.float32 else "tf32",
    )


def _padded(x, num_tokens, head_dim):
    return jnp.pad(x, [(0, 0), (0, num_tokens - x.shape[1]), (0, 0), (0, head_dim - x.shape[3])])


def _filled(x, num_tokens, fill):
    return jnp.pad(x, [(0, 0), (0, num_tokens - x.shape[1])], constant_values=fill)


def _by_head(x, num_tokens):
    """[R, T, H] -> [H, R * num_tokens]"""
    x = jnp.pad(x, [(0, 0), (0, num_tokens - x.shape[1]), (0, 0)])
    return x.reshape(-1, x.shape[2]).T
