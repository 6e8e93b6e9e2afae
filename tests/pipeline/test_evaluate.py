"""What an evaluation reports, from episodes of known reward."""

import asyncio

import numpy as np
import pytest

from jaxrl.config import parse
from jaxrl.data import Episode, Trajectory
from jaxrl.pipeline.evaluate import evaluate
from jaxrl.rollout.protocol import SamplerError

REWARDS = [[1.0, 0.0], [0.5, 0.5], [0.25, None]]  # of three tasks; the last episode failed


class KnownRunner:
    """Episode k of task i is worth REWARDS[i][k] and sampled i + k + 1 tokens."""

    def __init__(self, version):
        self.version = version

    async def run(self, task, params, *, task_index, group, index, stream, priority):
        n = task_index + index + 1
        zeros = np.zeros(n, np.float32)
        t = Trajectory(
            ids=np.zeros(n, np.int32),
            trainable=np.ones(n, bool),
            policy_logp=zeros,
            behaviour_logp=zeros,
            version=np.full(n, self.version, np.int32),
            source=np.ones(n, np.uint8),
            turn=np.zeros(n, np.int32),
        )
        reward = REWARDS[task_index][index]
        return Episode(task_index, index, (t,), reward or 0.0, error=None if reward is not None else "raised: no")


def test_spread_tokens_and_seconds():
    config = parse({"model": {"checkpoint": "m"}, "env": "sums", "eval": {"num_tasks": 3, "samples": 2}})
    metrics = asyncio.run(evaluate(config, [{}] * 5, KnownRunner(4), 4))
    rewards = np.array([[1, 0], [0.5, 0.5], [0.25, 0]])
    error = np.std([0.5, 0.5, 0.125], ddof=1) / np.sqrt(3)
    assert metrics.pop("time/heldout") > 0
    assert metrics == pytest.approx(
        {
            "heldout/reward": rewards.mean(),
            "heldout/std": rewards.std(),
            "heldout/standard_error": error,
            "heldout/confidence_95": 1.96 * error,
            "heldout/failed": 1,
            "heldout/tokens": 1 + 2 + 2 + 3 + 3 + 4,
            "heldout/tokens_mean": 15 / 6,
        }
    )
    with pytest.raises(SamplerError, match="policy version 5 got tokens of versions \\[4\\]"):
        asyncio.run(evaluate(config, [{}] * 5, KnownRunner(4), 5))
