"""Which blocks of keys a block of queries can see, and the reverse: fixed-shape lists, built on the device.

A pair of blocks is full if every query sees every key, empty if none sees any, else partial. Minima and maxima per block
decide it; a partial block may turn out to hide everything, never the reverse. Lists hold full blocks first, each part in
order of offset. The lengths of a tree's segments are data: nothing here depends on them but the values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_LAST = np.iinfo(np.int32).max


class BlockLists(NamedTuple):
    """For A blocks of one side (of all R rows together), the blocks of the other side they meet, at most B in a row."""

    blocks: jax.Array  # [A, B] int32, numbers within the row; arbitrary past num_listed
    num_full: jax.Array  # [A] int32
    num_listed: jax.Array  # [A] int32, full and partial
    order: jax.Array  # [A] int32, the longest list first: what runs longest starts first


def block_lists(
    q_offset: jax.Array,  # [R, Tq] int32; negative: sees nothing
    k_offset: jax.Array,  # [R, Tk] int32
    subtree_end: jax.Array,  # [R, Tk] int32, exclusive; at most k_offset: seen by nothing
    q_position: jax.Array | None,
    k_position: jax.Array | None,
    window: int | None,
    block_q: int,
    block_k: int,
) -> tuple[BlockLists, BlockLists]:
    """(key blocks of every query block, query blocks of every key block). Blocks divide Tq and Tk."""
    q = q_offset.reshape(q_offset.shape[0], -1, block_q)
    k, end = (x.reshape(x.shape[0], -1, block_k) for x in (k_offset, subtree_end))
    valid_q, valid_k = q >= 0, k < end
    q_first, q_last = jnp.where(valid_q, q, _LAST).min(-1)[:, :, None], q.max(-1)[:, :, None]
    k_first, k_last = jnp.where(valid_k, k, _LAST).min(-1)[:, None], k.max(-1)[:, None]
    end_first, end_last = jnp.where(valid_k, end, 0).min(-1)[:, None], jnp.where(valid_k, end, 0).max(-1)[:, None]
    # Any invalid token makes the minimum negative (a query) or 0 (a key's end), and the block partial at best.
    is_full = (k_last <= q.min(-1)[:, :, None]) & (q_last < end_first)
    is_empty = (q_last < k_first) | (end_last <= q_first)
    if window is not None:
        position_q, position_k = q_position.reshape(q.shape), k_position.reshape(k.shape)
        is_full &= position_q.max(-1)[:, :, None] - position_k.min(-1)[:, None] < window
        is_empty |= position_q.min(-1)[:, :, None] - position_k.max(-1)[:, None] >= window
    kind = jnp.where(is_empty, 2, jnp.where(is_full, 0, 1)).astype(jnp.int32)  # [R, query blocks, key blocks]
    return _lists(kind), _lists(kind.swapaxes(1, 2))


def _lists(kind: jax.Array) -> BlockLists:
    num_others = kind.shape[-1]
    kind = kind.reshape(-1, num_others)
    keys = jnp.sort(kind * num_others + jnp.arange(num_others, dtype=jnp.int32), axis=-1)
    num_full, num_listed = jnp.sum(kind == 0, -1, dtype=jnp.int32), jnp.sum(kind < 2, -1, dtype=jnp.int32)
    return BlockLists(keys % num_others, num_full, num_listed, jnp.argsort(-num_listed).astype(jnp.int32))
