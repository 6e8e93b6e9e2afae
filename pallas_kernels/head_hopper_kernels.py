"""Tiles of logits on Hopper: one loop of matrix products, with a softmax or a gradient at the end of each tile.

A thread block owns `tiles.reads` rows of the states and walks over a share of the vocabulary. One warpgroup streams both
matrices in through a ring of shared memory; two multiply, each for half of the reads, and use a tile while it is in
registers. The blocks of a cluster have different reads and the same columns: what one loads of the head, all get.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tree_attention_hopper_tiles import (
    CONSUMER_REGISTERS,
    MATRIX,
    PRODUCER_REGISTERS,
    ROWS,
    WARPGROUPS,
    along_rows,
    swizzled,
)

_OWN = 64  # reads of a warpgroup
_WIDTH = 64  # columns of the model width a step: what the swizzle takes
READS_MULTIPLE = 8  # rows of a swizzled tile, which the states are loaded in
MULTIPLE = 64  # of the model width and of the vocabulary, padding included: a row of a swizzled tile
_PIECE = 64  # columns of a gradient that are written at once
_NO_LOGIT = -1e25  # of a column that is none: finite at any temperature, for 0 times it is wanted
_MULTIPROCESSORS = 132  # of an H100 and an H200
_GROUP = 12  # blocks of reads that go over the same columns together: their states stay in the L2 cache
_PARTS = range(8, 65)  # of the vocabulary, that many thread blocks for the same reads
_START = 0.5  # tiles that a thread block's start costs


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Columns of the vocabulary a step, slots of the ring, thread blocks of a cluster."""

    vocab: int = 256
    stages: int = 4
    cluster: int = 1

    @property
    def reads(self) -> int:
        """Reads of a cluster: per-read arrays are padded to a multiple of them."""
        return _OWN * WARPGROUPS * self.cluster


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a warpgroup is."""

    warpgroup: jax.Array
    part: jax.Array
    rows: pl.Slice
    num_tiles: jax.Array
    tile: Callable[[jax.Array], jax.Array]  # number of the i-th tile of this part among all
    begin: jax.Array  # column of the head at which tile 0 begins
    logits: Callable[[jax.Array], jax.Array]  # of the i-th tile, float32, before any temperature; each once, in order


def softmax_parts(
    states: jax.Array,
    head: jax.Array,
    target: jax.Array,
    scale: jax.Array,
    *,
    vocab: int,
    vocab_major: bool,
    tiles: Tiles,
) -> tuple[jax.Array, ...]:
    """What the softmax of base 2 of y = scale · (states @ head) needs, over each of P parts of the vocabulary.

    states [U, E], U a multiple of READS_MULTIPLE; head [E, V], or [V, E] if vocab_major, `vocab` of the V counting; target int32 and scale float32, both [N], N being U rounded up to
    a multiple of tiles.reads. Four arrays [P, N] float32: the highest y; the sum of w = 2^(y - highest); the sum of
    w (y - highest); and y of the target, 0 in the parts that do not have it.
    """

    def consume(place: _Place, per_read, output_refs, scratch_refs):
        target, scale = per_read

        def visit(i, carry):
            highest, total, mean, chosen = carry
            z = place.logits(i)
            is_target = _columns(tiles.vocab) == along_rows(target - place.begin - place.tile(i) * tiles.vocab, tiles.vocab)
            chosen += jnp.where(is_target, z, 0.0).sum(axis=1)
            previous, highest = highest, jnp.maximum(highest, z.max(axis=1) * scale)
            shift = previous - highest
            shrink = jnp.exp2(shift)
            below = z * along_rows(scale, tiles.vocab) - along_rows(highest, tiles.vocab)
            weight = jnp.exp2(below)
            mean = (mean + total * shift) * shrink + (weight * below).sum(axis=1)
            total = total * shrink + weight.sum(axis=1)
            return highest, total, mean, chosen

        zero = plgpu.layout_cast(jnp.zeros((_OWN,), jnp.float32), ROWS)
        lowest = plgpu.layout_cast(jnp.full((_OWN,), _NO_LOGIT, jnp.float32), ROWS)
        *sums, chosen = lax.fori_loop(0, place.num_tiles, visit, (lowest, zero, zero, zero))
        (staging_ref,) = scratch_refs
        for i, result in enumerate((*sums, chosen * scale)):
            staging_ref.at[place.warpgroup, i][...] = result
        plgpu.commit_smem()
        for i, output_ref in enumerate(output_refs):
            plgpu.copy_smem_to_gmem(staging_ref.at[place.warpgroup, i], output_ref.at[place.part, place.rows])
        plgpu.wait_smem_to_gmem(0)

    num_parts = _num_parts(target.shape[0] // tiles.reads, pl.cdiv(vocab, tiles.vocab), tiles.cluster)
    outputs = (jax.ShapeDtypeStruct((num_parts, target.shape[0]), jnp.float32),) * 4
    scratch = (plgpu.SMEM((WARPGROUPS, 4, _OWN), jnp.float32),)
    window = jnp.zeros(2, jnp.int32)
    return _over_tiles(
        "head_softmax",
        consume,
        states,
        head,
        target,
        scale[None],
        window,
        vocab,
        vocab,
        num_parts,
        outputs,
        scratch,
        vocab_major,
        tiles,
    )


def logits_gradient(
    states: jax.Array,
    head: jax.Array,
    target: jax.Array,
    coefficients: jax.Array,
    begin: jax.Array,
    first: jax.Array,
    size: int,
    *,
    vocab: int,
    vocab_major: bool,
    tiles: Tiles,
) -> jax.Array:
    """The gradient of columns [begin, begin + size) of states @ head, [U, size] in the dtype of states; 0 in those before `first`.

    As for `softmax_parts`, but a target before `first` must be -1. The coefficients, [5, N] float32: scale, log2 of the
    sum of all 2^y, and a, b, c of the gradient a [column = target] - p (b + c log2 p).
    """

    def consume(place: _Place, per_read, output_refs, scratch_refs):
        target, scale, lse, at_target, at_all, per_log = per_read
        (gradient_ref,), (staging_ref,) = output_refs, scratch_refs
        columns = _columns(_PIECE)

        def visit(i, carry):
            z = place.logits(i)
            for piece in range(tiles.vocab // _PIECE):
                at = place.tile(i) * tiles.vocab + piece * _PIECE
                log_p = z[:, piece * _PIECE : (piece + 1) * _PIECE] * along_rows(scale, _PIECE) - along_rows(lse, _PIECE)
                slope = along_rows(at_all, _PIECE) + along_rows(per_log, _PIECE) * log_p
                is_target = columns == along_rows(target - place.begin - at, _PIECE)
                gradient = jnp.where(is_target, along_rows(at_target, _PIECE), 0.0) - jnp.exp2(log_p) * slope
                staged_ref = staging_ref.at[place.warpgroup, piece % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                staged_ref[...] = gradient.astype(states.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staged_ref, gradient_ref.at[place.rows, pl.ds(at, _PIECE)])
            return carry

        lax.fori_loop(0, place.num_tiles, visit, None)
        plgpu.wait_smem_to_gmem(0)

    num_parts = _num_parts(target.shape[0] // tiles.reads, pl.cdiv(size, tiles.vocab), tiles.cluster)
    outputs = (jax.ShapeDtypeStruct((states.shape[0], size), states.dtype),)
    scratch = (swizzled((WARPGROUPS, 2, _OWN, _PIECE), states.dtype),)
    window = jnp.stack([begin, first]).astype(jnp.int32)
    (gradient,) = _over_tiles(
        "head_logits_gradient",
        consume,
        states,
        head,
        target,
        coefficients,
        window,
        size,
        vocab,
        num_parts,
        outputs,
        scratch,
        vocab_major,
        tiles,
    )
    return gradient


def _columns(width: int) -> jax.Array:
    """[reads of a warpgroup, width] int32: each column's number."""
    return plgpu.broadcasted_iota(jnp.int32, (_OWN, width), 1, layout=MATRIX)


