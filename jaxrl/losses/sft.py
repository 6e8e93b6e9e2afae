"""Supervised fine-tuning: the weighted negative log-likelihood of given tokens."""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.data import LossTerms
from jaxrl.losses.aligned import LossSums, select


def sft(logp: jax.Array, entropy: jax.Array, terms: LossTerms, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """−Σ weight · π. Advantages, ratios and the entropy bonus play no part: nothing was sampled.
    Arrays of one shape; returns (sum, metric sums)."""
    a = select(logp, entropy, terms)
    stopped = jax.tree.map(jax.lax.stop_gradient, a)
    return -jnp.sum(a.weight * a.logp), {"terms": jnp.sum(a.used), "entropy": jnp.sum(stopped.entropy)}
