"""Which implementation of tree attention runs, and how keys travel: by config, platform and shape.

What was chosen is logged once. Where the platform's own kernel cannot be used, the reference runs
instead, and a warning names the reason.
"""

import importlib
import importlib.util
import logging
from functools import lru_cache

import jax
from jax import lax

from jaxrl.attention.blockwise import blockwise
from jaxrl.attention.kernel import Kernel
from jaxrl.config import AttentionConfig

log = logging.getLogger(__name__)

# Of the plain JAX implementation. A CPU gains from skipping finely, down to where the loop itself costs; an
# accelerator runs the blocks one after another, so one block must fill it.
_CPU_BLOCK, _ACCELERATOR_BLOCK = 128, 512

# By platform: the package the kernels are written with, what installs it, the module and what it is called.
_KERNELS = {
    "gpu": ("jax_triton", "gpu", "triton_kernels.tree_attention", "Triton"),
    "tpu": ("jax", "tpu", "pallas_kernels.tree_attention_tpu", "Pallas"),
}


@lru_cache
def choose_kernel(config: AttentionConfig, platform: str, head_dim: int, dtype: str) -> Kernel:
    """The implementation for arrays of this head size and dtype on a platform, as jax names it."""
    refusal = None
    if config.impl == "auto" and platform in _KERNELS:
        needs, extra, module, name = _KERNELS[platform]
        if importlib.util.find_spec(needs) is None:
            refusal = f"{needs} is not installed: make install EXTRAS=dev,{extra}"
        else:
            kernels = importlib.import_module(module)
            refusal = kernels.refusal(head_dim, dtype)
        if refusal is None:
            log.info("tree attention: the %s kernel, head size %d in %s", name, head_dim, dtype)
            return Kernel(kernels.forward, kernels.backward)
    cpu = platform == "cpu"
    default = _CPU_BLOCK if cpu else _ACCELERATOR_BLOCK
    block_q, block_k = config.block_q or default, config.block_k or default
    if refusal is not None:
        log.warning("tree attention: plain JAX, which is slow on a %s, because %s", platform.upper(), refusal)
    log.info("tree attention: plain JAX, blocks of %d queries × %d keys, on %s", block_q, block_k, platform)
    kernel = blockwise(block_q, block_k)
    return _row_by_row(kernel) if cpu else kernel


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
