"""GSPO (arXiv:2507.18071 [t]): one ratio per sequence, the geometric mean of its tokens' ratios.

A sequence is an episode: the product runs over every term of all its trajectories, in whatever rows they lie.
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.old_policy import log_ratio
from jaxrl.losses.steps import StepTerms
from jaxrl.losses.sums import LossSums
from jaxrl.losses.surrogate import surrogate

LOG_RATIO = "gspo/log_ratio"


def gspo(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """−Σ weight · w · min(s A, clip(s) A) + penalties, with s = (Π r)^(1/terms) and the token's own gradient, that of
    sg(s) · π / sg(π) (GSPO-token, eqs. 13 and 14). With `normaliser` = "sequences" it is the gradient of eq. 5. Returns
    (sum, metric sums)."""
    ratio = jnp.exp(a.coefficients[LOG_RATIO] + a.logp - jax.lax.stop_gradient(a.logp))
    return surrogate(a, ratio, 1 - config.clip_low, 1 + config.clip_high, config)


def gspo_coefficients(step: StepTerms, config: AlgorithmConfig) -> dict[str, jax.Array]:
    """log s of the term's episode."""
    total = step.episode_sum(log_ratio(step.terms, config))
    return {LOG_RATIO: total / jnp.maximum(step.episode_sum(jnp.ones_like(total)), 1)}
