"""Weights from the mesh to the process that has the sampler."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

# What a device holds of gathered weights at a time: large enough for the network, small beside what training takes.
GATHER_BYTES = 256 * 2**20


def gather(tree: Any) -> Any:
    """A pytree of arrays over the mesh, whole, where the sampler is: as it is if there is one process, else as numpy on
    process 0 and None on the others. Called by every process.

    Leaf by leaf, and a leaf of more than GATHER_BYTES in pieces along its largest dimension that is not split (of a
    scanned decoder, the layers); a matrix split along both of its dimensions is gathered at once.
    """
    if jax.process_count() == 1:
        return tree
    gathered = jax.tree.map(_gather_leaf, tree)
    return gathered if jax.process_index() == 0 else None


def _gather_leaf(x: jax.Array) -> np.ndarray:
    """The whole of x on process 0; elsewhere an array without its values, for nothing there reads them."""
    everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
    is_first = jax.process_index() == 0
    spec = [*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))]
    whole = [axis for axis in range(x.ndim) if spec[axis] is None]
    if x.nbytes <= GATHER_BYTES or not whole:
        copy = jax.jit(lambda x: x, out_shardings=everywhere)(x)
        return np.asarray(copy.addressable_data(0)) if is_first else np.empty(0)
    axis = max(whole, key=lambda axis: x.shape[axis])
    size = max(1, x.shape[axis] * GATHER_BYTES // x.nbytes)
    cut = jax.jit(partial(lax.dynamic_slice_in_dim, slice_size=size, axis=axis), out_shardings=everywhere)
    out = np.empty(x.shape if is_first else 0, x.dtype)
    for start in range(0, x.shape[axis], size):
        start = min(start, x.shape[axis] - size)  # the last piece may overlap the one before
        piece = jax.block_until_ready(cut(x, start))  # one at a time
        if is_first:
            out[(slice(None),) * axis + (slice(start, start + size),)] = piece.addressable_data(0)
    return out
