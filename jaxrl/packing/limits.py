"""How much a row holds, and the error of everything that does not fit."""

from dataclasses import dataclass

from jaxrl.config import PackingConfig
from jaxrl.data import TrainingTrajectory

# A default segment or trajectory table is an eighth of the row, but never smaller than this: short
# rows hold many short trajectories.
MIN_TABLE = 64


class PackingError(Exception):
    """A trajectory that cannot be packed, or a row that came out other than planned, by name."""


@dataclass(frozen=True)
class RowLimits:
    """Capacities of one row: T tokens, U reads, M loss terms, S segments, N trajectories. Every row
    of a run has arrays of exactly these sizes."""

    row_length: int
    reads: int
    terms: int
    segments: int
    trajectories: int
    min_shared: int = 1  # shortest run of tokens that trajectories share before they part

    @classmethod
    def from_config(cls, config: PackingConfig) -> "RowLimits":
        """Zeros of the config become: reads = T, terms = 2 T, segments and trajectories = T / 8 (at least 64)."""
        table = max(MIN_TABLE, config.row_length // 8)
        return cls(
            row_length=config.row_length,
            reads=config.reads or config.row_length,
            terms=config.terms or 2 * config.row_length,
            segments=config.segments or table,
            trajectories=config.trajectories or table,
            min_shared=config.min_shared,
        )


def misfit(num_tokens: int, num_trained: int, limits: RowLimits) -> str | None:
    """Why a trajectory fits no row, with the key to raise; None if it fits. One trajectory has as many reads as terms."""
    slots, which = min((limits.reads, "reads"), (limits.terms, "terms"))
    if num_tokens > limits.row_length:
        return f"it has {num_tokens} tokens, a row holds {limits.row_length}: raise packing.row_length"
    if num_trained > slots:
        return f"it has {num_trained} trainable tokens, a row holds {slots} {which}: raise packing.{which}"
    return None


def name_of(trajectory: TrainingTrajectory) -> str:
    """How errors name a trajectory."""
    return f"trajectory {trajectory.trajectory_index} (group {trajectory.group_index}, episode {trajectory.episode_index})"
