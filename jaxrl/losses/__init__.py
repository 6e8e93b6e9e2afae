"""Losses: one rule per file, each a pure function of aligned arrays that returns sums.

    value(a: Aligned, config) -> (sum, metric sums)

The trainer does not know which loss runs: it looks the name up in LOSSES. What a rule is made of is data, so that it
combines: advantages (`advantages`), the old policy of its ratios (`old_policy`), the correction of what
sampling made different (`corrections`), denominators (`packing.weights`), penalties (`penalties`). `recipes` has the names that
papers gave to combinations.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.cispo import cispo
from jaxrl.losses.corrections import correction_coefficients, needs_coefficients
from jaxrl.losses.distillation import distill_forward, distill_reverse
from jaxrl.losses.dpo import dpo, dpo_coefficients
from jaxrl.losses.grpo import grpo
from jaxrl.losses.gspo import gspo, gspo_coefficients
from jaxrl.losses.m2po import m2po, m2po_coefficients
from jaxrl.losses.ppo_clip import ppo_clip
from jaxrl.losses.reinforce import reinforce
from jaxrl.losses.sao import sao
from jaxrl.losses.sat import sat, sat_coefficients
from jaxrl.losses.sft import sft
from jaxrl.losses.steps import StepTerms
from jaxrl.losses.sums import LossSums
from jaxrl.losses.tba import tba, tba_coefficients


class Loss(NamedTuple):
    value: Callable[[Aligned, AlgorithmConfig], tuple[jax.Array, LossSums]]
    coefficients: Callable[[StepTerms, AlgorithmConfig], dict[str, jax.Array]] | None = None  # None: it crosses no rows
    is_sampled: bool = True  # False: no correction applies
    needs_reference: bool = False
    needs_candidates: bool = False


LOSSES = {
    "grpo": Loss(grpo),
    "ppo_clip": Loss(ppo_clip),
    "cispo": Loss(cispo),
    "reinforce": Loss(reinforce),
    "gspo": Loss(gspo, gspo_coefficients),
    "m2po": Loss(m2po, m2po_coefficients),
    "sao": Loss(sao),
    "sat": Loss(sat, sat_coefficients),
    "tba": Loss(tba, tba_coefficients, needs_reference=True),
    "dpo": Loss(dpo, dpo_coefficients, needs_reference=True),
    "distill_forward": Loss(distill_forward, needs_candidates=True),
    "distill_reverse": Loss(distill_reverse, needs_candidates=True),
    "sft": Loss(sft, is_sampled=False),
}


def needs_reference(loss: Loss, config: AlgorithmConfig) -> bool:
    """Whether the loss reads log-probs of a reference policy."""
    return loss.needs_reference or (loss.is_sampled and config.kl_weight > 0)


def step_coefficients(loss: Loss, config: AlgorithmConfig) -> Callable[[StepTerms], dict[str, jax.Array]] | None:
    """What makes the coefficients of a step's terms, arrays [N]; None if the loss needs none, and so no pass without gradient."""
    parts = [loss.coefficients] if loss.coefficients else []
    if loss.is_sampled and needs_coefficients(config):
        parts.append(correction_coefficients)
    if not parts:
        return None
    return lambda step: {name: x for part in parts for name, x in part(step, config).items()}
