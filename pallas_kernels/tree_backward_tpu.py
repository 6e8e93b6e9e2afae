"""Backward pass of tree attention on TPU: the gradient of the queries, and that of keys and values.

Two kernels, each with one owner for every result: nothing is added up in an order that could change.
Both compute the scores again from the log-sum-exp (FlashAttention-2, Dao 2023):

    weights = exp(scores - lse);  d_scores = weights · (d_out @ v.T - delta);  delta = rowsum(d_out · out) - d_lse
    dq = scale · d_scores @ k;    dk = scale · d_scores.T @ q;                  dv = weights.T @ d_out
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_lists import WorkLists
from pallas_kernels.tree_tiles_tpu import LANES, Tiling, column, mask_of, matmul, walk, widen


def backward_queries(
    q: jax.Array,  # [R, h · u, g, Tq, D]
    k: jax.Array,  # [R, h, Tk, D]
    v: jax.Array,  # [R, h, Tk, D]
    queries: jax.Array,  # [R, 1 or 2, Tq] int32, as `visible_blocks` takes them
    keys: jax.Array,  # [R, 2 or 3, Tk] int32
    d_out: jax.Array,  # like q
    lse: jax.Array,  # [R, h · u, Tq / block_q, 1, g · block_q] float32, in base 2; finite
    delta: jax.Array,  # like lse
    lists: WorkLists,  # query blocks outside
    tiling: Tiling,
) -> jax.Array:
    """The gradient of q, like q."""
    rows, heads, group, _, size = q.shape
    parts = heads // k.shape[1]
    block_q, block_k = tiling.block_q, tiling.block_k
    tile_rows = group * block_q

    def body(step, *refs):
        q_ref, k_ref, v_ref, query_ref, key_ref, d_out_ref, lse_ref, delta_ref, dq_ref, acc_ref, columns_ref, stats_ref = refs

        @pl.when(step.first)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)
            stats_ref[0], stats_ref[1] = column(lse_ref[...]), column(delta_ref[...])
            for i in range(query_ref.shape[0]):
                columns_ref[i] = column(query_ref[i : i + 1, :])

        def attend(masked):
            scores = matmul(q_ref[...].reshape(tile_rows, size), k_ref[...], transpose_b=True) * tiling.score_scale
            weights = jnp.exp2(scores - widen(stats_ref[0], block_k))
            if masked:
                query = [widen(columns_ref[i], block_k) for i in range(columns_ref.shape[0])]
                mask = mask_of(query, [key_ref[i : i + 1, :] for i in range(key_ref.shape[0])], tiling.window)
                weights = jnp.where(mask, weights.reshape(group, block_q, block_k), 0).reshape(tile_rows, block_k)
            d_weights = matmul(d_out_ref[...].reshape(tile_rows, size), v_ref[...], transpose_b=True)
            d_scores = weights * (d_weights - widen(stats_ref[1], block_k))
            acc_ref[...] += matmul(d_scores.astype(k_ref.dtype), k_ref[...])

        pl.when(step.full)(lambda: attend(masked=False))
        pl.when(~step.full & ~step.idle)(lambda: attend(masked=True))

        @pl.when(step.last)
        def _():
            dq_ref[...] = (acc_ref[...] * tiling.scale).astype(dq_ref.dtype).reshape(group, block_q, size)

    def in_specs(row, head):
        queries_like = pl.BlockSpec((None, None, group, block_q, size), lambda n, m, _: (row, head, 0, n, 0))
        keys_like = pl.BlockSpec((None, None, block_k, size), lambda n, m, _: (row, head // parts, m, 0))
        stats = pl.BlockSpec((None, None, None, 1, tile_rows), lambda n, m, _: (row, head, n, 0, 0))
        return [
            queries_like,
            keys_like,
            keys_like,
            pl.BlockSpec((None, queries.shape[1], block_q), lambda n, m, _: (row, 0, n)),
            pl.BlockSpec((None, keys.shape[1], block_k), lambda n, m, _: (row, 0, m)),
            queries_like,
            stats,
            stats,
        ]

    (dq,) = walk(
        body,
        lists,
        1,
        (rows, heads),
        in_specs,
        lambda row, head: in_specs(row, head)[:1],
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        [
            pltpu.VMEM((tile_rows, size), jnp.float32),
            pltpu.VMEM((queries.shape[1], block_q, LANES), jnp.int32),
            pltpu.VMEM((2, tile_rows, LANES), jnp.float32),
        ],
        (q, k, v, queries, keys, d_out, lse, delta),
        tiling,
        "tree_attention_backward_queries",
    )
    return dq


def backward_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    lists: WorkLists,  # key blocks outside
    tiling: Tiling,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of k and v, like k. Arguments as in `backward_queries`. Scores are transposed here,
    keys down and queries along: what comes per query then is a row, and every product as it lies."""
    rows, kv_heads, _, size = k.shape
    parts, group = q.shape[1] // kv_heads, q.shape[2]
    block_q, block_k = tiling.block_q, tiling.block_k
    tile_rows = group * block_q

    def body(step, *refs):
        q_ref, k_ref, v_ref, query_ref, key_ref, d_out_ref, lse_ref, delta_ref = refs[:8]
        dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, columns_ref = refs[8:]

        @pl.when(step.first)
        def _():
            dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
            dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)
            for i in range(key_ref.shape[0]):
                columns_ref[i] = column(key_ref[i : i + 1, :])

        def attend(masked):
            q, d_out = (x[...].reshape(tile_rows, size) for x in (q_ref, d_out_ref))
            scores = matmul(k_ref[...], q, transpose_b=True) * tiling.score_scale
            weights = jnp.exp2(scores - lse_ref[...])
            if masked:
                query = [jnp.tile(query_ref[i : i + 1, :], (1, group)) for i in range(query_ref.shape[0])]
                key = [widen(columns_ref[i], tile_rows) for i in range(columns_ref.shape[0])]
                weights = jnp.where(mask_of(query, key, tiling.window), weights, 0)
            d_weights = matmul(v_ref[...], d_out, transpose_b=True)
            d_scores = weights * (d_weights - delta_ref[...])
            dv_acc_ref[...] += matmul(weights.astype(d_out.dtype), d_out)
            dk_acc_ref[...] += matmul(d_scores.astype(q.dtype), q)

        pl.when(step.full)(lambda: attend(masked=False))
        pl.when(~step.full & ~step.idle)(lambda: attend(masked=True))

        @pl.when(step.last)
        def _():
            dk_ref[...] = (dk_acc_ref[...] * tiling.scale).astype(dk_ref.dtype)
            dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)

    def in_specs(row, head):
        queries_like = pl.BlockSpec((None, None, group, block_q, size), lambda m, n, u: (row, head * parts + u, 0, n, 0))
        keys_like = pl.BlockSpec((None, None, block_k, size), lambda m, n, u: (row, head, m, 0))
        stats = pl.BlockSpec((None, None, None, 1, tile_rows), lambda m, n, u: (row, head * parts + u, n, 0, 0))
        return [
            queries_like,
            keys_like,
            keys_like,
            pl.BlockSpec((None, queries.shape[1], block_q), lambda m, n, u: (row, 0, n)),
            pl.BlockSpec((None, keys.shape[1], block_k), lambda m, n, u: (row, 0, m)),
            queries_like,
            stats,
            stats,
        ]

    dk, dv = walk(
        body,
        lists,
        parts,
        (rows, kv_heads),
        in_specs,
        lambda row, head: in_specs(row, head)[1:3],
        [jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2,
        [
            *[pltpu.VMEM((block_k, size), jnp.float32)] * 2,
            pltpu.VMEM((keys.shape[1], block_k, LANES), jnp.int32),
        ],
        (q, k, v, queries, keys, d_out, lse, delta),
        tiling,
        "tree_attention_backward_keys",
    )
    return dk, dv
