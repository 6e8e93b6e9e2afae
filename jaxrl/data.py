"""The data that moves through a run: trajectories, episodes, groups, packed rows.

Frozen dataclasses of numpy (or jax) arrays, no logic. Shape letters: L tokens of a trajectory,
R rows, T row capacity, S segments, U reads, M loss terms, N trajectories of a row. The words are
defined in docs/architecture.md; the row contract is stated once, on `PackedRows`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np


class Source(enum.IntEnum):
    """How a token came to be. Everything but CONTEXT was emitted by a sampler."""

    CONTEXT = 0  # prompt, template, tool result: never sampled
    PLAIN = 1  # sampled from the policy
    DRAFT = 2  # accepted draft of a speculative sampler
    RESAMPLE = 3  # drawn after a rejected draft
    BONUS = 4  # drawn after a fully accepted draft
    FORCED = 5  # given (a teacher's trace, a grammar's only choice): probability of emission 1


@dataclass(frozen=True)
class Trajectory:
    """One token-exact sequence. All arrays have shape [L]; tokens that were not sampled carry
    log-probs 0, version -1 and turn -1."""

    ids: np.ndarray  # int32
    trainable: np.ndarray  # bool: the loss sees the token
    policy_logp: np.ndarray  # float32, nats, at `temperature`, before truncation
    behaviour_logp: np.ndarray  # float32, nats, log of the probability of emission
    version: np.ndarray  # int32 policy version of the weights that computed the token
    source: np.ndarray  # uint8, `Source`
    turn: np.ndarray  # int32, index of the model call that emitted the token
    temperature: float = 1.0
    reward: float | None = None  # overrides the episode's reward for this trajectory (self-play)


@dataclass(frozen=True)
class Episode:
    """One run of an environment on one task. `error` is set if it failed: it then has no reward."""

    task_index: int  # row of the task set
    index: int  # number of the episode within its group
    trajectories: tuple[Trajectory, ...]
    reward: float
    step_rewards: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()  # readable transcript


@dataclass(frozen=True)
class Group:
    """The episodes of one task that share a baseline."""

    index: int  # position in the run's order of tasks: identifies the group
    task_index: int
    episodes: tuple[Episode, ...]


@dataclass(frozen=True)
class TrainingTrajectory:
    """A trajectory with what the loss needs of it, ready to be packed. Arrays have shape [L] and
    are read at trainable tokens only; those that follow tokens are read at all of them. None: not given."""

    trajectory: Trajectory
    advantage: np.ndarray  # float32
    weight: np.ndarray  # float32, every denominator of the optimizer step already folded in
    trajectory_index: int = 0  # unique within the step
    episode_index: int = 0
    group_index: int = 0
    reward: float = 0.0
    # Of the token's read, which trajectories share that have its prefix: then the first one's counts.
    reference_logp: np.ndarray | None = None  # float32
    proximal_logp: np.ndarray | None = None  # float32
    teacher_ids: np.ndarray | None = None  # int32 [L, K]
    teacher_logp: np.ndarray | None = None  # float32 [L, K]
    # Of the loss term.
    returns: np.ndarray | None = None  # float32
    old_value: np.ndarray | None = None  # float32
    value_weight: np.ndarray | None = None  # float32
    kl_weight: np.ndarray | None = None  # float32
    # Of the token itself; it is shared only where these agree.
    content_key: np.ndarray | None = None  # int64: what a token stands for beside its id (an image patch); None: zeros
    routed_experts: np.ndarray | None = None  # int16 [L, layers, k]
    axis_positions: np.ndarray | None = None  # int32 [L, 3]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """The nodes of the prefix trees of a row, [R, S] int32; unused slots have length 0 and parent -1."""

    start: Any
    length: Any
    parent: Any  # slot of the parent segment, -1 at a root
    depth: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reads:
    """(state, target) pairs whose log-prob is needed, [R, U], unique. Unused slots: state -1, target -1."""

    state: Any  # int32 offset of the state the logits come from
    target: Any  # int32 token id; -1 on a used slot asks for the state only
    temperature: Any  # float32
    # Width 0 unless the step's trajectories give them.
    reference_logp: Any  # float32, of the target
    proximal_logp: Any  # float32, of the target
    teacher_ids: Any  # int32 [R, U, K]
    teacher_logp: Any  # float32 [R, U, K]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossTerms:
    """(read, trajectory) pairs the loss sees, [R, M]. Unused slots: read -1, everything else arbitrary
    (NaN in tests), so a loss selects before it computes."""

    read: Any  # int32 slot in the row's reads
    trajectory: Any  # int32 slot in the row's trajectory table
    turn: Any  # int32
    policy_logp: Any  # float32
    behaviour_logp: Any  # float32
    advantage: Any  # float32
    weight: Any  # float32
    version: Any  # int32
    # Width 0 unless the step's trajectories give them.
    returns: Any  # float32
    old_value: Any  # float32
    value_weight: Any  # float32
    kl_weight: Any  # float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowTrajectories:
    """The trajectories with terms in a row, [R, N]; unused slots have index -1. Ids are step-wide."""

    index: Any  # int32
    episode: Any  # int32
    group: Any  # int32
    reward: Any  # float32
    length: Any  # int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedRows:
    """Fixed-capacity packed sequences, each holding one or more prefix trees in pre-order.

    Key k is visible to query q iff ``k <= q < subtree_end[k]``. The log-prob of a token is read from
    the state of its predecessor, so nothing is duplicated where branches part.
    """

    tokens: Any  # [R, T] int32, padding 0
    positions: Any  # [R, T] int32, logical position from the root
    subtree_end: Any  # [R, T] int32, exclusive; padding k + 1
    predecessor: Any  # [R, T] int32, -1 at roots and on padding
    segments: Segments
    reads: Reads
    terms: LossTerms
    trajectories: RowTrajectories
    # They follow tokens; width 0 unless the step's trajectories give them.
    routed_experts: Any  # [R, T, layers, k] int16
    axis_positions: Any  # [R, T, 3] int32
