"""Trajectory balance (TBA, arXiv:2503.18929 [c]): the square of what each episode lacks of the balanced flow.

Per prompt with K episodes j, log π summed over the response: logZ = sg(mean_j(log π_ref − log π + R_j/β)), and
the loss is the mean over episodes of (logZ + log π − log π_ref − R_j/β)². No importance weight: it is
off-policy by construction. R is the advantage, with `baseline` = "none".
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.steps import StepTerms
from jaxrl.losses.sums import LossSums, ratio_sums

LACK, TERMS = "tba/lack", "tba/terms"


def tba(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """Σ over terms of weight · (δ²/terms + 2 δ (π − sg(π))), which is Σ over episodes of weight · δ² with its gradient; the
    weight is 1 / number of episodes by `normaliser` = "constant", `normaliser_constant` = 1. Returns (sum, metric sums)."""
    lack, terms = a.coefficients[LACK], jnp.maximum(a.coefficients[TERMS], 1)
    moved = a.logp - jax.lax.stop_gradient(a.logp)
    loss = jnp.sum(a.weight * (lack**2 / terms + 2 * lack * moved))
    return loss, ratio_sums(a, jnp.zeros_like(a.used), config)


def tba_coefficients(step: StepTerms, config: AlgorithmConfig) -> dict[str, jax.Array]:
    """δ = logZ + log π − log π_ref − R/β of the term's episode, and how many terms that has."""
    a = step.terms
    terms = jnp.maximum(step.episode_sum(jnp.ones_like(a.logp)), 1)
    reward = step.episode_sum(a.advantage) / terms
    flow = step.episode_sum(a.logp - a.reference_logp) - reward / config.beta
    log_z = -step.group_sum(flow / terms) / jnp.maximum(step.group_sum(1 / terms), 0.5)  # a mean over episodes
    return {LACK: log_z + flow, TERMS: terms}
