"""From trajectories to a plan: validate, build the tree, assign rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.data import TrainingTrajectory
from jaxrl.packing.bins import RowPlan, assign_rows
from jaxrl.packing.demand import Demand, TrainedRuns, demand_of, trained_runs
from jaxrl.packing.limits import PackingError, RowLimits, misfit, name_of
from jaxrl.packing.optional import Widths, tree_keys, widths_of, wrong_length
from jaxrl.packing.tree import PrefixTree, build_tree

PER_TOKEN = ("trainable", "policy_logp", "behaviour_logp", "version", "source", "turn")


@dataclass(frozen=True)
class PackingStats:
    """Sums over a step."""

    num_rows: int  # rows with tokens
    row_length: int
    trajectories: int  # packed
    untrained: int  # left out: no trainable token, so no row needs them
    logical_tokens: int  # of the packed trajectories, one by one
    unique_tokens: int  # every common prefix once
    placed_tokens: int  # in rows, copies of prefixes included
    reads: int
    terms: int
    segments: int

    @property
    def fill(self) -> float:
        """Share of the rows' capacity that holds tokens."""
        return self.placed_tokens / max(self.num_rows * self.row_length, 1)

    @property
    def overhead(self) -> float:
        """Placed over unique tokens: what copying prefixes cost."""
        return self.placed_tokens / max(self.unique_tokens, 1)

    @property
    def sharing(self) -> float:
        """Logical over placed tokens: what sharing prefixes saved."""
        return self.logical_tokens / max(self.placed_tokens, 1)


@dataclass(frozen=True)
class Plan:
    """Which trajectory goes into which row. Members of rows and of the tree are indices into
    `trajectories`."""

    trajectories: tuple[TrainingTrajectory, ...]  # those with a trainable token
    tree: PrefixTree | None  # None when there are none
    rows: tuple[RowPlan, ...]
    limits: RowLimits
    stats: PackingStats
    widths: Widths  # of the optional fields that are given


def _check_shapes(trajectories: Sequence[TrainingTrajectory]) -> None:
    seen = set()
    for training in trajectories:
        trajectory = training.trajectory
        length = len(trajectory.ids)
        if length == 0:
            raise PackingError(f"{name_of(training)} has no tokens: leave it out")
        if training.trajectory_index in seen:
            raise PackingError(
                f"{name_of(training)}: trajectory_index is not unique within the step, number trajectories 0, 1, …"
            )
        seen.add(training.trajectory_index)
        if trajectory.trainable.dtype != np.bool_:
            raise PackingError(f"{name_of(training)}: `trainable` has dtype {trajectory.trainable.dtype}, it must be bool")
        if not trajectory.temperature > 0:
            raise PackingError(
                f"{name_of(training)}: temperature {trajectory.temperature}; logits are divided by it, so it must be positive"
            )
        for name in PER_TOKEN:
            if len(getattr(trajectory, name)) != length:
                raise wrong_length(training, name, getattr(trajectory, name))
        if len(training.advantage) != length:
            raise wrong_length(training, "advantage", training.advantage)
        if len(training.weight) != length:
            raise wrong_length(training, "weight", training.weight)
        if training.content_key is not None and len(training.content_key) != length:
            raise wrong_length(training, "content_key", training.content_key)
        if trajectory.trainable[0]:
            raise PackingError(
                f"{name_of(training)}: position 0 is trainable, but nothing precedes it to predict it from: mark it as context or start with a BOS token"
            )


def _check_sizes(trajectories: Sequence[TrainingTrajectory], counts: np.ndarray, limits: RowLimits) -> None:
    """Refuses trajectories that fit no row. Each has one segment at least."""
    lengths = np.array([len(t.trajectory.ids) for t in trajectories])
    slots = min(limits.reads, limits.terms)
    for k in np.flatnonzero((lengths > limits.row_length) | (counts > slots))[:1].tolist():
        problem = misfit(int(lengths[k]), int(counts[k]), limits)
        raise PackingError(f"{name_of(trajectories[k])}: {problem}, or shorten it")
    for name in ("segments", "trajectories"):
        if getattr(limits, name) < 1:
            raise PackingError(f"a row holds {getattr(limits, name)} {name}: raise packing.{name}")


def _fewest_rows(tree: PrefixTree, demand: Demand, limits: RowLimits) -> list[RowPlan]:
    rows = assign_rows(tree, demand, limits, split=False)
    if len(rows) == -(-tree.unique_tokens // limits.row_length):
        return rows  # fewer cannot hold the tokens
    others = assign_rows(tree, demand, limits, split=True)
    return min(rows, others, key=lambda rows: (len(rows), sum(row.tokens for row in rows)))


def plan(
    trajectories: Sequence[TrainingTrajectory],
    limits: RowLimits,
) -> Plan:
    """The rows of one optimizer step.

    trajectories: all of the step, trajectory_index unique. Tokens are shared only where id, content key
    and whatever follows tokens agree. Trajectories without a trainable token are left out. Raises
    PackingError naming a trajectory that is malformed or fits no row.
    """
    _check_shapes(trajectories)
    widths = widths_of(trajectories)
    if not trajectories:
        return Plan((), None, (), limits, PackingStats(0, limits.row_length, *[0] * 8), widths)
    runs = trained_runs([t.trajectory.trainable for t in trajectories])
    counts = runs.counts(len(trajectories))
    trained = np.flatnonzero(counts)
    untrained = len(trajectories) - len(trained)
    if untrained:
        trajectories = [trajectories[k] for k in trained.tolist()]
        runs = TrainedRuns(np.searchsorted(trained, runs.owner), runs.begin, runs.end)
        counts = counts[trained]
    if not trajectories:
        return Plan((), None, (), limits, PackingStats(0, limits.row_length, 0, untrained, *[0] * 6), widths)
    _check_sizes(trajectories, counts, limits)

    tree = build_tree([t.trajectory.ids for t in trajectories], tree_keys(trajectories, widths), limits.min_shared)
    demand = demand_of(runs, tree, np.array([t.trajectory.temperature for t in trajectories], np.float32))
    rows = _fewest_rows(tree, demand, limits)
    stats = PackingStats(
        num_rows=len(rows),
        row_length=limits.row_length,
        trajectories=len(trajectories),
        untrained=untrained,
        logical_tokens=sum(len(t.trajectory.ids) for t in trajectories),
        unique_tokens=tree.unique_tokens,
        placed_tokens=sum(row.tokens for row in rows),
        reads=sum(row.reads for row in rows),
        terms=sum(row.terms for row in rows),
        segments=sum(row.segments for row in rows),
    )
    return Plan(tuple(trajectories), tree, tuple(rows), limits, stats, widths)
