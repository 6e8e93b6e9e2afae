"""Online DPO (arXiv:2402.04792; the loss of arXiv:2305.18290, eq. 7 [t]): the best of a group against its worst.

Per group, log-probs summed over the response: −log σ(β[(log π − log π_ref) of the best − the same of the worst]).
`baseline` = "best_worst" leaves those two of a group and makes A = 1 and −1.
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.steps import StepTerms
from jaxrl.losses.sums import LossSums, ratio_sums

MARGIN, TERMS = "dpo/margin", "dpo/terms"


def dpo(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """Σ over terms of 2 weight · (−log σ(βh)/terms − β σ(−βh) A (π − sg(π))), h the margin of the group: Σ over groups of
    2 weight · −log σ(βh) with its gradient. A group is two episodes, so the weight is half of 1 / number of groups by
    `normaliser` = "constant", `normaliser_constant` = 1. Returns (sum, metric sums)."""
    margin = config.beta * a.coefficients[MARGIN]
    moved = a.logp - jax.lax.stop_gradient(a.logp)
    spread = -jax.nn.log_sigmoid(margin) / jnp.maximum(a.coefficients[TERMS], 1)
    loss = jnp.sum(2 * a.weight * (spread - config.beta * jax.nn.sigmoid(-margin) * a.advantage * moved))
    return loss, ratio_sums(a, jnp.zeros_like(a.used), config)


def dpo_coefficients(step: StepTerms, config: AlgorithmConfig) -> dict[str, jax.Array]:
    """h = Σ A (log π − log π_ref) over the term's group, and how many terms that has."""
    a = step.terms
    margin = step.group_sum(a.advantage * (a.logp - a.reference_logp))
    return {MARGIN: margin, TERMS: step.group_sum(jnp.ones_like(a.logp))}
