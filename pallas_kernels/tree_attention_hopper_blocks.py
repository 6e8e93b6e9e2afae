"""Block lists of tree attention: which key blocks a query block has to visit, and the transpose.

A block is summed up by the minima and maxima of its tokens' offsets and subtree ends; two blocks need no
mask when every query of one sees every key of the other, and no visit when their ranges cannot meet. All
arrays have fixed shapes, so trees of any lengths share one compiled program.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_NEVER = jnp.iinfo(jnp.int32).max


class BlockLists(NamedTuple):
    """For each of `tiles` blocks of one side the blocks of the other side to visit; tile = row * blocks + block."""

    order: jax.Array  # [tiles] int32: tiles by falling work, the order to start them in
    num_full: jax.Array  # [tiles] int32: leading entries of `visits` that need no mask
    num_visits: jax.Array  # [tiles] int32: entries of `visits` in use, full ones and those to mask
    visits: jax.Array  # [tiles, blocks of the other side] int32


def block_kinds(
    q_offset: jax.Array, k_offset: jax.Array, subtree_end: jax.Array, block_q: int, block_k: int
) -> tuple[jax.Array, jax.Array]:
    """Which pairs of blocks need no mask (`full`) and which need one (`partial`): two bool [R, Tq / block_q, Tk / block_k].

    Takes the offsets and ends of the rows [R, T], T a multiple of the block. A query with a negative offset and a
    key that ends where it begins or before are padding: a block that holds one is never full.
    """
    q = q_offset.reshape(q_offset.shape[0], -1, block_q)
    begin = k_offset.reshape(k_offset.shape[0], -1, block_k)
    end = subtree_end.reshape(begin.shape)
    real = end > begin
    first_query = jnp.where(q >= 0, q, _NEVER).min(2)[:, :, None]
    last_query = q.max(2)[:, :, None]  # -1 or less without any query
    first_key = jnp.where(real, begin, _NEVER).min(2)[:, None, :]
    last_end = jnp.where(real, end, -1).max(2)[:, None, :]
    visible = (first_key <= last_query) & (first_query < last_end)
    last_key = begin.max(2)[:, None, :]
    first_end = jnp.where(real, end, -1).min(2)[:, None, :]
    full = (q.min(2)[:, :, None] >= 0) & (last_key <= first_query) & (last_query < first_end)
    return full, visible & ~full


def block_lists(full: jax.Array, partial: jax.Array) -> BlockLists:
    """The lists of the blocks along axis 1, each holding blocks of axis 2. Transpose both arguments for the other side."""
    others = full.shape[2]
    kind = jnp.where(full, 0, jnp.where(partial, 1, 2)).reshape(-1, others)
    visits = jnp.sort(kind * others + jnp.arange(others), axis=1) % others
    num_full = full.sum(2, dtype=jnp.int32).reshape(-1)
    num_visits = num_full + partial.sum(2, dtype=jnp.int32).reshape(-1)
    order = jnp.argsort(-num_visits)
    return BlockLists(order.astype(jnp.int32), num_full, num_visits, visits.astype(jnp.int32))
