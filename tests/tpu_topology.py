"""TPU slices that are not there: libtpu compiles for them on any x86-64 Linux machine.

`slice_devices` gives the devices of a slice; a mesh over them, or a SingleDeviceSharding, makes
`jax.jit(f).lower(shapes).compile()` compile for it. Nothing can run there.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding, use_abstract_mesh

# One slice of each generation that is supported: 4 chips, for v5p 8.
SLICES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x2", "v6e": "v6e:2x2"}

# libtpu asks the cloud's metadata server where it runs, and lets one process of a machine load it at a
# time: both are for machines that have TPUs.
_NOT_ON_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (it exists for x86-64 Linux only): nothing to compile for a TPU slice with",
)


@lru_cache
def slice_devices(topology: str) -> list[jax.Device]:
    """The devices of a slice, e.g. "v5p:2x2x2". Mark tests that call it with `needs_libtpu`."""
    for name, value in _NOT_ON_A_TPU.items():
        os.environ.setdefault(name, value)
    return list(topologies.get_topology_desc(topology, "tpu").devices)


@contextmanager
def uncached() -> Iterator[None]:
    """What is compiled for a slice that is not there cannot be read back from the compilation cache: it is not
    written either. (Whether there is a cache at all is decided once a process, at its first compilation.) And it is compiled
    with all passes, for its schedule and its memory are what the tests look at."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update(name, before)
    jax.config.update("jax_disable_most_optimizations", True)  # as conftest.py has it


@contextmanager
def kernels_for(device_kind: str) -> Iterator[None]:
    """Pallas asks the default device what it is, and here that is a CPU. Under a mesh of real or
    topology devices (in shard_map) nothing of the kind is needed."""
    chip = AbstractDevice(device_kind=device_kind, num_cores=1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((1,), ("chip",), axis_types=(AxisType.Auto,), abstract_device=chip)):
        yield


def compile_on_one_chip(function: Callable, *shapes: Any, generation: str) -> jax.stages.Compiled:
    """`function` compiled for one chip of a generation in `SLICES`; arguments as ShapeDtypeStructs."""
    chip = slice_devices(SLICES[generation])[0]
    on_chip = SingleDeviceSharding(chip)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_chip), shapes)
    with kernels_for(chip.device_kind), uncached():
        return jax.jit(function).lower(*placed).compile()
