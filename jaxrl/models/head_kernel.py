"""The head over reads by the platform's own kernel, on any mesh that keeps the vocabulary whole.

What was chosen is logged once. Where the kernel cannot be used, `jaxrl.models.head` does the same in plain JAX, and a
warning names the reason.
"""

import importlib
import logging
from functools import lru_cache
from typing import Protocol

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxrl.attention import device_of
from jaxrl.mesh import ROW_AXES
from jaxrl.models.head import check_split

log = logging.getLogger(__name__)

# By platform: name, module, and the compute capability of the only GPUs it is for.
_KERNELS = {
    "gpu": ("Hopper", "pallas_kernels.head_hopper", "9.0"),
    "tpu": ("Pallas", "pallas_kernels.head_tpu", None),
}


class HeadKernel(Protocol):
    def __call__(
        self, states: jax.Array, head: jax.Array, target: jax.Array, temperature: jax.Array, *, vocab_major: bool
    ) -> tuple[jax.Array, jax.Array]:
        """As `jaxrl.models.head.read_logprobs` of reads [N], for a head [E, V], or [V, E] if vocab_major."""


def choose_head(impl: str, mesh: Mesh, dtype: str) -> HeadKernel | None:
    """The kernel for reads of this dtype on `mesh`; None: plain JAX. impl: attention.impl, which "reference" keeps plain."""
    return _choose(impl, *device_of(mesh), dtype, mesh.shape["tensor"])


@lru_cache
def _choose(impl: str, platform: str, capability: str | None, dtype: str, tensor: int) -> HeadKernel | None:
    name, module, only = _KERNELS.get(platform, (None, None, None))
    if impl == "auto" and module is not None:
        kernel = importlib.import_module(module)
        if only not in (None, capability):
            problem = f"the {name} head needs compute capability {only}, not {capability}"
        elif tensor > 1:
            problem = f"mesh.tensor = {tensor} splits the vocabulary"
        else:
            problem = kernel.refusal(dtype)
        if problem is None:
            log.info("head over reads: the %s kernel in %s", name, dtype)
            return kernel.read_logprobs
        log.warning("head over reads: plain JAX, which is slower on a %s, because %s", platform.upper(), problem)
    return None


def kernel_logprobs(
    kernel: HeadKernel,
    states: jax.Array,  # [R, U, E]
    head: jax.Array,  # [E, V], or [V, E] if vocab_major
    target: jax.Array,  # [R, U] int32 token ids; -1: ignored
    temperature: jax.Array,  # [R, U]
    *,
    vocab_major: bool,
    mesh: Mesh,
) -> tuple[jax.Array, jax.Array]:
    """(log-prob of the target, entropy), both [R, U], each device with its own reads and the whole head, whose gradient is
    added up over devices once. Raises ConfigError if the reads cannot be split evenly."""
    check_split(target.shape[1], mesh)

    def own(states, head, target, temperature):
        flat = (states.reshape(-1, states.shape[-1]), head, target.reshape(-1), temperature.reshape(-1))
        logp, entropy = kernel(*flat, vocab_major=vocab_major)
        return logp.reshape(target.shape), entropy.reshape(target.shape)

    if mesh.size == 1:
        return own(states, head, target, temperature)
    reads = PartitionSpec(ROW_AXES, "context")
    return jax.shard_map(own, mesh=mesh, in_specs=(reads, PartitionSpec(), reads, reads), out_specs=reads, check_vma=False)(
        states, head, target, temperature
    )
