"""Tree attention over a device mesh: rows, heads and the tokens of a row split over devices.

Every device holds the queries of its tokens and gathers the keys and values of the whole row over
`context`: with few KV heads they are small. The gather's transpose is a reduce-scatter, which returns
the gradients to the keys' owners. Offsets travel with the tokens, so the result does not depend on
how the row was cut.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl.config import ConfigError
from jaxrl.mesh import ROW_AXES, row_shards

Kernel = Callable[..., tuple[jax.Array, jax.Array]]  # see blockwise_attention; scale and blocks bound


def check_layout(mesh: Mesh, rows: int, tokens: int, heads: int, kv_heads: int) -> None:
    """Raises ConfigError if rows, tokens or heads cannot be split evenly over the mesh."""
    tensor, context, ways = mesh.shape["tensor"], mesh.shape["context"], row_shards(mesh)
    if heads % tensor or kv_heads % tensor:
        raise ConfigError("mesh.tensor", f"{tensor} must divide the {heads} query heads and the {kv_heads} KV heads")
    if tokens % context:
        raise ConfigError(
            "packing.row_length", f"{tokens} tokens cannot be split over mesh.context = {context}: make it a multiple"
        )
    if rows % ways:
        raise ConfigError("packing.rows", f"{rows} rows cannot be split over data × fsdp = {ways}: make it a multiple")


def attend_row(
    q: jax.Array, k: jax.Array, v: jax.Array, subtree_end: jax.Array, kernel: Kernel, start: jax.Array | int
) -> jax.Array:
    """Attention of the queries at offsets start … start + Tq over whole rows of keys.

    A token that sees only itself and is seen by no other has its own value as output. Padding is of
    that kind: it is taken out of the kernel's hands, which skips its blocks and keeps whatever it
    holds, NaN included, from everything else.
    """
    num_queries, num_keys = q.shape[1], k.shape[1]
    offset = jnp.broadcast_to(jnp.arange(num_keys, dtype=jnp.int32), subtree_end.shape)
    reach = lax.cummax(subtree_end, axis=1)  # where the subtrees begun so far end
    reach_before = jnp.pad(reach[:, :-1], [(0, 0), (1, 0)])
    alone = (subtree_end == offset + 1) & (reach_before <= offset)

    def local(x):
        return lax.dynamic_slice_in_dim(x, start, num_queries, axis=1)

    out, _ = kernel(q, k, v, local(jnp.where(alone, -1, offset)), offset, jnp.where(alone, 0, subtree_end))
    return jnp.where(local(alone)[..., None, None], jnp.repeat(local(v), q.shape[2] // k.shape[2], axis=2), out)


def sharded_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, subtree_end: jax.Array, kernel: Kernel, mesh: Mesh
) -> jax.Array:
    """`attend_row` over the mesh; arguments and result as in `tree_attention`."""
    check_layout(mesh, q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    def on_device(q, k, v, subtree_end):
        k, v, subtree_end = (lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v, subtree_end))
        return attend_row(q, k, v, subtree_end, kernel, lax.axis_index("context") * q.shape[1])

    heads = PartitionSpec(ROW_AXES, "context", "tensor")
    specs = (heads, heads, heads, PartitionSpec(ROW_AXES, "context"))
    # The kernel's loops start from constants, which varying-axes checking would refuse.
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)(q, k, v, subtree_end)
