"""Device meshes, axis names, and the rules that map logical axes to them.

Axes, in order: `data` (replicas), `fsdp` (parameters and batch), `context` (tokens of a row),
`tensor` (heads, mlp, vocabulary), `expert`. Rows are split over data × fsdp, the tokens of a row over
context. Axes are `AxisType.Auto`: Linen's logical constraints need it under jax 0.11.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl.config import ConfigError, MeshConfig

AXES = ("data", "fsdp", "context", "tensor", "expert")
ROW_AXES = ("data", "fsdp")

# Logical axis name -> mesh axes. Parameters name every dimension with one of these; `norm` and
# `layers` stay whole: a norm is a few kilobytes and a scanned layer axis is indexed, never sharded.
LOGICAL_RULES = (
    ("rows", ROW_AXES),
    ("tokens", "context"),
    ("reads", "context"),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("head_dim", None),
    ("mlp", "tensor"),
    ("lora_rank", None),
    ("norm", None),
    ("layers", None),
)


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """A mesh over all devices of all processes. `data = -1` takes what the other axes leave.

    Raises ConfigError if the axes' product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    rest = int(np.prod(sizes[1:]))
    if sizes[0] == -1:
        if len(devices) % rest:
            raise ConfigError("mesh", f"fsdp × context × tensor × expert = {rest} does not divide {len(devices)} devices")
        sizes[0] = len(devices) // rest
    if int(np.prod(sizes)) != len(devices):
        shape = " × ".join(f"{a} {s}" for a, s in zip(AXES, sizes, strict=True))
        raise ConfigError("mesh", f"{shape} needs {int(np.prod(sizes))} devices, this run has {len(devices)}")
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def row_sharding(mesh: Mesh, *, tokens: bool) -> NamedSharding:
    """Sharding of a [R, T] array (tokens) or a [R, ...] table."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES, "context") if tokens else PartitionSpec(ROW_AXES))


def row_shards(mesh: Mesh) -> int:
    """How many ways the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]
