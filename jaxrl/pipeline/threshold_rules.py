"""A tuner that follows published threshold rules: one action per window of steps, by fixed bounds on what is observed.

It is the baseline that `autotuner` is measured against. It knows how many groups fill the rows of one step, but not
what a larger or smaller step would be worth.
"""

from collections import deque
from collections.abc import Sequence

from jaxrl.pipeline.autotuner import Bounds, Decision
from jaxrl.pipeline.events import Knobs
from jaxrl.pipeline.fill import PackRows, groups_that_fill
from jaxrl.pipeline.simulator import StepRecord

WINDOW = 4
IGNORED_STEPS = 3
PRESSURE_OVER, PRESSURE_UNDER = 0.80, 0.50  # waiting over running
UNDERFED, SATURATED, SEVERE = 0.08, 0.04, 0.50  # collect time over step time and filled share
QUEUE_BLOCKED = 1 / 3
STALE_ON, STALE_OFF = 0.20, 0.10
SPILL_UPPER = 0.03  # 80%-upper bound of the share of steps over the row budget, under a Beta(1, 8) prior
NUM_REPACKINGS = 48
REMEMBERED_STEPS = 64
GROWTH, LEAST_CHANGE, AT_ONCE = 1.20, 0.10, 0.25  # of the target in one window
BATCH_UP, BATCH_DOWN, BATCH_FLOOR = 1.15, 0.85, 0.85
TRIAL_KEPT, TRIAL_WINDOWS = 0.85, 2
WORKERS_UP, WORKERS_STEP, WORKERS_MOST = 1.10, 2, 16
IN_USE = 0.75  # share of the workers whose groups count against the lag


def spill_upper(spills: int, trials: int) -> float:
    """80%-upper bound of the probability of a spill, by a normal approximation of its Beta(1 + s, 8 + n - s) posterior."""
    a, b = 1 + spills, 8 + trials - spills
    mean = a / (a + b)
    return mean + 0.8416 * (mean * (1 - mean) / (a + b + 1)) ** 0.5


