"""Tree attention on NVIDIA Hopper GPUs: Pallas Mosaic GPU kernels, forward and backward, deterministic, without atomics.

Key j is visible to query i iff ``k_offset[j] <= q_offset[i] < subtree_end[j]``. bfloat16 and float16, heads of 64 and 128, any
number of query heads a key head; no window: the Triton kernels cover the rest, and share the block lists.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention_hopper_backward import BackwardTiles, backward_kv, backward_q
from pallas_kernels.tree_attention_hopper_forward import ForwardTiles, forward_kernel
from triton_kernels.block_lists import block_lists

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile shapes of the three kernels; the defaults measured fastest on an H200."""

    forward: ForwardTiles = ForwardTiles()
    q: BackwardTiles = BackwardTiles(stages=4)
    kv: BackwardTiles = BackwardTiles(stages=2)

    @property
    def multiple_q(self) -> int:
        """Queries a row is padded to a multiple of."""
        return math.lcm(self.forward.tile_q, self.q.tile, self.kv.other)

    @property
    def multiple_k(self) -> int:
        """Keys a row is padded to a multiple of."""
        return math.lcm(self.forward.block_k, self.q.other, self.kv.tile)


def refusal(head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why there is no kernel for these arrays; None if there is one."""
    if jnp.dtype(dtype).name in DTYPES and head_dim in HEAD_DIMS:
        return None
    return f"the Hopper kernels take {', '.join(DTYPES)} and head sizes {HEAD_DIMS}, not {jnp.dtype(dtype).name} and {head_dim}"


def forward(
    q: jax.Array,  # [R, Tq, H, D]
    k: jax.Array,  # [R, Tk, Hkv, D]
    v: jax.Array,  # [R, Tk, Hkv, D]
    q_offset: jax.Array,  # [R, Tq] int32; negative: invalid
    k_offset: jax.Array,  # [R, Tk] int32
    subtree_end: jax.Array,  # [R, Tk] int32, exclusive; at most k_offset: invalid
    q_position: jax.Array | None,  # unread, as all without a window
    k_position: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    tiles: Tiles = Tiles(),
) -> tuple[jax.Array, jax.Array]:
    """(output [R, Tq, H, D] in q's dtype, natural log-sum-exp [R, Tq, H] float32). What invalid tokens hold, NaN included,
    reaches nothing; a query that sees nothing gets 0 and -inf. Raises ValueError for what has no kernel."""
    q, k, v, *tokens = _prepared(q, k, v, q_offset, k_offset, subtree_end, scale, window, tiles)
    lists, _ = block_lists(*tokens, None, None, None, tiles.forward.tile_q, tiles.forward.block_k)
    out, lse = forward_kernel(q, k, v, *tokens, lists, scale=scale, tiles=tiles.forward)
    num_queries = q_offset.shape[1]
    return out[:, :num_queries], lse.transpose(0, 2, 1)[:, :num_queries]


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
    tiles: Tiles = Tiles(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv) in the dtypes of q, k, v: these keys' share of dq, and their own gradients."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    q, k, v, *tokens = _prepared(q, k, v, q_offset, k_offset, subtree_end, scale, window, tiles)
    seen = lse > -jnp.inf
    d_out = jnp.where(seen[..., None], d_out, 0).astype(q.dtype)
    delta = jnp.einsum("rqhd,rqhd->rqh", d_out, out, preferred_element_type=jnp.float32) - d_lse
    # What the products of a tile start from, so that the kernels subtract nothing.
    starts = (jnp.where(seen, x, 0).transpose(0, 2, 1) for x in (lse / -scale, -delta))
    starts = (_padded(x, tiles.multiple_q, 0, axis=2) for x in starts)
    given = (q, k, v, _padded(d_out, tiles.multiple_q, 0), *starts, *tokens)
    _, lists = block_lists(*tokens, None, None, None, tiles.kv.other, tiles.kv.tile)
    dk, dv = backward_kv(*given, lists, scale=scale, tiles=tiles.kv)
    lists, _ = block_lists(*tokens, None, None, None, tiles.q.tile, tiles.q.other)
    dq = backward_q(*given, lists, scale=scale, tiles=tiles.q)
    return dq[:, :num_queries], dk[:, :num_keys], dv[:, :num_keys]


def _prepared(q, k, v, q_offset, k_offset, subtree_end, scale, window, tiles) -> tuple[jax.Array, ...]:
    """The arrays in whole tiles, with zeros in what is invalid."""
    if (problem := refusal(q.shape[3], q.dtype)) is not None:
        raise ValueError(problem)
    if window is not None:
        raise ValueError("the Hopper kernels have no window: the Triton kernels do")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads")
    if scale <= 0:
        raise ValueError(f"the Hopper kernels need a positive scale, not {scale}")
    q = _padded(jnp.where((q_offset >= 0)[..., None, None], q, 0), tiles.multiple_q, 0)
    valid = (k_offset < subtree_end)[..., None, None]
    k, v = (_padded(jnp.where(valid, x, 0), tiles.multiple_k, 0) for x in (k, v))
    q_offset = _padded(q_offset, tiles.multiple_q, -1)
    return q, k, v, q_offset, *(_padded(x, tiles.multiple_k, 0) for x in (k_offset, subtree_end))


def _padded(x: jax.Array, multiple: int, value: int, axis: int = 1) -> jax.Array:
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=value) if missing else x
