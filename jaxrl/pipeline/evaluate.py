"""Held-out evaluation under one exact policy version."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.config import Config
from jaxrl.metrics import names
from jaxrl.pipeline.rollouts import num_sampled
from jaxrl.rollout.episodes import EpisodeRunner, sampling_params
from jaxrl.rollout.protocol import SamplerError

NORMAL_95 = 1.96  # standard errors to either side of a mean that hold 95% of a normal distribution


async def evaluate(
    config: Config, tasks: Sequence[Mapping[str, Any]], runner: EpisodeRunner, version: int, priority: int = 0
) -> dict[str, float]:
    """Metrics of `eval.samples` episodes on each of the first `eval.num_tasks` held-out tasks; `priority` as of
    Sampler.generate. A failed episode earned
    nothing; how many failed is a metric of its own. Raises SamplerError if a token is of another version."""
    params = sampling_params(config, evaluation=True)
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        runs = [
            group.create_task(runner.run(task, params, task_index=i, group=i, index=k, stream="eval", priority=priority))
            for i, task in enumerate(tasks[: config.eval.num_tasks])
            for k in range(config.eval.samples)
        ]
    episodes = [run.result() for run in runs]
    versions = {int(v) for e in episodes for t in e.trajectories for v in np.unique(t.version[t.trainable])}
    if versions - {version}:
        raise SamplerError(f"the evaluation of policy version {version} got tokens of versions {sorted(versions)}")
    rewards = np.array([0.0 if e.error else e.reward for e in episodes])
    by_task = rewards.reshape(-1, config.eval.samples).mean(axis=1)
    # Tasks are what was drawn: episodes of one task are no independent samples.
    standard_error = float(by_task.std(ddof=1) / np.sqrt(len(by_task))) if len(by_task) > 1 else 0.0
    sampled = [num_sampled(e) for e in episodes]
    return {
        names.HELDOUT: float(rewards.mean()),
        "heldout/std": float(rewards.std()),
        "heldout/standard_error": standard_error,
        "heldout/confidence_95": NORMAL_95 * standard_error,
        "heldout/failed": float(sum(e.error is not None for e in episodes)),
        "heldout/tokens": float(sum(sampled)),
        "heldout/tokens_mean": float(np.mean(sampled)),
        "time/heldout": time.monotonic() - began,
    }
