"""The clipped surrogate that several losses share; they differ in where advantages, bounds and ratios come from."""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.corrections import correction
from jaxrl.losses.old_policy import log_ratio
from jaxrl.losses.penalties import penalties
from jaxrl.losses.sums import LossSums, ratio_sums


def clipped_surrogate(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """−Σ weight · w · min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) + penalties, with r = exp(π − old) and the
    detached correction w of old/μ.

    PPO's surrogate (arXiv:1707.06347, eq. 7) with DAPO's two bounds (arXiv:2503.14476, eq. 10). Arrays of one shape;
    returns the sum and the metric sums.
    """
    return surrogate(a, jnp.exp(log_ratio(a, config)), 1 - config.clip_low, 1 + config.clip_high, config)


def surrogate(a: Aligned, ratio, low, high, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """The same with a ratio and bounds of one's own, per term or one for all."""
    objective = jnp.minimum(ratio * a.advantage, jnp.clip(ratio, low, high) * a.advantage)
    loss = -jnp.sum(a.weight * correction(a, config) * objective) + penalties(a, config)
    clipped = ((a.advantage > 0) & (ratio > high)) | ((a.advantage < 0) & (ratio < low))
    return loss, ratio_sums(a, clipped, config)
