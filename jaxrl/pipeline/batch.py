"""From the groups of an optimizer step to rows: advantages, weights, packing. Runs off the asyncio thread."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl.config import Config
from jaxrl.data import Episode, Group, PackedRows, Source, TrainingTrajectory, Trajectory
from jaxrl.losses.advantages import group_advantages
from jaxrl.metrics import names
from jaxrl.packing import RowLimits, misfit, pack
from jaxrl.packing.rows import empty_batch
from jaxrl.pipeline.alarms import reachable_mass


@dataclass(frozen=True)
class Batch:
    """What one optimizer step trains on, and its metrics."""

    rows: list[PackedRows]  # never empty: a step without anything to learn from has a batch of empty rows
    metrics: dict[str, float]
    num_tokens: int  # placed in rows


def make_batch(groups: Sequence[Group], config: Config, limits: RowLimits, step: int) -> Batch:
    """The rows of optimizer step `step`, counted from 0, with packing and lag metrics."""
    training, tokens_left_out = group_advantages(groups, config)
    rows, packing = pack(training, limits, config.packing.rows)
    lags = [step - _versions(t.trajectory) for t in training]
    # Versions of a lost lineage, replayed after a resume, can be ahead of the step.
    lags = np.maximum(np.concatenate(lags), 0) if lags else np.zeros(1)
    metrics = {
        "groups/trained": len({t.group_index for t in training}),
        "tokens/trained": sum(int(t.trajectory.trainable.sum()) for t in training),
        "tokens/left_out": tokens_left_out,
        "tokens/logical": packing.logical_tokens,
        "tokens/unique": packing.unique_tokens,
        "tokens/placed": packing.placed_tokens,
        "packing/rows": packing.num_rows,
        "packing/fill": packing.fill,
        "packing/overhead": packing.overhead,
        "packing/sharing": packing.sharing,
        "lag/mean": float(lags.mean()),
        "lag/max": float(lags.max()),
        names.REACHABLE: reachable_mass(training),
    }
    return Batch(rows or [empty_batch(limits, config.packing.rows)], metrics, packing.placed_tokens)


def refused_batch(limits: RowLimits, rows: int) -> PackedRows:
    """A batch of the run's one shape whose update the trainer refuses, because its loss is not a number:
    everything compiles and runs at full size, and the state stays what it is."""
    ids = np.zeros(2, np.int32)
    sampled = np.array([False, True])
    trajectory = Trajectory(
        ids=ids,
        trainable=sampled,
        policy_logp=np.zeros(2, np.float32),
        behaviour_logp=np.zeros(2, np.float32),
        version=np.array([-1, 0], np.int32),
        source=np.array([Source.CONTEXT, Source.PLAIN], np.uint8),
        turn=np.array([-1, 0], np.int32),
    )
    poison = TrainingTrajectory(trajectory, advantage=np.full(2, np.nan, np.float32), weight=np.full(2, np.nan, np.float32))
    return pack([poison], limits, rows)[0][0]


def is_informative(group: Group, config: Config) -> bool:
    """Whether anything of the group would be trained on: False if no episode succeeded or no reward differs from the baseline."""
    return bool(group_advantages([group], config)[0])


def oldest_version(group: Group) -> int:
    """The policy version of the group's oldest trainable token."""
    versions = [_versions(t).min() for e in group.episodes if e.error is None for t in e.trajectories if t.trainable.any()]
    return int(min(versions))


def _versions(trajectory: Trajectory) -> np.ndarray:
    return trajectory.version[trajectory.trainable]


def refuse_too_long(episode: Episode, limits: RowLimits) -> Episode:
    """The episode, failed if one of its trajectories cannot fit into a row."""
    for trajectory in episode.trajectories:
        if problem := misfit(len(trajectory.ids), int(trajectory.trainable.sum()), limits):
            return replace(episode, error=f"too_long: one of its trajectories fits no row: {problem}", reward=0.0)
    return episode
