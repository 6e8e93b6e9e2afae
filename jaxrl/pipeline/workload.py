"""What a simulated run does: how long its answers are and its tools take, and how fast its two sides are.

Everything random of a group depends on the seed and the group's index alone, so that two runs that differ in their
settings answer the same tasks with the same answers.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Quantiles = tuple[float, ...]  # of a distribution, evenly spaced from its least to its largest value
Curve = tuple[tuple[float, float], ...]  # (x, y) by growing x, linear between them and beyond the last


@dataclass(frozen=True)
class Workload:
    """The episodes of a run."""

    lengths: Quantiles  # tokens sampled per model call
    group_size: int
    extra: int = 0  # more episodes of a group that are started; the first group_size to end are kept
    latencies: Quantiles = (0.0, 0.0)  # seconds the environment takes after a call
    calls: int = 1  # model calls of an episode
    prompt_tokens: float = 0.0  # stored once per group
    context_tokens: float = 0.0  # that each call but the first adds: tool results
    stored: float = 1.0  # share of the sampled tokens that rows hold: answers that begin alike are stored once
    failing: float = 0.0  # share of the episodes that fail
    barren: float = 0.0  # share of the groups that have no variance
    stragglers: float = 0.0  # share of the calls whose environment takes `straggler_seconds` more
    straggler_seconds: float = 0.0
    growth: float = 0.0  # lengths grow by this share of their first value per optimizer step
    shift_step: int = 0  # groups submitted from this optimizer step on are `shift` times as long; 0: none
    shift: float = 1.0


@dataclass(frozen=True)
class Machine:
    """The two sides. Trainer: a step takes step_seconds + batch_seconds for each batch of `rows` rows of row_length tokens."""

    decode: Curve  # (sequences that a replica decodes, seconds per token of each)
    slots: int  # sequences that a replica decodes at once; others wait
    batch_seconds: float
    row_length: int
    rows: int = 1
    step_seconds: float = 0.0
    replicas: int = 1
    concurrency: int = 1 << 30  # episodes in progress
    publish_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    overlap: float = 1.0  # speed of each side while both work, where they share a processor

    def num_batches(self, tokens: float) -> int:
        """Row batches that hold so many unique tokens. The packer fills rows up to a few tokens; a step has one batch at least."""
        return max(1, int(-(-tokens // (self.row_length * self.rows))))


@dataclass(frozen=True)
class DrawnGroup:
    """Arrays [group_size + extra, calls], and [group_size, calls] once the group has ended."""

    lengths: np.ndarray  # whole tokens, at least 1
    latencies: np.ndarray  # seconds
    failed: np.ndarray  # bool [episodes]
    is_barren: bool
    tokens: int  # unique, of the episodes that did not fail, prompt and context included
    trained: int  # sampled tokens of those


def interpolate(curve: Curve, x: float) -> float:
    """The curve at x; the first value before it, the last slope after it."""
    if x <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    k = min(bisect_right(curve, (x,)), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[k - 1], curve[k]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def from_quantiles(quantiles: Sequence[float], uniform: np.ndarray) -> np.ndarray:
    """The values at `uniform` in [0, 1]."""
    return np.interp(uniform, np.linspace(0, 1, len(quantiles)), quantiles)


def draw_group(workload: Workload, seed: int, index: int, step: int) -> DrawnGroup:
    """Group `index`, submitted while the trainer is at `step`."""
    factor = (1 + workload.growth * step) * (workload.shift if 0 < workload.shift_step <= step else 1.0)
    return _draw(workload, seed, index, factor)


@lru_cache(maxsize=4096)  # settings that are compared answer the same groups
def _draw(w: Workload, seed: int, index: int, factor: float) -> DrawnGroup:
    rng = np.random.default_rng((seed, index))
    episodes = w.group_size + w.extra
    shape = (episodes, w.calls)
    uniform = rng.random((3, *shape))
    lengths = np.maximum(1, np.rint(from_quantiles(w.lengths, uniform[0]) * factor)).astype(np.int64)
    latencies = from_quantiles(w.latencies, uniform[1]) + (uniform[2] < w.stragglers) * w.straggler_seconds
    chance = rng.random(episodes + 1)
    return _count(w, lengths, latencies, chance[1:] < w.failing, bool(chance[0] < w.barren))


def restrict(workload: Workload, group: DrawnGroup, kept: Sequence[int]) -> DrawnGroup:
    """The group of these episodes."""
    if len(kept) == len(group.lengths):
        return group
    kept = sorted(kept)
    return _count(workload, group.lengths[kept], group.latencies[kept], group.failed[kept], group.is_barren)


def _count(w: Workload, lengths: np.ndarray, latencies: np.ndarray, failed: np.ndarray, is_barren: bool) -> DrawnGroup:
    trained = int(lengths[~failed].sum())
    context = w.context_tokens * (w.calls - 1) * int((~failed).sum())
    tokens = int(w.prompt_tokens + context + w.stored * trained)
    return DrawnGroup(lengths, latencies, failed, is_barren, tokens, trained)
