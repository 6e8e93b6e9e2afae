"""Warnings about sampling that the loss can no longer correct for, once each time a run gets there.

The effective sample size says what share of the tokens still counts under w = exp(current - behaviour log-prob); it falls before
a run collapses (PipelineRL, arXiv:2509.19128). The reachable mass is the mean over sequences of the product of the first w, those of
the weights that sampled them: the probability of what truncated sampling can emit at all, 1 where it cuts nothing.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.config import SamplingConfig
from jaxrl.data import TrainingTrajectory
from jaxrl.metrics import names

log = logging.getLogger(__name__)

LEAST_REACHABLE = 0.98  # below it what is never sampled is more than noise
REACHABLE_TOKENS = 8  # first ones of a sequence: the product over a long one is 0 for any truncation
LEAST_SAMPLE_SIZE = 0.5  # of 1: half of the step's tokens count for nothing
OVER = 1.1  # a warning is given again after its value was that much above its bound


def reachable_mass(trajectories: Sequence[TrainingTrajectory]) -> float:
    """In (0, 1] for truncated sampling; an estimate of 1 where every token can be emitted. 1 without trajectories."""
    products = []
    for item in trajectories:
        t = item.trajectory
        log_w = (t.policy_logp - t.behaviour_logp)[t.trainable][:REACHABLE_TOKENS]
        products.append(np.exp(log_w.sum(dtype=np.float64)))
    return float(np.mean(products)) if products else 1.0


def truncates(sampling: SamplingConfig) -> bool:
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


class Alarms:
    """Of one run. Call `check` with every step's metrics."""

    def __init__(self, sampling: SamplingConfig):
        self._bounds = {names.SAMPLE_SIZE: (LEAST_SAMPLE_SIZE, _SAMPLE_SIZE)}
        if truncates(sampling):
            self._bounds[names.REACHABLE] = (LEAST_REACHABLE, _REACHABLE)
        self._given: set[str] = set()

    def check(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Logs, and returns, what is to be said of this step."""
        said = []
        for name, (bound, text) in self._bounds.items():
            value = metrics.get(name)
            if value is None:
                continue
            if value >= min(1.0, bound * OVER):
                self._given.discard(name)
            elif value < bound and name not in self._given:
                self._given.add(name)
                said.append(f"step {step}: {name} is {value:.3f}, below {bound:g}: {text}")
        for text in said:
            log.warning("%s", text)
        return said


_SAMPLE_SIZE = (
    "few tokens carry the whole update, and runs collapse after that. Lower pipeline.max_lag or optimizer.lr, or bound the "
    "weights with algorithm.correction_cap or algorithm.mask_level"
)
_REACHABLE = (
    "truncated sampling never emits so much of what the policy may say, which no weight corrects. Raise sampling.top_p or "
    "sampling.top_k, or lower sampling.min_p"
)
