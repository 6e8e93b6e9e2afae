"""Supervised fine-tuning: the weighted negative log-likelihood of given tokens."""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.sums import LossSums


def sft(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """−Σ weight · π. Advantages, ratios and penalties play no part: nothing was sampled. Returns (sum, metric sums)."""
    entropy = jax.lax.stop_gradient(a.entropy)
    return -jnp.sum(a.weight * a.logp), {"terms": jnp.sum(a.used), "entropy": jnp.sum(entropy), "lag": jnp.sum(a.lag)}
