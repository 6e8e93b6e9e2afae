"""Which blocks of keys a block of queries has to visit, and the reverse, as lists a TPU kernel walks.

A pair of blocks is empty if the last query comes before the first key, if every subtree has ended at
the first query, or if all keys have left the window; it is full, and needs no mask, if every query
sees every key. Both follow from smallest and largest offsets, ends and positions of the blocks, so
offsets may come in any order: one that mixes distant tokens in a block costs time, never correctness.

Letters: R rows, n query blocks, m key blocks, s lists.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

LARGE = np.int32(2**30)  # beyond every offset and position, and far enough from overflow to subtract

# Outer blocks whose lists are in scalar memory at a time hold at most so many words together (32 KB of
# 1 MB with the next ones on their way), or one list.
_WORDS = 4096


class WorkLists(NamedTuple):
    """What each outer block visits, in order; outer blocks are taken together in chunks of 2^n.

    `start` counts steps from the beginning of a chunk, its last entry is their number; outer blocks
    that fill up the last chunk have none. A word is ``inner block << 2 | idle << 1 | full``.
    """

    words: jax.Array  # [R, chunks, outer blocks of a chunk, inner blocks] int32
    start: jax.Array  # [R, chunks, outer blocks of a chunk + 1] int32

    @property
    def chunk(self) -> int:
        return self.words.shape[2]


def visible_blocks(
    queries: jax.Array,  # [R, 1 or 2, Tq] int32: offset, and position with a window
    keys: jax.Array,  # [R, 2 or 3, Tk] int32: offset, subtree end, and position with a window
    block_q: int,
    block_k: int,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """(visible, full), both bool [R, n, m]. Invalid queries have offset -LARGE, invalid keys offset
    LARGE and end -LARGE; their positions are read nowhere. Tq and Tk are multiples of the blocks."""

    def blocks(x, block):
        return x.reshape(x.shape[0], -1, block)

    q, k, end = blocks(queries[:, 0], block_q), blocks(keys[:, 0], block_k), blocks(keys[:, 1], block_k)
    valid_q, valid_k = q >= 0, k < end
    first_q, last_q = jnp.where(valid_q, q, LARGE).min(-1)[:, :, None], q.max(-1)[:, :, None]
    visible = (k.min(-1)[:, None] <= last_q) & (first_q < end.max(-1)[:, None])
    # One invalid token on either side makes the largest key offset or the smallest query offset refuse.
    full = (k.max(-1)[:, None] <= q.min(-1)[:, :, None]) & (last_q < end.min(-1)[:, None])
    if window is not None:
        q, k = blocks(queries[:, 1], block_q), blocks(keys[:, 2], block_k)
        nearest = jnp.where(valid_q, q, LARGE).min(-1)[:, :, None] - jnp.where(valid_k, k, -1).max(-1)[:, None]
        farthest = q.max(-1)[:, :, None] - k.min(-1)[:, None]
        visible, full = visible & (nearest < window), full & (farthest < window)
    return visible, full & visible


def work_lists(visible: jax.Array, full: jax.Array) -> WorkLists:
    """Lists of the visits of each outer block (second axis) to its inner blocks (third axis). An outer
    block that visits nothing has one idle step, in which it still writes its result.

    No sort, scatter or running sum: over thousands of blocks XLA compiles those for a TPU in ten
    seconds each. A place in a list is a matrix product, and what goes there a masked sum.
    """
    rows, num_outer, num_inner = visible.shape
    chunk = 1 << (max(1, min(_WORDS // num_inner, pl.next_power_of_2(num_outer))).bit_length() - 1)
    padding = [(0, 0), (0, -num_outer % chunk), (0, 0)]

    inner = jnp.arange(num_inner, dtype=jnp.int32)
    idle = ~visible.any(-1, keepdims=True) & (inner == 0)
    listed = visible | idle
    up_to = (inner[:, None] <= inner).astype(jnp.bfloat16)  # exact: a sum of ones in float32
    place = jnp.matmul(listed.astype(jnp.bfloat16), up_to, preferred_element_type=jnp.float32).astype(jnp.int32) - 1
    word = (inner << 2) + 2 * idle + full
    goes = listed[..., None, :] & (place[..., None, :] == inner[:, None])
    words = jnp.where(goes, word[..., None, :], 0).sum(-1, dtype=jnp.int32)
    words = jnp.pad(words, padding).reshape(rows, -1, chunk, num_inner)

    count = jnp.pad(listed.sum(-1, dtype=jnp.int32, keepdims=True), padding).reshape(rows, -1, 1, chunk)
    before = jnp.arange(chunk) < jnp.arange(chunk + 1)[:, None]
    return WorkLists(words, jnp.where(before, count, 0).sum(-1, dtype=jnp.int32))
