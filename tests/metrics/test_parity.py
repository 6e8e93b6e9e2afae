"""The figures of parity, and the cause that is named when it was really induced."""

import numpy as np
import pytest

from jaxrl.metrics.parity import compare, likely_cause


def sampled(temperature: float, rng: np.random.Generator, noise: float = 0.0):
    """(log-probs at `temperature`, the same at 1, trajectory) of 400 tokens of 20 trajectories drawn at 1."""
    logits = rng.normal(0, 2, (400, 50)) + rng.normal(0, noise, (400, 50))

    def logprobs(t):
        scaled = logits / t
        return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))

    drawn = np.array([rng.choice(50, p=np.exp(row)) for row in logprobs(1.0)])
    pick = np.arange(400), drawn
    return logprobs(temperature)[pick], logprobs(1.0)[pick], np.repeat(np.arange(20), 20)


def test_figures_are_their_equations():
    sampler, trainer = np.array([-1.0, -2.0, -3.0, -0.5]), np.array([-1.0, -2.1, -2.0, -0.5])
    figures = compare(sampler, trainer)
    d = sampler - trainer
    assert figures.tokens == 4 and figures.max == pytest.approx(1.0) and figures.mean == pytest.approx(1.1 / 4)
    assert figures.kl_k1 == pytest.approx(d.mean()) and figures.kl_k3 == pytest.approx(np.mean(np.exp(-d) - 1 + d))
    assert figures.beyond_05 == 0.25 and figures.beyond_005 == 0.5


@pytest.mark.parametrize("seed", range(5))
def test_the_cause_is_named(seed):
    rng = np.random.default_rng(seed)
    other, right, trajectory = sampled(1.3, rng)
    assert likely_cause(other, right, trajectory).startswith("temperature")
    rounding = right + rng.normal(0, 0.01, 400)
    assert likely_cause(rounding, right, trajectory).startswith("precision")
    stale = rounding.copy()
    stale[trajectory < 3] += rng.normal(0, 1.0, 60)
    assert likely_cause(stale, right, trajectory).startswith("wrong version or stale prefix")
    assert likely_cause(right - 0.3 + rng.normal(0, 0.01, 400), right, trajectory).startswith("other weights")
