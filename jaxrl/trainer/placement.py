"""Where rows live on the mesh, and what cannot be laid out on it."""

import jax
from jax.sharding import Mesh

from jaxrl.attention.context import check_layout
from jaxrl.config import Config, ConfigError
from jaxrl.data import PackedRows
from jaxrl.mesh import row_sharding
from jaxrl.models.architecture import Architecture

_TOKEN_ARRAYS = ("tokens", "positions", "subtree_end", "predecessor")


def check_mesh(config: Config, architecture: Architecture, mesh: Mesh) -> None:
    """Raises ConfigError, naming the key and the fix, if rows, their tokens and reads, or the heads do
    not split evenly over the mesh. Parameters are checked where their shardings are made."""
    packing, context = config.packing, mesh.shape["context"]
    check_layout(mesh, packing.rows, packing.row_length, architecture.num_heads, architecture.num_kv_heads)
    if packing.reads % context:
        raise ConfigError(
            "packing.reads", f"{packing.reads} reads cannot be split over mesh.context = {context}: make it a multiple"
        )
    if mesh.shape["expert"] > 1:
        raise ConfigError(
            "mesh.expert", f"{architecture.model_type} has no experts to split {mesh.shape['expert']} ways: use 1"
        )


def put_rows(rows: PackedRows, mesh: Mesh) -> PackedRows:
    """Numpy rows as global arrays: rows over data × fsdp, tokens over context. In a run of several
    processes each holds all rows and hands its devices their shards."""
    tokens, tables = row_sharding(mesh, tokens=True), row_sharding(mesh, tokens=False)

    def put(path, x):
        sharding = tokens if path[0].name in _TOKEN_ARRAYS else tables
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree_util.tree_map_with_path(put, rows)
