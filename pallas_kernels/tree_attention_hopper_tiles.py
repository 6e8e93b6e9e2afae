"""Tiles of the Hopper kernels: shared-memory and register layouts, and products on the tensor cores."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
WARPGROUPS = 2  # that multiply; one more streams tiles in
# A thread's registers, moved from the producer to the consumers: together at most 65,536, or the increase waits for ever.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
MATRIX = plgpu.Layout.WGMMA  # registers of a matmul result, spread over a warpgroup
ROWS = MATRIX.reduce(1)  # one value for each of its rows
COLUMNS = MATRIX.reduce(0)  # one value for each of its columns


def swizzled(shape: tuple[int, ...], dtype: jnp.dtype):
    """Shared memory in the layout that TMA writes and the tensor cores read without bank conflicts."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def zeros(*shape: int) -> jax.Array:
    """An fp32 accumulator."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)


def along_rows(values: jax.Array, width: int) -> jax.Array:
    """[n] to [n, width]: row i holds values[i]."""
    return lax.broadcast_in_dim(values, (values.shape[0], width), [0])


def along_columns(values: jax.Array, height: int) -> jax.Array:
    """[n] to [height, n]: column j holds values[j]."""
    return lax.broadcast_in_dim(values, (height, values.shape[0]), [1])


def product(a, b, meanwhile: Callable[[], None] | None = None) -> jax.Array:
    """a @ b in fp32; `meanwhile` runs while the tensor cores do."""

    def start(ref):
        plgpu.wgmma(ref, a, b)
        if meanwhile is not None:
            meanwhile()
        return ref[...]

    return pl.run_scoped(start, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def add_products(
    accumulators: Sequence[jax.Array], factors: Sequence[tuple], meanwhile: Callable[[], None] | None = None
) -> tuple[jax.Array, ...]:
    """acc + a @ b of each accumulator and its pair (a, b), in place; one wait for all of them."""

    def start(refs):
        for ref, (a, b) in zip(refs, factors, strict=True):
            plgpu.wgmma(ref, a, b)
        if meanwhile is not None:
            meanwhile()

    return tuple(pl.run_state(start)(tuple(plgpu.ACC.init(acc) for acc in accumulators)))


def products(
    starts: tuple[jax.Array, jax.Array], first: tuple, second: tuple, between: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """(between(starts[0] + a @ b), starts[1] + c @ d) of the pairs first = (a, b) and second = (c, d).

    `between` runs while the tensor cores are at the second product.
    """

    def start(refs):
        one, two = refs
        plgpu.wgmma(one, *first)
        plgpu.wgmma(two, *second)
        one[...] = between(plgpu.wgmma_accumulator_load(one, wait_n=1))

    return pl.run_state(start)(tuple(plgpu.ACC.init(acc) for acc in starts))
