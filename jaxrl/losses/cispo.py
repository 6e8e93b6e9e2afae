"""CISPO (MiniMax-M1, arXiv:2506.13585): the importance weight is clipped, not the update.

REINFORCE weighted by a detached ratio bounded from above: a token that PPO's clip would silence still
gives a gradient.
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.corrections import correction
from jaxrl.losses.old_policy import log_ratio
from jaxrl.losses.penalties import penalties
from jaxrl.losses.sums import LossSums, ratio_sums


def cispo(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """−Σ weight · w · sg(min(r, 1 + clip_high)) · A · π + penalties, with r = exp(π − old) and the
    detached correction w of old/μ. No lower bound, as in the paper's experiments. Returns (sum, metric sums)."""
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(a, config)))
    bounded = jnp.minimum(ratio, 1 + config.clip_high)
    loss = -jnp.sum(a.weight * correction(a, config) * bounded * a.advantage * a.logp) + penalties(a, config)
    return loss, ratio_sums(a, ratio > 1 + config.clip_high, config)