def _num_parts(num_blocks: int, num_tiles: int, cluster: int) -> int:
    """Into how many parts the tiles of the vocabulary are cut, so that the last round of thread blocks is a full one."""
    slots = _MULTIPROCESSORS // cluster

    def cost(parts):
        return pl.cdiv(num_blocks * parts, slots) * (pl.cdiv(num_tiles, parts) + _START)

    return min((p for p in _PARTS if p <= num_tiles), key=cost, default=num_tiles)


def _over_tiles(
    name: str,
    consume: Callable,  # (place, target and floats of its reads, output refs, scratch refs): what a warpgroup does with its tiles
    states: jax.Array,
    head: jax.Array,
    target: jax.Array,  # [N]
    floats: jax.Array,  # [k, N]
    window: jax.Array,  # [2]: column of the head at which tile 0 begins, and the first that counts
    size: int,  # columns
    vocab: int,  # columns of the head that count
    num_parts: int,
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    scratch: tuple,
    vocab_major: bool,
    tiles: Tiles,
) -> tuple[jax.Array, ...]:
    num_steps = pl.cdiv(states.shape[1], _WIDTH)  # what lies past an edge of either matrix is read as zeros
    num_blocks = target.shape[0] // tiles.reads
    tiles_per_part, longer_parts = divmod(pl.cdiv(size, tiles.vocab), num_parts)
    group = min(_GROUP, num_blocks)
    stages, clustered = tiles.stages, tiles.cluster > 1

    def body(window_ref, states_ref, head_ref, target_ref, floats_ref, *refs):
        output_refs, refs = refs[: len(outputs)], refs[len(outputs) :]
        scratch_refs, refs = refs[: len(scratch)], refs[len(scratch) :]
        states_smem, head_smem, ready, free = refs
        warpgroup = lax.axis_index("warpgroup")
        # Blocks of reads vary fastest within a group, then parts, then groups.
        index = lax.axis_index("block")
        rest, within = lax.div(index, jnp.int32(group)), lax.rem(index, jnp.int32(group))
        part = lax.rem(rest, jnp.int32(num_parts))
        block = lax.div(rest, jnp.int32(num_parts)) * group + within
        begin, first = window_ref[0], window_ref[1]
        first_tile = part * tiles_per_part + lax.min(part, jnp.int32(longer_parts))
        num_tiles = tiles_per_part + (part < longer_parts).astype(jnp.int32)
        num_tiles = jnp.where(block < num_blocks, num_tiles, 0)  # the last group may be a smaller one
        first_row = block * tiles.reads
        if clustered:
            first_row += lax.axis_index("peer") * (_OWN * WARPGROUPS)

        @pl.when((warpgroup < WARPGROUPS) & (num_tiles > 0))
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            rows = pl.ds(first_row + warpgroup * _OWN, _OWN)
            refs = (target_ref.at[rows], *(floats_ref.at[i, rows] for i in range(floats.shape[0])))
            values = [plgpu.load(ref, layout=ROWS, optimized=False) for ref in refs]

            def logits(i):
                column = begin + (first_tile + i) * tiles.vocab
                columns = _columns(tiles.vocab)
                none = (columns < first - column) | (columns >= vocab - column)
                start = jnp.where(none, _NO_LOGIT, 0.0)

                def multiply(acc_ref):
                    def step(k, acc_ref):
                        now = i * num_steps + k
                        slot = lax.rem(now, jnp.int32(stages))
                        plgpu.barrier_wait(ready.at[slot])
                        b = head_smem.at[slot].transpose((1, 0)) if vocab_major else head_smem.at[slot]
                        plgpu.wgmma(acc_ref, states_smem.at[slot, pl.ds(warpgroup * _OWN, _OWN)], b)
                        plgpu.wgmma_wait(1)

                        @pl.when(k > 0)
                        def _():
                            plgpu.barrier_arrive(free.at[lax.rem(now - 1, jnp.int32(stages))])

                        return acc_ref

                    lax.fori_loop(0, num_steps, step, acc_ref)

                z = pl.run_state(multiply)(plgpu.ACC.init(start))
                plgpu.barrier_arrive(free.at[lax.rem((i + 1) * num_steps - 1, jnp.int32(stages))])
                return z

            consume(
                _Place(warpgroup, part, rows, num_tiles, lambda i: first_tile + i, begin, logits),
                values,
                output_refs,
                scratch_refs,
            )

        @pl.when((warpgroup == WARPGROUPS) & (num_tiles > 0))
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            total = num_tiles * num_steps

            @pl.loop(0, total + stages)  # the last rounds wait until every slot was read
            def _(now):
                slot = lax.rem(now, jnp.int32(stages))

                @pl.when(now >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                @pl.when(now < total)
                def _():
                    width = pl.ds(lax.rem(now, jnp.int32(num_steps)) * _WIDTH, _WIDTH)
                    column = begin + (first_tile + lax.div(now, jnp.int32(num_steps))) * tiles.vocab
                    columns = pl.ds(pl.multiple_of(column, MULTIPLE), tiles.vocab)
                    rows = pl.ds(first_row, _OWN * WARPGROUPS)
                    plgpu.copy_gmem_to_smem(states_ref.at[rows, width], states_smem.at[slot], ready.at[slot])
                    source = head_ref.at[columns, width] if vocab_major else head_ref.at[width, columns]
                    peers = "peer" if clustered else None
                    plgpu.copy_gmem_to_smem(source, head_smem.at[slot], ready.at[slot], collective_axes=peers)

    free = {"num_arrivals": WARPGROUPS, "num_barriers": stages}
    head_tile = (tiles.vocab, _WIDTH) if vocab_major else (_WIDTH, tiles.vocab)
    kernel = plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=(
            *scratch,
            swizzled((stages, _OWN * WARPGROUPS, _WIDTH), states.dtype),
            swizzled((stages, *head_tile), head.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.ClusterBarrier(collective_axes=("peer",), **free) if clustered else plgpu.Barrier(**free),
        ),
        grid=(pl.cdiv(num_blocks, group) * group * num_parts,),
        grid_names=("block",),
        cluster=(tiles.cluster,) if clustered else (),
        cluster_names=("peer",) if clustered else (),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name=name,
    )
    return kernel(window, states, head, target, floats)
