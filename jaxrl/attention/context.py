"""Tree attention over a device mesh: rows, heads and the tokens of a row split over devices.

Which tokens of a row a device holds is the planner's choice (`plan`); offsets travel with the tokens, so
the result does not depend on it. How keys reach the queries of other devices is the transport's.
"""

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxrl.attention.kernel import Kernel, differentiable
from jaxrl.attention.transport import gather, ring
from jaxrl.config import ConfigError
from jaxrl.mesh import ROW_AXES, row_shards


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


def sharded_attention(
    q: jax.Array,  # [R, T, H, D]
    k: jax.Array,  # [R, T, Hkv, D]
    v: jax.Array,  # [R, T, Hkv, D]
    offset: jax.Array,  # [R, T] int32
    subtree_end: jax.Array,  # [R, T] int32
    positions: jax.Array | None,  # [R, T] int32
    kernel: Kernel,
    transport: str,
    mesh: Mesh,
    *,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """(output [R, T, H, D], log-sum-exp [R, T, H]) of a kernel over the mesh; `transport` is "gather" or "ring"."""
    check_layout(mesh, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    size = mesh.shape["context"]
    if size > 1:
        kernel = ring(kernel, "context", size) if transport == "ring" else gather(kernel, "context")
    attend = differentiable(kernel, scale=scale, window=window)

    def on_device(q, k, v, offset, subtree_end, positions):
        return attend(q, k, v, offset, offset, subtree_end, positions, positions)

    heads, tokens = PartitionSpec(ROW_AXES, "context", "tensor"), PartitionSpec(ROW_AXES, "context")
    in_specs = (heads, heads, heads, tokens, tokens, None if positions is None else tokens)
    # The kernel's loops start from constants, which varying-axes checking would refuse.
    run = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=(heads, heads), check_vma=False)
    return run(q, k, v, offset, subtree_end, positions)
