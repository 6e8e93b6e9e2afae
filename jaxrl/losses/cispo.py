"""CISPO (MiniMax-M1, arXiv:2506.13585): the importance weight is clipped, not the update.

REINFORCE weighted by a detached ratio bounded from above: a token that PPO's clip would silence still
gives a gradient.
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.data import LossTerms
from jaxrl.losses.aligned import LossSums, correction, entropy_bonus, ratio_sums, select


def cispo(logp: jax.Array, entropy: jax.Array, terms: LossTerms, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """−Σ weight · w · sg(min(r, 1 + clip_high)) · A · π − entropy bonus, with r = exp(π − π₀) and the
    detached correction w = min(exp(π₀ − μ), cap). No lower bound, as in the paper's experiments.
    Arrays of one shape; returns (sum, metric sums)."""
    a = select(logp, entropy, terms)
    ratio = jax.lax.stop_gradient(jnp.exp(a.logp - a.policy_logp))
    bounded = jnp.minimum(ratio, 1 + config.clip_high)
    loss = -jnp.sum(a.weight * correction(a, config) * bounded * a.advantage * a.logp) - entropy_bonus(a, config)
    return loss, ratio_sums(a, ratio > 1 + config.clip_high, config)
