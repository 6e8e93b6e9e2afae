"""Attention over a paged KV cache.

Keys are visited in blocks at fixed positions with a running softmax. A block that holds no visible key for a row leaves
that row's state unchanged by a bit, so how far the loop runs (as far as the longest row needs) never changes the others'
results. Shape letters: N rows (slots or prefill tiles), T queries per row, H query heads, G key heads, D head size,
P pages per row, S tokens per page.
"""

import jax
import jax.numpy as jnp

HIDDEN = -1e30  # finite, so that a fully hidden block gives weights of exactly 0 and no NaN


def paged_attention(q, k_pages, v_pages, tables, position, num_blocks, *, scale: float, block_pages: int):
    """Attention of queries at `position` to all keys at positions up to theirs.

    q [N, T, H, D]; k_pages, v_pages [pages, G, S, D]; tables [N, P] int32 page of each run of S positions, P a multiple of
    block_pages; position [N, T] int32; num_blocks int32, blocks of block_pages pages to visit: at least enough for the
    largest position. Returns [N, T, H, D] in q's dtype; scores and sums are float32.
    """
    num_rows, num_queries, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    group = num_heads // num_kv_heads
    block = block_pages * page_size
    q = q.reshape(num_rows, num_queries, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(num_rows, num_kv_heads, group * num_queries, head_dim)  # grouped queries are more queries of one key head
    last_key = jnp.tile(position, (1, group))[:, None, :, None]  # [N, 1, group * T, 1]
    key_offset = jnp.arange(block, dtype=jnp.int32)
    k_rows, v_rows = (pages.reshape(-1, page_size, head_dim) for pages in (k_pages, v_pages))

    def visit(i, state):
        peak, total, out = state
        pages = jax.lax.dynamic_slice_in_dim(tables, i * block_pages, block_pages, axis=1)
        # One index per (page, key head): the gather then copies whole rows of S * D and leaves nothing to transpose.
        index = pages[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
        k = k_rows.at[index].get(mode="promise_in_bounds").reshape(num_rows, num_kv_heads, block, head_dim)
        v = v_rows.at[index].get(mode="promise_in_bounds").reshape(num_rows, num_kv_heads, block, head_dim)
        score = jnp.einsum("ngqd,ngkd->ngqk", q, k, preferred_element_type=jnp.float32)
        score = jnp.where(i * block + key_offset <= last_key, score * scale, HIDDEN)
        new_peak = jnp.maximum(peak, jnp.max(score, axis=-1))
        weight = jnp.exp(score - new_peak[..., None])
        shrink = jnp.exp(peak - new_peak)
        update = jnp.einsum("ngqk,ngkd->ngqd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_peak, total * shrink + jnp.sum(weight, axis=-1), out * shrink[..., None] + update

    rows = q.shape[:3]
    start = (jnp.full(rows, HIDDEN, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(q.shape, jnp.float32))
    if tables.shape[1] == block_pages:
        _, total, out = visit(0, start)
    else:
        _, total, out = jax.lax.fori_loop(0, num_blocks, visit, start)
    out = (out / total[..., None]).astype(q.dtype)
    out = out.reshape(num_rows, num_kv_heads, group, num_queries, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(num_rows, num_queries, num_heads, head_dim)
