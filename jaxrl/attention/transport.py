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

    What XLA for TPU needs to run them side by side (docs/experiments.md): a rolled loop, for of an
    unrolled one it starts all transfers ahead of all kernels; and few transfers a step, for it keeps
    four in flight and runs the others alone. So keys and values travel as one array, and the integers that tell
    where keys are, a few bytes a token, are gathered beforehand. A barrier keeps what follows the
    kernel behind the transfers, which else are started as late as that can hide. The last step's transfer of keys
    is not needed: it hides like the others, and sparing it would compile the kernel a second time.
    """
    ways = _ways(size)

    def step(halves):
        return [
            lax.ppermute(x, axis, [(i, (i + way) % size) for i in range(size)]) for x, way in zip(halves, ways, strict=True)
        ]

    def travellers(keys):
        """Keys and values as they travel, and a function from a step and what is here then to a kernel's key side."""
        k, v, *places = keys
        num_tokens = k.shape[1]
        cut = _cut(num_tokens, size)
        everywhere = jax.tree.map(lambda x: lax.all_gather(x, axis), places)  # [C, R, n]

        def keys_at(step, halves):
            k, v = jnp.concatenate(halves, axis=2)
            owners = [(lax.axis_index(axis) - way * step) % size for way in ways]

            def here(x):
                return jnp.concatenate([x[owner][:, part] for owner, part in zip(owners, cut, strict=True)], axis=1)

            return k, v, *jax.tree.map(here, everywhere)

        return [jnp.stack([k, v])[:, :, part] for part in cut], keys_at

    def forward(*arrays, **settings):
        queries, keys = _sides(arrays)
        q = queries[0]
        dtype = accumulation_dtype(q)
        halves, keys_at = travellers(keys)

        def one_step(carry, i):
            halves, out, lse = carry
            arriving = step(halves)
            part = kernel.forward(*_arguments(queries, keys_at(i, halves)), **settings)
            arriving, part = lax.optimization_barrier((arriving, part))
            return (arriving, *merge(out, lse, *part)), None

        start = (halves, jnp.zeros(q.shape, dtype), jnp.full(q.shape[:3], -jnp.inf, dtype))
        (_, out, lse), _ = lax.scan(one_step, start, jnp.arange(size))
        return out.astype(q.dtype), lse

    def backward(*arrays, **settings):
        *arrays, out, lse, d_out, d_lse = arrays
        queries, keys = _sides(arrays)
        halves, keys_at = travellers(keys)
        cut = _cut(keys[0].shape[1], size)

        def one_step(carry, i):
            halves, dq, sums = carry
            arriving, sums = step(halves), step(sums)  # sums of these keys, from the devices that held them so far
            parts = kernel.backward(*_arguments(queries, keys_at(i, halves)), out, lse, d_out, d_lse, **settings)
            arriving, sums, (part, *of_keys) = lax.optimization_barrier((arriving, sums, parts))
            of_keys = jnp.stack(of_keys)
            sums = [x + of_keys[:, :, tokens] for x, tokens in zip(sums, cut, strict=True)]
            return (arriving, dq + part, sums), None

        sums = [jnp.zeros(x.shape, accumulation_dtype(x)) for x in halves]
        dq = jnp.zeros(queries[0].shape, accumulation_dtype(queries[0]))
        (_, dq, sums), _ = lax.scan(one_step, (halves, dq, sums), jnp.arange(size))
        return dq, *jnp.concatenate(step(sums), axis=2)

    return Kernel(forward, backward)


def _ways(size):
    """Half of the keys travel up the ring, half down. Two devices have one neighbour each: all go one way."""
    return (1,) if size == 2 else (1, -1)


def _cut(num_tokens, size):
    """The tokens that travel each way."""
    middle = num_tokens // 2
    return (slice(None),) if size == 2 else (slice(middle), slice(middle, None))


def _sides(arrays):
    """A kernel's arguments as (q, q_offset, q_position) and (k, v, k_offset, subtree_end, k_position)."""
    q, k, v, q_offset, k_offset, subtree_end, q_position, k_position = arrays
    return (q, q_offset, q_position), (k, v, k_offset, subtree_end, k_position)


def _arguments(queries, keys):
    """The inverse of `_sides`."""
    (q, q_offset, q_position), (k, v, k_offset, subtree_end, k_position) = queries, keys
    return q, k, v, q_offset, k_offset, subtree_end, q_position, k_position
