"""Bringing keys and values to the queries of other devices: a kernel in, a kernel over a mesh axis out.

Both functions here take a kernel for one device and return one whose arrays are a device's own tokens,
queries and keys alike, to be called under shard_map. Keys travel with their offsets, ends and
positions, and the gradients of keys and values return, summed in float32 at least, to their owners.
Every device takes part in every collective, whatever it has to compute.

`gather` brings all of them at once: with few KV heads they are small (2 KB a token at 4 heads of 128 in
bf16), and over NVLink near free. `ring` holds those of one other device at a time and moves them while
the kernel works: with the next neighbour only, half of them each way where there are two neighbours.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.attention.kernel import Kernel, accumulation_dtype
from jaxrl.attention.merge import merge


def gather(kernel: Kernel, axis: str) -> Kernel:
    """All keys and values on every device; their gradients by reduce-scatter. The backward pass gathers
    again, so that nothing of the row's length is kept between the two."""

    def everywhere(keys):
        return jax.tree.map(lambda x: lax.all_gather(x, axis, axis=1, tiled=True), keys)

    def to_owner(x):
        return lax.psum_scatter(x.astype(accumulation_dtype(x)), axis, scatter_dimension=1, tiled=True)

    def forward(*arrays, **settings):
        queries, keys = _sides(arrays)
        return kernel.forward(*_arguments(queries, everywhere(keys)), **settings)

    def backward(*arrays, **settings):
        *arrays, out, lse, d_out, d_lse = arrays
        queries, keys = _sides(arrays)
        arrays = _arguments(queries, everywhere(keys))
        dq, dk, dv = kernel.backward(*arrays, out, lse, d_out, d_lse, **settings)
        return dq, to_owner(dk), to_owner(dv)

    return Kernel(forward, backward)


def ring(kernel: Kernel, axis: str, size: int) -> Kernel:
    """Keys and values pass from device to device, `size` of them on `axis`; results are merged by their
    log-sum-exp. In the backward pass the gradients follow one step behind, so that each
    transfer, of either, lies beside a call of the kernel that it does not depend on.

    The loop is rolled: XLA for TPU starts the transfers of an unrolled one ahead of all kernels, which
    keeps every step's keys alive and overlaps nothing (docs/experiments.md).
    """

    def step(halves):
        return _pass_on(halves, axis, size)

    def forward(*arrays, **settings):
        queries, keys = _sides(arrays)
        q = queries[0]
        dtype = accumulation_dtype(q)

        def attend(keys, out, lse):
            return merge(out, lse, *kernel.forward(*_arguments(queries, _join(keys)), **settings))

        def one_step(carry, _):
            keys, out, lse = carry
            arriving = step(keys)
            return (arriving, *attend(keys, out, lse)), None

        start = (_halves(keys, size), jnp.zeros(q.shape, dtype), jnp.full(q.shape[:3], -jnp.inf, dtype))
        carry, _ = lax.scan(one_step, start, length=size - 1)
        out, lse = attend(*carry)
        return out.astype(q.dtype), lse

    def backward(*arrays, **settings):
        *arrays, out, lse, d_out, d_lse = arrays
        queries, keys = _sides(arrays)
        k, v = keys[:2]

        def add(keys, dq, sums):
            more, *of_keys = kernel.backward(*_arguments(queries, _join(keys)), out, lse, d_out, d_lse, **settings)
            return dq + more, jax.tree.map(jnp.add, sums, _halves(tuple(of_keys), size))

        def one_step(carry, _):
            keys, dq, sums = carry
            arriving, sums = step(keys), step(sums)  # sums of these keys, from the devices that held them so far
            return (arriving, *add(keys, dq, sums)), None

        zeros = tuple(jnp.zeros(x.shape, accumulation_dtype(x)) for x in (k, v))
        dq = jnp.zeros(queries[0].shape, accumulation_dtype(queries[0]))
        (keys, dq, sums), _ = lax.scan(one_step, (_halves(keys, size), dq, _halves(zeros, size)), length=size - 1)
        dq, sums = add(keys, dq, step(sums))
        return dq, *_join(step(sums))

    return Kernel(forward, backward)


def _sides(arrays):
    """A kernel's arguments as (q, q_offset, q_position) and (k, v, k_offset, subtree_end, k_position)."""
    q, k, v, q_offset, k_offset, subtree_end, q_position, k_position = arrays
    return (q, q_offset, q_position), (k, v, k_offset, subtree_end, k_position)


def _arguments(queries, keys):
    """The inverse of `_sides`."""
    (q, q_offset, q_position), (k, v, k_offset, subtree_end, k_position) = queries, keys
    return q, k, v, q_offset, k_offset, subtree_end, q_position, k_position


def _halves(arrays, size):
    """[what travels up the ring, what travels down], half of the tokens each. Two devices have one
    neighbour each: everything goes one way."""
    if size == 2:
        return [arrays]
    cut = arrays[0].shape[1] // 2
    return [jax.tree.map(lambda x: x[:, :cut], arrays), jax.tree.map(lambda x: x[:, cut:], arrays)]


def _join(halves):
    """The inverse of `_halves`."""
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *halves)


def _pass_on(halves, axis, size):
    """What the neighbours held: the first half moves to the next device, the second to the one before."""
    moves = [[(i, (i + step) % size) for i in range(size)] for step in (1, -1)]
    return [jax.tree.map(lambda x, m=m: lax.ppermute(x, axis, m), half) for half, m in zip(halves, moves, strict=False)]
