"""The one place that launches Triton kernels from JAX, and the one that tests replace to interpret them."""

import jax
import jax_triton

__all__ = ["triton_call"]


def triton_call(*args, kernel, out_type, grid: int, num_warps: int, num_stages: int, **constants) -> tuple[jax.Array, ...]:
    """jax_triton.triton_call with a one-dimensional grid: arrays and scalars in the kernel's order, then its outputs."""
    return jax_triton.triton_call(
        *args, kernel=kernel, out_type=out_type, grid=(grid,), num_warps=num_warps, num_stages=num_stages, **constants
    )
