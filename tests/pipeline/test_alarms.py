"""Alarms fire where they should, once, and the reachable mass is what truncation leaves."""

import numpy as np
import pytest

from jaxrl.config import SamplingConfig
from jaxrl.data import TrainingTrajectory, Trajectory
from jaxrl.metrics import names
from jaxrl.pipeline.alarms import Alarms, reachable_mass


def sampled(policy, behaviour):
    n = len(policy)
    column = np.zeros(n, np.int32)
    t = Trajectory(column, np.ones(n, bool), np.log(policy), np.log(behaviour), column, column.astype(np.uint8), column)
    return TrainingTrajectory(t, np.zeros(n), np.zeros(n))


def test_the_reachable_mass_of_top_k_is_the_probability_of_its_sequences():
    """Three tokens, two kept, answers of 2 and of 10 tokens: only the first 8 count."""
    p, rng = np.array([0.7, 0.25, 0.05]), np.random.default_rng(0)
    kept = p[:2].sum()
    for length in (2, 10):
        tokens = rng.choice(2, size=(50, length), p=p[:2] / kept)
        mass = reachable_mass([sampled(p[row], p[row] / kept) for row in tokens])
        assert mass == pytest.approx(kept ** min(length, 8))
    assert reachable_mass([sampled(p, p)]) == 1.0 and reachable_mass([]) == 1.0


def test_an_alarm_is_given_once_until_its_value_has_recovered():
    alarms = Alarms(SamplingConfig())
    values = (0.9, 0.49, 0.3, 0.52, 0.45, 0.6, 0.4)
    said = [alarms.check(step, {names.SAMPLE_SIZE: value, names.REACHABLE: 0.5}) for step, value in enumerate(values)]
    assert [len(s) for s in said] == [0, 1, 0, 0, 0, 0, 1]
    assert "step 1: policy/effective_sample_size is 0.490, below 0.5" in said[1][0]


def test_the_reachable_mass_warns_where_sampling_truncates():
    alarms = Alarms(SamplingConfig(top_p=0.9))
    assert alarms.check(1, {names.REACHABLE: 0.99}) == []
    (text,) = alarms.check(2, {names.REACHABLE: 0.97})
    assert "policy/reachable_mass is 0.970, below 0.98" in text and "sampling.top_p" in text
