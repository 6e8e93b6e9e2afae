"""Which implementation of tree attention runs, and how keys travel: by config, platform and shape.

What was chosen is logged once. Where the platform's own kernel cannot be used, the reference runs
instead, and a warning names the reason.
"""

import importlib
import importlib.util
import logging
from functools import lru_cache
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh

from jaxrl.attention.blockwise import blockwise
from jaxrl.attention.kernel import Kernel
from jaxrl.config import AttentionConfig

log = logging.getLogger(__name__)

# Of the plain JAX implementation. A CPU gains from skipping finely, down to where the loop itself costs; an
# accelerator runs the blocks one after another, so one block must fill it.
_CPU_BLOCK, _ACCELERATOR_BLOCK = 128, 512


class _Candidate(NamedTuple):
    name: str
    module: str
    needs: str  # the package its kernels are written with
    extra: str  # what installs that
    has_window: bool = True
    capability: str | None = None  # of the only GPUs it is for
    compiler_options: tuple[tuple[str, str], ...] = ()


# By platform, the fastest first.
_CANDIDATES = {
    "gpu": (
        _Candidate("Hopper", "pallas_kernels.tree_attention_hopper", "jax", "gpu", has_window=False, capability="9.0"),
        # XLA records calls into CUDA graphs, and a launch through jax-triton within one is an error of the driver.
        _Candidate(
            "Triton",
            "triton_kernels.tree_attention",
            "jax_triton",
            "gpu",
            compiler_options=(("xla_gpu_enable_command_buffer", ""),),
        ),
    ),
    "tpu": (_Candidate("Pallas", "pallas_kernels.tree_attention_tpu", "jax", "tpu"),),
}


@lru_cache
def choose_kernel(
    config: AttentionConfig, platform: str, capability: str | None, head_dim: int, dtype: str, has_window: bool
) -> Kernel:
    """The implementation for arrays of this head size and dtype on a platform, as jax names it; capability is a GPU's
    compute capability."""
    refusals = []
    for candidate in _CANDIDATES.get(platform, ()) if config.impl == "auto" else ():
        if candidate.capability not in (None, capability) or (has_window and not candidate.has_window):
            continue
        if importlib.util.find_spec(candidate.needs) is None:
            refusals.append(f"{candidate.needs} is not installed: make install EXTRAS=dev,{candidate.extra}")
            continue
        kernels = importlib.import_module(candidate.module)
        if (refusal := kernels.refusal(head_dim, dtype)) is None:
            log.info("tree attention: the %s kernel, head size %d in %s", candidate.name, head_dim, dtype)
            return Kernel(kernels.forward, kernels.backward, candidate.compiler_options)
        refusals.append(refusal)
    cpu = platform == "cpu"
    default = _CPU_BLOCK if cpu else _ACCELERATOR_BLOCK
    block_q, block_k = config.block_q or default, config.block_k or default
    if refusals:
        log.warning("tree attention: plain JAX, which is slow on a %s, because %s", platform.upper(), "; ".join(refusals))
    log.info("tree attention: plain JAX, blocks of %d queries × %d keys, on %s", block_q, block_k, platform)
    kernel = blockwise(block_q, block_k)
    return _row_by_row(kernel) if cpu else kernel


def compiler_options(config: AttentionConfig, mesh: Mesh, head_dim: int, dtype: str) -> dict[str, str] | None:
    """`compiler_options` for `jax.jit` of whatever contains attention over `mesh`."""
    platform, capability = device_of(mesh)
    return dict(choose_kernel(config, platform, capability, head_dim, dtype, False).compiler_options) or None


def device_of(mesh: Mesh | None) -> tuple[str, str | None]:
    """(platform, compute capability of a GPU) that arrays over `mesh`, or on the default device, are on."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return device.platform, device.compute_capability if device.platform == "gpu" else None


@lru_cache
def choose_transport(config: AttentionConfig, platform: str) -> str:
    """By which transport: a TPU's links are slow beside NVLink, and a ring hides them behind the kernel."""
    transport = config.transport
    if transport == "auto":
        transport = "ring" if platform == "tpu" else "gather"
    log.info("tree attention: keys travel over mesh.context by %s", transport)
    return transport


def _row_by_row(kernel: Kernel) -> Kernel:
    """The kernel on one row after another. Rows taken together skip only the blocks that are empty in
    all of them, which costs a CPU more than the batching gains."""

    def each_row(function):
        def run(*arrays, **settings):
            def one_row(row):
                return function(*jax.tree.map(lambda x: x[None], row), **settings)

            return jax.tree.map(lambda x: x[:, 0], lax.map(one_row, arrays))

        return run

    return Kernel(each_row(kernel.forward), each_row(kernel.backward))
