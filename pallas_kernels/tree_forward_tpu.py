"""Forward pass of tree attention on TPU: an online softmax over the listed blocks of keys.

The running maximum starts at a finite number below every score, and masked scores are -inf: no
difference of the two infinities ever arises, and a query that has seen nothing has the sum 0.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_lists import WorkLists
from pallas_kernels.tree_tiles_tpu import LANES, LOG2_E, Tiling, column, mask_of, matmul, walk, widen

_BELOW_ALL = -1e30


def forward_tiles(
    q: jax.Array,  # [R, h · u, g, Tq, D]
    k: jax.Array,  # [R, h, Tk, D]
    v: jax.Array,  # [R, h, Tk, D]
    queries: jax.Array,  # [R, 1 or 2, Tq] int32, as `visible_blocks` takes them
    keys: jax.Array,  # [R, 2 or 3, Tk] int32
    lists: WorkLists,  # query blocks outside
    tiling: Tiling,
) -> tuple[jax.Array, jax.Array]:
    """(output like q, log-sum-exp [R, h · u, Tq / block_q, 1, g · block_q] float32 in nats, -inf where
    nothing is seen)."""
    rows, heads, group, num_queries, size = q.shape
    parts = heads // k.shape[1]
    block_q, block_k = tiling.block_q, tiling.block_k
    tile_rows = group * block_q

    def body(step, q_ref, k_ref, v_ref, query_ref, key_ref, out_ref, lse_ref, top_ref, total_ref, acc_ref, columns_ref):
        @pl.when(step.first)
        def _():
            top_ref[...] = jnp.full_like(top_ref, _BELOW_ALL)
            total_ref[...] = jnp.zeros_like(total_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)
            for i in range(query_ref.shape[0]):
                columns_ref[i] = column(query_ref[i : i + 1, :])

        def attend(masked):
            scores = matmul(q_ref[...].reshape(tile_rows, size), k_ref[...], transpose_b=True) * tiling.score_scale
            if masked:
                query = [widen(columns_ref[i], block_k) for i in range(columns_ref.shape[0])]
                mask = mask_of(query, [key_ref[i : i + 1, :] for i in range(key_ref.shape[0])], tiling.window)
                scores = jnp.where(mask, scores.reshape(group, block_q, block_k), -jnp.inf).reshape(tile_rows, block_k)
            top = jnp.maximum(top_ref[...], scores.max(-1, keepdims=True))
            decay = jnp.exp2(top_ref[...] - top)
            weights = jnp.exp2(scores - widen(top, block_k))
            top_ref[...] = top
            total_ref[...] = total_ref[...] * decay + weights.sum(-1, keepdims=True)
            acc_ref[...] = acc_ref[...] * widen(decay, size) + matmul(weights.astype(v_ref.dtype), v_ref[...])

        pl.when(step.full)(lambda: attend(masked=False))
        pl.when(~step.full & ~step.idle)(lambda: attend(masked=True))

        @pl.when(step.last)
        def _():
            total = total_ref[...]
            seen = total > 0
            total = jnp.where(seen, total, 1.0)
            out = acc_ref[...] * widen(1 / total, size)
            out_ref[...] = out.astype(out_ref.dtype).reshape(group, block_q, size)
            lse = jnp.where(seen, (top_ref[...] + jnp.log2(total)) / LOG2_E, -jnp.inf)
            lse_ref[...] = lse.T[:1]

    def in_specs(row, head):
        return [
            pl.BlockSpec((None, None, group, block_q, size), lambda n, m, _: (row, head, 0, n, 0)),
            *[pl.BlockSpec((None, None, block_k, size), lambda n, m, _: (row, head // parts, m, 0))] * 2,
            pl.BlockSpec((None, queries.shape[1], block_q), lambda n, m, _: (row, 0, n)),
            pl.BlockSpec((None, keys.shape[1], block_k), lambda n, m, _: (row, 0, m)),
        ]

    def out_specs(row, head):
        return [
            pl.BlockSpec((None, None, group, block_q, size), lambda n, m, _: (row, head, 0, n, 0)),
            pl.BlockSpec((None, None, None, 1, tile_rows), lambda n, m, _: (row, head, n, 0, 0)),
        ]

    return walk(
        body,
        lists,
        1,
        (rows, heads),
        in_specs,
        out_specs,
        [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((rows, heads, num_queries // block_q, 1, tile_rows), jnp.float32),
        ],
        [
            pltpu.VMEM((tile_rows, LANES), jnp.float32),
            pltpu.VMEM((tile_rows, LANES), jnp.float32),
            pltpu.VMEM((tile_rows, size), jnp.float32),
            pltpu.VMEM((queries.shape[1], block_q, LANES), jnp.int32),
        ],
        (q, k, v, queries, keys),
        tiling,
        "tree_attention_forward",
    )
