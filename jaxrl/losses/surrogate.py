"""The clipped surrogate that GRPO and PPO share; they differ in where the advantage comes from."""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.data import LossTerms
from jaxrl.losses.aligned import LossSums, correction, entropy_bonus, ratio_sums, select


def clipped_surrogate(
    logp: jax.Array, entropy: jax.Array, terms: LossTerms, config: AlgorithmConfig
) -> tuple[jax.Array, LossSums]:
    """−Σ weight · w · min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) − entropy bonus, with
    r = exp(π − π₀) and the detached correction w = min(exp(π₀ − μ), cap).

    Arrays of one shape. PPO's surrogate (arXiv:1707.06347, eq. 7) with DAPO's two bounds
    (arXiv:2503.14476, eq. 10). Returns the sum and the metric sums.
    """
    a = select(logp, entropy, terms)
    ratio = jnp.exp(a.logp - a.policy_logp)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    surrogate = jnp.minimum(ratio * a.advantage, jnp.clip(ratio, low, high) * a.advantage)
    loss = -jnp.sum(a.weight * correction(a, config) * surrogate) - entropy_bonus(a, config)
    clipped = ((a.advantage > 0) & (ratio > high)) | ((a.advantage < 0) & (ratio < low))
    return loss, ratio_sums(a, clipped, config)
