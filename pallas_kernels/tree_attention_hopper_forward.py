"""Forward pass of tree attention on Hopper: online softmax over the key blocks that a block of queries can see.

One thread block owns the queries of one head: two consumer warpgroups hold `block_q` of them each, and one
producer warpgroup streams the listed key and value blocks through a ring in shared memory (TMA). The consumers
take turns on the tensor cores: while one multiplies, the other exponentiates. FlashAttention-3 (arXiv:2407.08608)
describes the schedule.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tree_attention_hopper_tiles as tile_ops
from pallas_kernels.tree_attention_hopper_tiles import (
    COLUMNS,
    CONSUMER_REGISTERS,
    LOG2E,
    PRODUCER_REGISTERS,
    ROWS,
    WARPGROUPS,
    along_columns,
    along_rows,
    swizzled,
)
from triton_kernels.block_lists import BlockLists

LOWEST = -1e30  # running maximum before the first key: finite, so that differences of maxima are never NaN


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Queries a warpgroup, keys a step, slots of the key/value ring."""

    block_q: int = 64
    block_k: int = 128
    stages: int = 2

    @property
    def tile_q(self) -> int:
        """Queries a thread block."""
        return self.block_q * WARPGROUPS


def forward_kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_offset: jax.Array,
    k_offset: jax.Array,
    subtree_end: jax.Array,
    lists: BlockLists,
    *,
    scale: float,
    tiles: ForwardTiles,
) -> tuple[jax.Array, jax.Array]:
    """Attention output [R, Tq, H, D] and natural log-sum-exp [R, H, Tq] fp32.

    q [R, Tq, H, D], k and v [R, Tk, Hkv, D], offsets and ends [R, T] int32, Tq a multiple of tiles.tile_q and Tk of
    tiles.block_k; `lists` are those of query blocks of tile_q and key blocks of block_k. A query that sees nothing
    gets 0 and -inf.
    """
    rows, num_queries, heads, dim = q.shape
    group = heads // k.shape[2]
    tiles_per_row = num_queries // tiles.tile_q
    block_q, block_k, stages = tiles.block_q, tiles.block_k, tiles.stages
    dtype = q.dtype

    def body(
        visits_ref, num_full_ref, num_visits_ref, order_ref, q_ref, k_ref, v_ref, q_offset_ref, k_offset_ref, end_ref,
        out_ref, lse_ref, q_smem, k_smem, v_smem, q_offset_smem, k_offset_smem, end_smem, lse_smem,
        q_ready, k_ready, v_ready, mask_ready, k_free, v_free, turn,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        head = lax.axis_index("head")
        tile = order_ref[lax.axis_index("tile")]
        row = lax.div(tile, jnp.int32(tiles_per_row))
        num_full, num_visits = num_full_ref[tile], num_visits_ref[tile]

        def take_turn():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        @pl.when(warpgroup < WARPGROUPS)
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            first_query = lax.rem(tile, jnp.int32(tiles_per_row)) * tiles.tile_q + warpgroup * block_q
            queries = (row, pl.ds(first_query, block_q))
            plgpu.copy_gmem_to_smem(q_ref.at[(*queries, head)], q_smem.at[warpgroup], q_ready.at[warpgroup])
            plgpu.copy_gmem_to_smem(q_offset_ref.at[queries], q_offset_smem.at[warpgroup], q_ready.at[warpgroup])
            plgpu.barrier_wait(q_ready.at[warpgroup])
            acc = tile_ops.zeros(block_q, dim)
            total = plgpu.layout_cast(jnp.zeros((block_q,), jnp.float32), ROWS)
            highest = plgpu.layout_cast(jnp.full((block_q,), LOWEST, jnp.float32), ROWS)

            @pl.when(num_visits > 0)
            def _():
                plgpu.barrier_wait(k_ready.at[0])

            pl.when(warpgroup == 1)(take_turn)

            def visit(step, carry, masked):
                acc, total, highest = carry
                slot = lax.rem(step, jnp.int32(stages))

                s = tile_ops.product(q_smem.at[warpgroup], k_smem.at[slot].transpose((1, 0)), take_turn)
                if masked:
                    plgpu.barrier_wait(mask_ready.at[slot])
                    at = along_rows(plgpu.load(q_offset_smem.at[warpgroup], layout=ROWS), block_k)
                    begin = along_columns(plgpu.load(k_offset_smem.at[slot], layout=COLUMNS), block_q)
                    end = along_columns(plgpu.load(end_smem.at[slot], layout=COLUMNS), block_q)
                    s = jnp.where((begin <= at) & (at < end), s, -jnp.inf)
                plgpu.barrier_arrive(k_free.at[slot])
                previous, highest = highest, jnp.maximum(highest, s.max(axis=1) * (scale * LOG2E))
                shrink = jnp.exp2(previous - highest)
                p = jnp.exp2(s * (scale * LOG2E) - along_rows(highest, block_k))
                acc *= along_rows(shrink, dim)
                total = total * shrink + p.sum(axis=1)
                weights = p.astype(dtype)
                acc, total, highest, weights = lax.optimization_barrier((acc, total, highest, weights))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_ready.at[slot])
                plgpu.barrier_wait(turn)

                def wait_for_next_keys():
                    @pl.when(step + 1 < num_visits)
                    def _():
                        plgpu.barrier_wait(k_ready.at[lax.rem(step + 1, jnp.int32(stages))])

                (acc,) = tile_ops.add_products((acc,), ((weights, v_smem.at[slot]),), wait_for_next_keys)
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, total, highest

            carry = lax.fori_loop(0, num_full, lambda i, c: visit(i, c, False), (acc, total, highest))
            acc, total, highest = lax.fori_loop(num_full, num_visits, lambda i, c: visit(i, c, True), carry)
            pl.when(warpgroup == 0)(take_turn)

            some = total > 0
            acc *= along_rows(jnp.where(some, 1 / jnp.where(some, total, 1.0), 0.0), dim)
            plgpu.commit_smem()  # every warp has read its queries
            q_smem.at[warpgroup][...] = acc.astype(dtype)
            lse = highest / LOG2E + jnp.log(jnp.where(some, total, 1.0))
            lse_smem.at[warpgroup][...] = jnp.where(some, lse, -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[warpgroup], out_ref.at[(*queries, head)])
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[row, head, pl.ds(first_query, block_q)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            kv_head = lax.div(head, jnp.int32(group))

            @pl.loop(0, num_visits + stages)  # the last rounds wait until every slot was read
            def _(step):
                slot = lax.rem(step, jnp.int32(stages))
                more = step < num_visits
                keys = (row, pl.ds(visits_ref[tile, lax.clamp(0, step, num_visits - 1)] * block_k, block_k))

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(k_free.at[slot])

                @pl.when(more)
                def _():
                    plgpu.copy_gmem_to_smem(k_ref.at[(*keys, kv_head)], k_smem.at[slot], k_ready.at[slot])

                @pl.when(more & (step >= num_full))
                def _():
                    plgpu.copy_gmem_to_smem(k_offset_ref.at[keys], k_offset_smem.at[slot], mask_ready.at[slot])
                    plgpu.copy_gmem_to_smem(end_ref.at[keys], end_smem.at[slot], mask_ready.at[slot])

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(v_free.at[slot])

                @pl.when(more)
                def _():
                    plgpu.copy_gmem_to_smem(v_ref.at[(*keys, kv_head)], v_smem.at[slot], v_ready.at[slot])

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((rows, heads, num_queries), jnp.float32),
        ),
        scratch_types=(
            swizzled((WARPGROUPS, block_q, dim), dtype),
            swizzled((stages, block_k, dim), dtype),
            swizzled((stages, block_k, dim), dtype),
            plgpu.SMEM((WARPGROUPS, block_q), jnp.int32),
            plgpu.SMEM((stages, block_k), jnp.int32),
            plgpu.SMEM((stages, block_k), jnp.int32),
            plgpu.SMEM((WARPGROUPS, block_q), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        grid=(rows * tiles_per_row, heads),  # the last axis varies fastest: heads that share keys run together
        grid_names=("tile", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="tree_attention_forward",
    )
    return kernel(*lists, q, k, v, q_offset, k_offset, subtree_end)
