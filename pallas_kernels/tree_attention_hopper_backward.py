"""Backward pass of tree attention on Hopper: one kernel for dQ, one for dK and dV.

Both recompute the probabilities from the log-sum-exp: S = scale Q K', P = exp(S - lse), dP = dO V',
dS = P (dP - delta), dV = P' dO, dQ = scale dS K, dK = scale dS' Q (FlashAttention-2, arXiv:2307.08691).
Each output is summed by one warpgroup in a fixed order, so the result is deterministic.
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


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Rows a consumer warpgroup owns, rows of the other side a step, ring slots."""

    own: int = 64
    other: int = 64
    stages: int = 2

    @property
    def tile(self) -> int:
        """Rows a thread block owns."""
        return self.own * WARPGROUPS


def backward_q(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    q_offset: jax.Array,
    k_offset: jax.Array,
    subtree_end: jax.Array,
    lists: BlockLists,
    *,
    scale: float,
    tiles: BackwardTiles,
) -> jax.Array:
    """dQ [R, Tq, H, D].

    q and d_out [R, Tq, H, D], k and v [R, Tk, Hkv, D], lse and delta [R, H, Tq] fp32 what S and dP start from: -lse / scale and -delta, offsets and
    ends [R, T] int32; `lists` are those of query blocks of tiles.tile and key blocks of tiles.other.
    """
    rows, num_queries, heads, dim = q.shape
    group = heads // k.shape[2]
    tiles_per_row = num_queries // tiles.tile
    own, other, stages = tiles.own, tiles.other, tiles.stages
    dtype = q.dtype

    def body(
        visits_ref, num_full_ref, num_visits_ref, order_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref,
        q_offset_ref, k_offset_ref, end_ref, dq_ref,
        q_smem, do_smem, lse_smem, delta_smem, q_offset_smem, k_smem, v_smem, k_offset_smem, end_smem,
        q_ready, k_ready, v_ready, mask_ready, k_free, v_free,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        head = lax.axis_index("head")
        tile = order_ref[lax.axis_index("tile")]
        row = lax.div(tile, jnp.int32(tiles_per_row))
        num_full, num_visits = num_full_ref[tile], num_visits_ref[tile]

        @pl.when(warpgroup < WARPGROUPS)
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            first_query = lax.rem(tile, jnp.int32(tiles_per_row)) * tiles.tile + warpgroup * own
            queries = pl.ds(first_query, own)
            ready = q_ready.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[row, queries, head], q_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(do_ref.at[row, queries, head], do_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(lse_ref.at[row, head, queries], lse_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(delta_ref.at[row, head, queries], delta_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(q_offset_ref.at[row, queries], q_offset_smem.at[warpgroup], ready)
            plgpu.barrier_wait(ready)
            lse = along_rows(plgpu.load(lse_smem.at[warpgroup], layout=ROWS), other)
            delta = along_rows(plgpu.load(delta_smem.at[warpgroup], layout=ROWS), other)

            def visit(step, dq, masked):
                slot = lax.rem(step, jnp.int32(stages))

                def probabilities(s):
                    p = jnp.exp2(s * (scale * LOG2E))
                    if not masked:
                        return p
                    plgpu.barrier_wait(mask_ready.at[slot])
                    at = along_rows(plgpu.load(q_offset_smem.at[warpgroup], layout=ROWS), other)
                    begin = along_columns(plgpu.load(k_offset_smem.at[slot], layout=COLUMNS), own)
                    end = along_columns(plgpu.load(end_smem.at[slot], layout=COLUMNS), own)
                    return jnp.where((begin <= at) & (at < end), p, 0.0)

                plgpu.barrier_wait(k_ready.at[slot])
                plgpu.barrier_wait(v_ready.at[slot])
                p, dp = tile_ops.products(
                    (lse, delta),
                    (q_smem.at[warpgroup], k_smem.at[slot].transpose((1, 0))),
                    (do_smem.at[warpgroup], v_smem.at[slot].transpose((1, 0))),
                    probabilities,
                )
                plgpu.barrier_arrive(v_free.at[slot])
                ds = (p * dp).astype(dtype)
                (dq,) = tile_ops.add_products((dq,), ((ds, k_smem.at[slot]),))
                plgpu.barrier_arrive(k_free.at[slot])
                return dq

            dq = lax.fori_loop(0, num_full, lambda i, c: visit(i, c, False), tile_ops.zeros(own, dim))
            dq = lax.fori_loop(num_full, num_visits, lambda i, c: visit(i, c, True), dq)
            plgpu.commit_smem()  # every warp has read its queries
            q_smem.at[warpgroup][...] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[warpgroup], dq_ref.at[row, queries, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            kv_head = lax.div(head, jnp.int32(group))

            @pl.loop(0, num_visits + stages)  # the last rounds wait until every slot was read
            def _(step):
                slot = lax.rem(step, jnp.int32(stages))
                more = step < num_visits
                keys = (row, pl.ds(visits_ref[tile, lax.clamp(0, step, num_visits - 1)] * other, other))

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(v_free.at[slot])
                    plgpu.barrier_wait(k_free.at[slot])

                @pl.when(more)
                def _():
                    plgpu.copy_gmem_to_smem(k_ref.at[(*keys, kv_head)], k_smem.at[slot], k_ready.at[slot])
                    plgpu.copy_gmem_to_smem(v_ref.at[(*keys, kv_head)], v_smem.at[slot], v_ready.at[slot])

                @pl.when(more & (step >= num_full))
                def _():
                    plgpu.copy_gmem_to_smem(k_offset_ref.at[keys], k_offset_smem.at[slot], mask_ready.at[slot])
                    plgpu.copy_gmem_to_smem(end_ref.at[keys], end_smem.at[slot], mask_ready.at[slot])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=(
            swizzled((WARPGROUPS, own, dim), dtype),
            swizzled((WARPGROUPS, own, dim), dtype),
            plgpu.SMEM((WARPGROUPS, own), jnp.float32),
            plgpu.SMEM((WARPGROUPS, own), jnp.float32),
            plgpu.SMEM((WARPGROUPS, own), jnp.int32),
            swizzled((stages, other, dim), dtype),
            swizzled((stages, other, dim), dtype),
            plgpu.SMEM((stages, other), jnp.int32),
            plgpu.SMEM((stages, other), jnp.int32),
            plgpu.Barrier(num_arrivals=5, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
        grid=(rows * tiles_per_row, heads),
        grid_names=("tile", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="tree_attention_backward_q",
    )
    return kernel(*lists, q, k, v, d_out, lse, delta, q_offset, k_offset, subtree_end)


def backward_kv(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    q_offset: jax.Array,
    k_offset: jax.Array,
    subtree_end: jax.Array,
    lists: BlockLists,
    *,
    scale: float,
    tiles: BackwardTiles,
) -> tuple[jax.Array, jax.Array]:
    """(dK, dV), each [R, Tk, Hkv, D], summed over the query heads that share a key head.

    Arguments as for `backward_q`; `lists` are those of key blocks of tiles.tile and query blocks of tiles.other.
    """
    rows, num_keys, kv_heads, dim = k.shape
    group = q.shape[2] // kv_heads
    tiles_per_row = num_keys // tiles.tile
    own, other, stages = tiles.own, tiles.other, tiles.stages
    dtype = q.dtype

    def body(
        visits_ref, num_full_ref, num_visits_ref, order_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref,
        q_offset_ref, k_offset_ref, end_ref, dk_ref, dv_ref,
        k_smem, v_smem, k_offset_smem, end_smem, q_smem, do_smem, lse_smem, delta_smem, q_offset_smem,
        k_ready, q_ready, do_ready, mask_ready, free,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.axis_index("head")
        tile = order_ref[lax.axis_index("tile")]
        row = lax.div(tile, jnp.int32(tiles_per_row))
        num_full, num_steps = num_full_ref[tile] * group, num_visits_ref[tile] * group

        @pl.when(warpgroup < WARPGROUPS)
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            keys = (row, pl.ds(lax.rem(tile, jnp.int32(tiles_per_row)) * tiles.tile + warpgroup * own, own))
            ready = k_ready.at[warpgroup]
            plgpu.copy_gmem_to_smem(k_ref.at[(*keys, kv_head)], k_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(v_ref.at[(*keys, kv_head)], v_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(k_offset_ref.at[keys], k_offset_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(end_ref.at[keys], end_smem.at[warpgroup], ready)
            plgpu.barrier_wait(ready)

            def visit(step, carry, masked):
                dk, dv = carry
                slot = lax.rem(step, jnp.int32(stages))

                def probabilities(s):
                    p = jnp.exp2(s * (scale * LOG2E))
                    if not masked:
                        return p
                    plgpu.barrier_wait(mask_ready.at[slot])
                    at = along_columns(plgpu.load(q_offset_smem.at[slot], layout=COLUMNS), own)
                    begin = along_rows(plgpu.load(k_offset_smem.at[warpgroup], layout=ROWS), other)
                    end = along_rows(plgpu.load(end_smem.at[warpgroup], layout=ROWS), other)
                    return jnp.where((begin <= at) & (at < end), p, 0.0)

                plgpu.barrier_wait(q_ready.at[slot])
                plgpu.barrier_wait(do_ready.at[slot])
                starts = (plgpu.load(ref.at[slot], layout=COLUMNS) for ref in (lse_smem, delta_smem))
                p, dp = tile_ops.products(
                    tuple(along_columns(x, own) for x in starts),
                    (k_smem.at[warpgroup], q_smem.at[slot].transpose((1, 0))),
                    (v_smem.at[warpgroup], do_smem.at[slot].transpose((1, 0))),
                    probabilities,
                )
                ds = p * dp
                factors = ((ds.astype(dtype), q_smem.at[slot]), (p.astype(dtype), do_smem.at[slot]))
                dk, dv = tile_ops.add_products((dk, dv), factors)
                plgpu.barrier_arrive(free.at[slot])
                return dk, dv

            start = tile_ops.zeros(own, dim), tile_ops.zeros(own, dim)
            sums = lax.fori_loop(0, num_full, lambda i, c: visit(i, c, False), start)
            dk, dv = lax.fori_loop(num_full, num_steps, lambda i, c: visit(i, c, True), sums)
            plgpu.commit_smem()  # every warp has read its keys
            k_smem.at[warpgroup][...] = (dk * scale).astype(dtype)
            v_smem.at[warpgroup][...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_smem.at[warpgroup], dk_ref.at[(*keys, kv_head)])
            plgpu.copy_smem_to_gmem(v_smem.at[warpgroup], dv_ref.at[(*keys, kv_head)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            @pl.loop(0, num_steps + stages)  # the last rounds wait until every slot was read
            def _(step):
                slot = lax.rem(step, jnp.int32(stages))
                more = step < num_steps
                now = lax.clamp(0, step, num_steps - 1)
                queries = pl.ds(visits_ref[tile, lax.div(now, jnp.int32(group))] * other, other)
                head = kv_head * group + lax.rem(now, jnp.int32(group))

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                @pl.when(more)
                def _():
                    plgpu.copy_gmem_to_smem(q_ref.at[row, queries, head], q_smem.at[slot], q_ready.at[slot])
                    plgpu.copy_gmem_to_smem(lse_ref.at[row, head, queries], lse_smem.at[slot], q_ready.at[slot])
                    plgpu.copy_gmem_to_smem(do_ref.at[row, queries, head], do_smem.at[slot], do_ready.at[slot])
                    plgpu.copy_gmem_to_smem(delta_ref.at[row, head, queries], delta_smem.at[slot], do_ready.at[slot])

                @pl.when(more & (step >= num_full))
                def _():
                    plgpu.copy_gmem_to_smem(q_offset_ref.at[row, queries], q_offset_smem.at[slot], mask_ready.at[slot])

    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        scratch_types=(
            swizzled((WARPGROUPS, own, dim), dtype),
            swizzled((WARPGROUPS, own, dim), dtype),
            plgpu.SMEM((WARPGROUPS, own), jnp.int32),
            plgpu.SMEM((WARPGROUPS, own), jnp.int32),
            swizzled((stages, other, dim), dtype),
            swizzled((stages, other, dim), dtype),
            plgpu.SMEM((stages, other), jnp.float32),
            plgpu.SMEM((stages, other), jnp.float32),
            plgpu.SMEM((stages, other), jnp.int32),
            plgpu.Barrier(num_arrivals=4, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
        grid=(rows * tiles_per_row, kv_heads),
        grid_names=("tile", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="tree_attention_backward_kv",
    )
    return kernel(*lists, q, k, v, d_out, lse, delta, q_offset, k_offset, subtree_end)
