"""What the TPU kernels of tree attention share: the shape of a tile, the walk over a list, the mask.

A tile is `block_q` tokens × the query heads of one KV head against `block_k` keys: with grouped heads
it fills the matrix unit with few tokens, and few tokens skip finely.

Why lists, and why this way: the visits of a block of queries are known on the device only, and a TPU
kernel's own grid would either spend a step on every pair of blocks or need all lists in scalar memory:
1 MB for a row of 131,072 tokens, which is all there is. Here the grid runs over chunks of lists; their
starts are prefetched, the lists of a chunk come into scalar memory as a block of their own (16 KB),
and a pipeline inside the kernel runs over just the steps in them, its copies ahead of its work.

Letters: R rows, h KV heads, u parts of a KV head's query group, g query heads of a part, T tokens,
D head size, rows of a tile: g · block_q.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_lists import WorkLists

LANES = 128  # of a vector register: a column is kept as this many copies, side by side
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tiling:
    """The static choices of one call."""

    block_q: int  # tokens
    block_k: int
    group: int  # query heads of a tile
    scale: float
    window: int | None
    interpret: object  # pltpu.InterpretParams, or False

    @property
    def score_scale(self) -> float:
        """Scores are kept in base 2: one multiplication and the hardware's own power."""
        return self.scale * LOG2_E


@dataclass(frozen=True)
class Step:
    """One visit. `idle`: the outer block visits nothing."""

    first: jax.Array
    last: jax.Array
    full: jax.Array
    idle: jax.Array


def walk(
    body: Callable,  # (step, part, *refs): one visit
    lists: WorkLists,
    parts: int,  # how often each visit is made, once for each part of the group
    grid: tuple[int, ...],  # what to run the lists for; (R, heads)
    in_specs: Callable,  # (row, head) -> specs whose indices are (outer block, inner block, part)
    out_specs: Callable,
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[pltpu.MemorySpace],
    operands: Sequence[jax.Array],
    tiling: Tiling,
    name: str,
) -> list[jax.Array]:
    """Runs `body` over every step of every list, blocks of operands and results brought and taken."""
    num_in, num_out = len(operands), len(out_shapes)
    num_chunks, chunk = lists.words.shape[1:3]

    def kernel(start, words, *refs):
        ins, outs, (counter, *held) = refs[:num_in], refs[num_in : num_in + num_out], refs[num_in + num_out :]
        row, head, this_chunk = (pl.program_id(i) for i in range(3))
        base = (row * num_chunks + this_chunk) * (chunk + 1)

        def locate(i):
            """(outer block of the chunk, place in its list) of step i: a binary search."""
            outer, half = 0, chunk // 2
            while half:
                outer = outer + jnp.where(start[base + outer + half] <= i, half, 0)
                half //= 2
            return outer, i - start[base + outer]

        def placed(block_spec):
            def index(i, part):
                outer, place = locate(i)
                return block_spec.index_map(this_chunk * chunk + outer, words[0, 0, outer, place] >> 2, part)

            return pl.BlockSpec(block_spec.block_shape, index)

        def visit(*blocks):
            i, part = counter[0] // parts, counter[0] % parts
            counter[0] += 1
            outer, place = locate(i)
            word = words[0, 0, outer, place]
            step = Step(
                first=(place == 0) & (part == 0),
                last=(i + 1 == start[base + outer + 1]) & (part == parts - 1),
                full=(word & 1) != 0,
                idle=(word & 2) != 0,
            )
            body(step, *blocks, *held)

        counter[0] = 0
        pltpu.emit_pipeline(
            visit,
            grid=(start[base + chunk], parts),
            in_specs=[placed(x) for x in in_specs(row, head)],
            out_specs=[placed(x) for x in out_specs(row, head)],
        )(*ins, *outs)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    a_chunk = pl.BlockSpec((1, 1, *lists.words.shape[2:]), lambda r, h, c, _: (r, c, 0, 0), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(*grid, num_chunks),
            in_specs=[a_chunk, *[whole] * num_in],
            out_specs=[whole] * num_out,
            scratch_shapes=[pltpu.SMEM((1,), jnp.int32), *scratch],
        ),
        out_shape=list(out_shapes),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=tiling.interpret,
        name=name,
    )(lists.start.reshape(-1), lists.words, *operands)


def column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, LANES], each entry copied along its row. n is a multiple of 128."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def widen(columns: jax.Array, width: int) -> jax.Array:
    """[n, LANES] -> [n, width] of the same copies."""
    return jnp.tile(columns, (1, pl.cdiv(width, LANES)))[:, :width]


def mask_of(q: Sequence[jax.Array], k: Sequence[jax.Array], window: int | None) -> jax.Array:
    """From (offset[, position]) of queries and (offset, end[, position]) of keys that broadcast."""
    mask = (k[0] <= q[0]) & (q[0] < k[1])
    return mask if window is None else mask & (q[1] - k[2] < window)


def matmul(a: jax.Array, b: jax.Array, transpose_b: bool = False) -> jax.Array:
    """a @ b or a @ b.T, accumulated in float32. The matrix unit multiplies bfloat16: for float32
    operands the product is put together from several such."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if transpose_b else 0,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
    )
