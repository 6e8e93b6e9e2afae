"""How many groups fill the rows of a step: recent groups, in other orders, through the packer of the run."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.data import TrainingTrajectory, Trajectory
from jaxrl.packing import RowLimits, plan
from jaxrl.pipeline.workload import DrawnGroup

PackRows = Callable[[Sequence[DrawnGroup]], int]


def pack_rows(groups: Sequence[DrawnGroup], limits: RowLimits) -> int:
    """Rows that the packer needs for groups of these sizes: one prompt per group, of the tokens that were not sampled, and one
    answer per episode."""
    trajectories = []
    for g, group in enumerate(groups):
        prompt = np.full(max(1, group.tokens - group.trained), g)
        for episode in np.flatnonzero(~group.failed).tolist():
            answer = np.full(int(group.lengths[episode].sum()), -1 - episode)
            ids = np.concatenate([prompt, answer])[: limits.row_length].astype(np.int32)
            trained = np.arange(len(ids)) >= len(prompt)
            zeros, whole = np.broadcast_to(np.float32(0), len(ids)), np.broadcast_to(np.int32(0), len(ids))
            tokens = Trajectory(ids, trained, zeros, zeros, whole, whole, whole)
            trajectories.append(TrainingTrajectory(tokens, zeros, zeros, len(trajectories), episode, g))
    return plan(trajectories, limits).stats.num_rows


def groups_that_fill(
    recent: Sequence[DrawnGroup], most_rows: int, rows_of: PackRows, most_tokens: float, num_samples: int, seed: int
) -> list[int]:
    """For each of `num_samples` draws from `recent` (with replacement): the largest number of groups whose rows are at most
    most_rows. most_tokens: what so many rows hold, for the first guess. Sorted."""
    rng = np.random.default_rng(seed)
    mean = np.mean([group.tokens for group in recent])
    found = []
    for _ in range(num_samples):
        order = [recent[k] for k in rng.integers(len(recent), size=2 * int(most_tokens / mean) + 4)]
        count = max(1, int(np.searchsorted(np.cumsum([group.tokens for group in order]), most_tokens)))
        fits = rows_of(order[:count]) <= most_rows
        step = 1 if fits else -1
        while 1 <= count + step <= len(order) and (rows_of(order[: count + step]) <= most_rows) == fits:
            count += step
        found.append(count if fits else max(1, count - 1))
    return sorted(found)
