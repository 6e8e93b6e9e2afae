"""REINFORCE (Williams, 1992) under a detached importance weight, without a clip.

With `old_policy` = "proximal" the weight is π/μ, and its truncation is what TRL and verl call TIS.
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.corrections import correction
from jaxrl.losses.penalties import penalties
from jaxrl.losses.sums import LossSums, ratio_sums


def reinforce(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """−Σ weight · w · A · π + penalties, with the detached correction w of old/μ. Returns (sum, metric sums)."""
    loss = -jnp.sum(a.weight * correction(a, config) * a.advantage * a.logp) + penalties(a, config)
    return loss, ratio_sums(a, jnp.zeros_like(a.used), config)