class ThresholdRules:
    """A Policy. `rows_of`, `rows`, `most_tokens`: the packer, and what the rows of one step hold."""

    def __init__(self, bounds: Bounds, rows_of: PackRows, rows: int, most_tokens: int):
        self.bounds, self.rows_of, self.rows, self.most_tokens = bounds, rows_of, rows, most_tokens
        self.decisions: list[Decision] = []
        self._window: list[StepRecord] = []
        self._past: deque[StepRecord] = deque(maxlen=REMEMBERED_STEPS)
        self._is_stale = False
        self._target = 0
        self._sustained = {"loaded": 0, "underfed": 0}
        self._trial: tuple[Knobs, float, int] | None = None  # knobs to go back to, collect time to beat, windows left

    def __call__(self, record: StepRecord, knobs: Knobs) -> Knobs | None:
        if record.step <= IGNORED_STEPS:
            return None
        self._past.append(record)
        self._window.append(record)
        if len(self._window) < WINDOW:
            return None
        window, self._window = self._window, []
        after, reason = self._act(window, knobs)
        after = self._within(after)
        if after == knobs:
            return None
        self.decisions.append(Decision(record.step, knobs, after, reason))
        return after

    def _act(self, window: Sequence[StepRecord], knobs: Knobs) -> tuple[Knobs, str]:
        seconds = sum(r.seconds for r in window)
        pressure = sum(r.waiting * r.seconds for r in window) / max(sum(r.running * r.seconds for r in window), 1e-9)
        filled = sum(r.num_placed for r in window) / (sum(r.num_batches for r in window) * self.most_tokens)
        collect = sum(r.wait_seconds for r in window)
        underfeed = collect / seconds / max(filled, 1e-9)
        blocked = sum(r.blocked * r.seconds for r in window) / seconds
        stale = sum(r.num_stale for r in window) / max(sum(len(r.finished) for r in window), 1)
        self._is_stale = stale >= STALE_ON or (self._is_stale and stale > STALE_OFF)
        target = self._new_target(knobs.groups_per_step)
        is_new, self._target = target != self._target, target
        fewest = min(knobs.min_groups or knobs.groups_per_step, target)
        same = Knobs(fewest, target, knobs.workers, target, knobs.publish_every)
        is_loaded = pressure > PRESSURE_OVER and underfeed <= SATURATED
        self._sustained["loaded"] = self._sustained["loaded"] + 1 if is_loaded else 0
        is_underfed = pressure <= PRESSURE_OVER and underfeed > UNDERFED
        self._sustained["underfed"] = self._sustained["underfed"] + 1 if is_underfed else 0
        if self._is_stale:
            if fewest < target:
                more = min(target, round(fewest * BATCH_UP + 0.5))
                return self._set(same, min_groups=more), f"{stale:.0%} of the groups were stale: larger batches"
            return self._set(same, workers=knobs.workers - WORKERS_STEP), f"{stale:.0%} of the groups were stale: fewer workers"
        if is_new:
            return self._set(same, min_groups=target), f"{target} groups fill the rows of a step"
        if blocked >= QUEUE_BLOCKED:
            if self._sustained["loaded"] >= 2:
                return self._set(same, workers=knobs.workers - WORKERS_STEP), f"the queue was full {blocked:.0%} of the time"
            return same, "the queue is full: hold"
        if self._sustained["underfed"] >= (1 if underfeed >= SEVERE else 2):
            more = min(WORKERS_MOST, max(WORKERS_STEP, round(knobs.workers * (WORKERS_UP - 1) / WORKERS_STEP) * WORKERS_STEP))
            return self._set(same, workers=knobs.workers + more), f"the trainer waited {underfeed:.0%} of its time for groups"
        return self._try_smaller(same, collect, underfeed)

    def _try_smaller(self, knobs: Knobs, collect: float, underfeed: float) -> tuple[Knobs, str]:
        if self._trial is not None:
            before, to_beat, left = self._trial
            if collect < TRIAL_KEPT * to_beat:
                self._trial = None
                return knobs, "the smaller batch is kept"
            self._trial = (before, to_beat, left - 1) if left > 1 else None
            if self._trial is None:
                return self._set(knobs, min_groups=before.min_groups), "the smaller batch did not shorten the wait: back"
            return knobs, "the trial goes on"
        smaller = max(int(knobs.min_groups * BATCH_DOWN), int(knobs.groups_per_step * BATCH_FLOOR), 1)
        if underfeed > UNDERFED and smaller < knobs.min_groups:
            self._trial = (knobs, collect, TRIAL_WINDOWS)
            return self._set(knobs, min_groups=smaller), "trial of a smaller batch"
        return knobs, "hold"

    def _new_target(self, current: int) -> int:
        """The largest number of groups that spills over the rows seldom enough, approached from `current`."""
        recent = [group for r in list(self._past)[-16:] for group in r.finished if group.trained][-200:]
        if not recent:
            return current
        counts = groups_that_fill(recent, self.rows, self.rows_of, self.most_tokens, NUM_REPACKINGS, len(self._past))
        target = 1
        for count in sorted(set(counts)):
            real = [r.num_batches > 1 for r in self._past if r.num_groups >= count]
            if spill_upper(sum(c < count for c in counts) + sum(real), len(counts) + len(real)) <= SPILL_UPPER:
                target = count
        if target == 1:
            target = counts[0]
        if target < current * (1 - AT_ONCE):
            return target
        if abs(target - current) < LEAST_CHANGE * current:
            return current
        return min(target, max(current + 1, int(current * GROWTH)))

    def _within(self, knobs: Knobs) -> Knobs:
        groups = min(max(knobs.groups_per_step, 1), self.bounds.groups)
        fresh = max(groups, int((groups * (self.bounds.max_lag + 1) - groups) / IN_USE))
        workers = min(max(knobs.workers, 2), self.bounds.workers, fresh)
        return Knobs(min(max(knobs.min_groups, 1), groups), groups, workers, groups, 1)

    @staticmethod
    def _set(knobs: Knobs, **changes) -> Knobs:
        return Knobs(**(vars(knobs) | changes))
