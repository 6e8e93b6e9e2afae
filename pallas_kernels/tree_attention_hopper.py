"""Attention over prefix trees on NVIDIA Hopper GPUs: Pallas Mosaic GPU kernels, forward and backward.

Key j is visible to query i iff k_offset[j] <= q_offset[i] < subtree_end[j]. Covers bf16 and fp16 with heads of 64
and 128 and any number of query heads a key head.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from .tree_attention_hopper_backward import BackwardTiles, backward_kv, backward_q
from .tree_attention_hopper_blocks import block_kinds, block_lists
from .tree_attention_hopper_forward import ForwardTiles, forward
from .tree_attention_hopper_fused import backward_fused


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile shapes of the three kernels."""

    forward: ForwardTiles = ForwardTiles()
    q: BackwardTiles = BackwardTiles(other=128)
    kv: BackwardTiles = BackwardTiles(stages=3)
    fused: BackwardTiles | None = None

    @property
    def multiple_q(self) -> int:
        """Queries a row is padded to a multiple of."""
        return math.lcm(self.forward.tile_q, self.q.tile, self.kv.other)

    @property
    def multiple_k(self) -> int:
        """Keys a row is padded to a multiple of."""
        return math.lcm(self.forward.block_k, self.q.other, self.kv.tile)


def tree_attention_hopper(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_offset: jax.Array,
    k_offset: jax.Array,
    subtree_end: jax.Array,
    q_position: jax.Array | None = None,
    k_position: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    tiles: Tiles = Tiles(),
) -> tuple[jax.Array, jax.Array]:
    """Attention output [R, Tq, H, D] in the dtype of q and natural log-sum-exp [R, Tq, H] fp32.

    q [R, Tq, H, D], k and v [R, Tk, Hkv, D], offsets and ends [R, T] int32. A negative q_offset marks a query as
    padding, subtree_end <= k_offset a key; what such tokens hold (NaN too) reaches no other token. A query that sees
    nothing gets 0 and -inf. Differentiable in q, k and v, through both results. Raises ValueError for a window,
    another head size or dtype, and a scale that is not positive.
    """
    if window is not None:
        raise ValueError(f"window={window}: the Hopper kernel has no sliding window; use the Triton kernel")
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: the Hopper kernel needs all bfloat16 or all float16")
    if q.shape[3] not in (64, 128) or q.shape[2] % k.shape[2] or k.shape != v.shape:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}: the Hopper kernel needs heads of 64 or 128 in whole groups")
    if scale <= 0:
        raise ValueError(f"scale={scale}: must be positive")
    num_queries = q.shape[1]
    q_offset = _padded(q_offset, tiles.multiple_q, -1)
    k_offset, subtree_end = _padded(k_offset, tiles.multiple_k, 0), _padded(subtree_end, tiles.multiple_k, 0)
    q = _padded(_zeroed(q, q_offset[:, :num_queries] >= 0), tiles.multiple_q, 0)
    real = (subtree_end > k_offset)[:, : k.shape[1]]
    k, v = (_padded(_zeroed(x, real), tiles.multiple_k, 0) for x in (k, v))
    out, lse = _attention(scale, tiles, q, k, v, q_offset, k_offset, subtree_end)
    return out[:, :num_queries], lse.transpose(0, 2, 1)[:, :num_queries]


def _padded(x: jax.Array, multiple: int, value: int) -> jax.Array:
    missing = -x.shape[1] % multiple
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if axis == 1 else 0) for axis in range(x.ndim)], constant_values=value)


def _zeroed(x: jax.Array, keep: jax.Array) -> jax.Array:
    return jnp.where(keep[:, :, None, None], x, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(scale, tiles, q, k, v, q_offset, k_offset, subtree_end):
    kinds = block_kinds(q_offset, k_offset, subtree_end, tiles.forward.tile_q, tiles.forward.block_k)
    return forward(
        q, k, v, q_offset, k_offset, subtree_end, block_lists(*kinds), scale=scale, tiles=tiles.forward
    )  # fmt: skip


def _attention_fwd(scale, tiles, q, k, v, q_offset, k_offset, subtree_end):
    out, lse = _attention(scale, tiles, q, k, v, q_offset, k_offset, subtree_end)
    return (out, lse), (q, k, v, q_offset, k_offset, subtree_end, out, lse)


def _attention_bwd(scale, tiles, residuals, gradients):
    q, k, v, q_offset, k_offset, subtree_end, out, lse = residuals
    d_out, d_lse = gradients
    d_out = _zeroed(d_out, q_offset >= 0).astype(q.dtype)
    sees = jnp.isfinite(lse)
    delta = jnp.einsum("rqhd,rqhd->rhq", d_out, out, preferred_element_type=jnp.float32)
    tensors = (
        q, k, v, d_out, jnp.where(sees, lse / -scale, 0.0), jnp.where(sees, d_lse - delta, 0.0),
        q_offset, k_offset, subtree_end,
    )  # fmt: skip
    kv_tiles = tiles.fused or tiles.kv
    full, partial = block_kinds(q_offset, k_offset, subtree_end, kv_tiles.other, kv_tiles.tile)
    lists = block_lists(full.transpose(0, 2, 1), partial.transpose(0, 2, 1))
    if tiles.fused is not None:
        dq, dk, dv = backward_fused(*tensors, lists, scale=scale, tiles=tiles.fused)
        return dq, dk, dv, None, None, None
    dk, dv = backward_kv(*tensors, lists, scale=scale, tiles=tiles.kv)
    kinds = block_kinds(q_offset, k_offset, subtree_end, tiles.q.tile, tiles.q.other)
    dq = backward_q(*tensors, block_lists(*kinds), scale=scale, tiles=tiles.q)
    return dq, dk, dv, None, None, None


_attention.defvjp(_attention_fwd, _attention_bwd)
