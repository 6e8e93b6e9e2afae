"""Backward pass of tree attention on Hopper in one kernel: dK, dV and dQ with five products a step instead of seven.

A thread block owns keys and values and visits the queries that see them, as in `tree_attention_hopper_backward`;
dS goes through shared memory, and every step adds its share of dQ to global memory (TMA reduction in fp32).
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import tree_attention_hopper_tiles as tile_ops
from .tree_attention_hopper_backward import BackwardTiles
from .tree_attention_hopper_blocks import BlockLists
from .tree_attention_hopper_tiles import COLUMNS, LOG2E, ROWS, along_columns, along_rows, swizzled


def backward_fused(
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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dQ, dK, dV) in the dtype of q; arguments as for `backward_kv`. Two warpgroups, heads of 128."""
    rows, num_keys, kv_heads, dim = k.shape
    group = q.shape[2] // kv_heads
    tiles_per_row = num_keys // tiles.tile
    own, other, stages, warpgroups = tiles.own, tiles.other, tiles.stages, tiles.warpgroups
    half = dim // warpgroups
    dtype = q.dtype

    def body(
        order_ref, num_full_ref, num_visits_ref, visits_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref,
        q_offset_ref, k_offset_ref, end_ref, dq_ref, dk_ref, dv_ref,
        k_smem, v_smem, k_offset_smem, end_smem, q_smem, do_smem, lse_smem, delta_smem, q_offset_smem, ds_smem, dq_smem,
        k_ready, q_ready, do_ready, mask_ready, free, exchanged,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.axis_index("head")
        tile = order_ref[lax.axis_index("tile")]
        row = lax.div(tile, jnp.int32(tiles_per_row))
        num_full, num_steps = num_full_ref[tile] * group, num_visits_ref[tile] * group

        def queries_and_head(step):
            now = lax.clamp(0, step, num_steps - 1)
            queries = pl.ds(visits_ref[tile, lax.div(now, jnp.int32(group))] * other, other)
            return queries, kv_head * group + lax.rem(now, jnp.int32(group))

        @pl.when(warpgroup < warpgroups)
        def _consume():
            plgpu.set_max_registers(tiles.registers, action="increase")
            mine = pl.ds(warpgroup * own, own)
            keys = (row, pl.ds(lax.rem(tile, jnp.int32(tiles_per_row)) * tiles.tile + warpgroup * own, own))
            my_half = pl.ds(warpgroup * half, half)
            plgpu.copy_gmem_to_smem(k_ref.at[(*keys, kv_head)], k_smem.at[mine], k_ready)
            plgpu.copy_gmem_to_smem(v_ref.at[(*keys, kv_head)], v_smem.at[mine], k_ready)
            plgpu.copy_gmem_to_smem(k_offset_ref.at[keys], k_offset_smem.at[warpgroup], k_ready)
            plgpu.copy_gmem_to_smem(end_ref.at[keys], end_smem.at[warpgroup], k_ready)
            ds_smem.at[1, mine][...] = tile_ops.zeros(own, other).astype(dtype)  # as if left by a step before the first
            plgpu.commit_smem()
            plgpu.barrier_arrive(exchanged)
            plgpu.barrier_wait(k_ready)  # of both warpgroups

            def send(dq, step):
                queries, head = queries_and_head(step)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_smem.at[warpgroup][...] = dq
                plgpu.commit_smem()
                target = dq_ref.at[row, queries, head, my_half]
                plgpu.copy_smem_to_gmem(dq_smem.at[warpgroup], target, reduction_op="add")

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
                    (k_smem.at[mine], q_smem.at[slot].transpose((1, 0))),
                    (v_smem.at[mine], do_smem.at[slot].transpose((1, 0))),
                    probabilities,
                )
                ds = (p * dp).astype(dtype)
                plgpu.barrier_wait(exchanged)  # dS of the step before, whose dQ runs beside this step's dK and dV
                before = ds_smem.at[lax.rem(step + 1, jnp.int32(2))]
                dk, dv, dq = tile_ops.add_products(
                    (dk, dv, tile_ops.zeros(other, half)),
                    (
                        (ds, q_smem.at[slot]),
                        (p.astype(dtype), do_smem.at[slot]),
                        (before.transpose((1, 0)), k_smem.at[:, my_half]),
                    ),
                )
                plgpu.barrier_arrive(free.at[slot])
                ds_smem.at[lax.rem(step, jnp.int32(2)), mine][...] = ds
                send(dq, step - 1)
                plgpu.barrier_arrive(exchanged)
                return dk, dv

            start = tile_ops.zeros(own, dim), tile_ops.zeros(own, dim)
            sums = lax.fori_loop(0, num_full, lambda i, c: visit(i, c, False), start)
            dk, dv = lax.fori_loop(num_full, num_steps, lambda i, c: visit(i, c, True), sums)
            plgpu.barrier_wait(exchanged)
            last = ds_smem.at[lax.rem(num_steps + 1, jnp.int32(2))]
            send(tile_ops.product(last.transpose((1, 0)), k_smem.at[:, my_half]), num_steps - 1)
            plgpu.barrier_arrive(exchanged)
            plgpu.barrier_wait(exchanged)  # the other warpgroup no longer reads these keys
            k_smem.at[mine][...] = (dk * scale).astype(dtype)
            v_smem.at[mine][...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_smem.at[mine], dk_ref.at[(*keys, kv_head)])
            plgpu.copy_smem_to_gmem(v_smem.at[mine], dv_ref.at[(*keys, kv_head)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def _produce():
            plgpu.set_max_registers(40 if warpgroups == 2 else 32, action="decrease")

            @pl.loop(0, num_steps + stages)  # the last rounds wait until every slot was read
            def _(step):
                slot = lax.rem(step, jnp.int32(stages))
                more = step < num_steps
                queries, head = queries_and_head(step)

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

    f32_swizzled = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        scratch_types=(
            swizzled((tiles.tile, dim), dtype),
            swizzled((tiles.tile, dim), dtype),
            plgpu.SMEM((warpgroups, own), jnp.int32),
            plgpu.SMEM((warpgroups, own), jnp.int32),
            swizzled((stages, other, dim), dtype),
            swizzled((stages, other, dim), dtype),
            plgpu.SMEM((stages, other), jnp.float32),
            plgpu.SMEM((stages, other), jnp.float32),
            plgpu.SMEM((stages, other), jnp.int32),
            swizzled((2, tiles.tile, other), dtype),
            plgpu.SMEM((warpgroups, other, half), jnp.float32, transforms=f32_swizzled),
            plgpu.Barrier(num_arrivals=4 * warpgroups),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        grid=(rows * tiles_per_row, kv_heads),
        grid_names=("tile", "head"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not tiles.auto_barriers),
        kernel_name="tree_attention_backward_fused",
    )
    dq = jax.new_ref(jnp.zeros(q.shape, jnp.float32))
    dk, dv = kernel(*lists, q, k, v, d_out, lse, delta, q_offset, k_offset, subtree_end, dq)
    return (dq[...] * scale).astype(dtype), dk, dv
