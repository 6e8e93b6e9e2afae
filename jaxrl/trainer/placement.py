"""Where rows live on the mesh, and what cannot be laid out on it."""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.attention.context import check_layout
from jaxrl.attention.plan import plan_row
from jaxrl.config import Config, ConfigError
from jaxrl.data import PackedRows
from jaxrl.mesh import row_sharding
from jaxrl.models.architecture import Architecture

_TOKEN_ARRAYS = ("tokens", "positions", "subtree_end", "predecessor", "routed_experts", "axis_positions", "offset")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedRows(PackedRows):
    """Rows as devices hold them: a row's tokens may lie in another order, spread over the context axis.

    A place is an index into that order: device d holds the places from d · T / context on. Token arrays
    are by place; `predecessor` and `reads.state` name places; `subtree_end` and the segment table keep
    the offsets of the row contract, and `offset` leads from places to them. The model never
    needs to know: it sees positions, and attention compares offsets wherever the tokens lie.
    """

    offset: Any  # [R, T] int32 offset of the token at each place; -1 on padding


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


def place_rows(rows: PackedRows, num_devices: int) -> PlacedRows:
    """Numpy rows in the order in which `num_devices` devices share the work of each row evenly."""
    num_tokens = (rows.segments.start + rows.segments.length).max(1)
    arrays = {f.name: getattr(rows, f.name) for f in fields(PackedRows)}
    if num_devices == 1:
        offset = np.broadcast_to(np.arange(rows.tokens.shape[1], dtype=np.int32), rows.tokens.shape)
        return PlacedRows(**arrays, offset=np.where(offset < num_tokens[:, None], offset, -1))

    plans = [plan_row(*row, num_devices) for row in zip(rows.subtree_end, num_tokens, strict=True)]
    order = np.stack([plan.order for plan in plans])
    place = np.argsort(order, axis=1).astype(np.int32)

    def places_of(offset):
        return np.where(offset < 0, -1, np.take_along_axis(place, np.maximum(offset, 0), axis=1))

    arrays |= {"predecessor": places_of(rows.predecessor), "reads": replace(rows.reads, state=places_of(rows.reads.state))}
    row = np.arange(len(order))[:, None]
    arrays |= {name: x[row, order] for name, x in arrays.items() if name in _TOKEN_ARRAYS}
    return PlacedRows(**arrays, offset=np.where(order < num_tokens[:, None], order, -1))


def put_rows(rows: PackedRows, mesh: Mesh) -> PlacedRows:
    """Numpy rows as global arrays: rows over data × fsdp, tokens over context. In a run of several
    processes each holds all rows, makes the same plan and hands its devices their shards."""
    tokens, tables = row_sharding(mesh, tokens=True), row_sharding(mesh, tokens=False)

    def put(path, x):
        sharding = tokens if path[0].name in _TOKEN_ARRAYS else tables
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree_util.tree_map_with_path(put, place_rows(rows, mesh.shape["context"]))
