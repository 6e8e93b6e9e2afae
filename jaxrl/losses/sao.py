"""SAO, single-rollout asynchronous optimisation [t]: a detached ratio, zeroed outside its bounds, in front of REINFORCE.

The paper's ratio is π/μ with lossless sampling, where μ is π₀; here the bounds act on π/π₀, and the correction π₀/μ stays
a factor of its own. One rollout per prompt: `baseline` = "none". Left out: the critic, whose advantages the paper uses.
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.corrections import correction
from jaxrl.losses.old_policy import log_ratio
from jaxrl.losses.penalties import penalties
from jaxrl.losses.sums import LossSums, ratio_sums


def sao(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """−Σ weight · w · sg(f(r)) · A · π + penalties, f(r) = r if 1 − clip_low < r < 1 + clip_high, else 0; the paper's bounds
    are (0.3, 5) for mathematics and (0.8, 3) for code. Returns (sum, metric sums)."""
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(a, config)))
    inside = (ratio > 1 - config.clip_low) & (ratio < 1 + config.clip_high)
    factor = correction(a, config) * jnp.where(inside, ratio, 0)
    return -jnp.sum(a.weight * factor * a.advantage * a.logp) + penalties(a, config), ratio_sums(a, ~inside, config)
