"""Chooses workers, batch sizes, queue and publish interval while a run goes on, by simulating what it could do instead.

Every few steps: estimate the workload and the machine from what recent steps show (answer lengths, tool latencies, failures;
the throughput curves of both sides), simulate the run's own controller under other settings, and take the best if it is
better by LEAST_GAIN. The measured rate then judges the choice: settings that lose REVERT of what the ones before
gave, on answers as long as before, are taken back and not tried again until the workload changes.

Worth of a step. With gradient noise scale N, B groups advance the policy as B / (1 + B / N) groups in small steps would
(McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", eq. 2.7 ff.); without an estimate of N every token counts the same.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from jaxrl.pipeline.events import ControllerConfig, Knobs
from jaxrl.pipeline.fill import PackRows, groups_that_fill
from jaxrl.pipeline.simulator import SimulatedFailure, StepRecord, simulate
from jaxrl.pipeline.workload import Machine, Workload

WINDOW = 4  # steps between two looks; shorter ones are noise
EARLY_LOOKS = 4  # windows in which every look simulates: the estimates still improve
LATE_LOOKS, SURPRISED_LOOKS = 6, 2  # windows between simulations after that, the latter if the prediction was off
MEMORY = 8  # steps whose episodes describe the workload
CURVE_MEMORY = 48  # steps that the throughput curves are fitted to
CHANGED = 0.20  # change of the mean length or latency that starts the workload's estimate anew
SURPRISE = 0.15  # difference of measured and predicted rate that calls for another look
LEAST_GAIN = 0.03  # predicted gain below which nothing changes, twice that after the early looks
RUN_OFF_SEEDS = (1, 2)  # the best candidate and what runs are compared once more, on other groups
SMALLEST_STEP = 4  # groups
REVERT = 0.12  # measured loss that takes a change back
WARM_UP, MEASURED_GROUPS, MEASURED_STEPS = (
    4,
    200,
    (5, 24),
)  # of a simulated candidate: steps left out of its rate, and what it is from
NUM_QUANTILES = 33
NUM_REPACKINGS = 4
MOST_BATCHES = 3  # row batches of a step that candidates fill
FEWEST_GROUPS = 8  # that an estimate is made of


@dataclass(frozen=True)
class Bounds:
    """What the tuner must stay within."""

    max_lag: int
    groups: int  # most groups of a step
    workers: int  # most groups that run at once


@dataclass(frozen=True)
class Decision:
    step: int
    before: Knobs
    after: Knobs
    reason: str  # for a person to read

    def __str__(self) -> str:
        changes = [f"{k} {v} → {getattr(self.after, k)}" for k, v in vars(self.before).items() if v != getattr(self.after, k)]
        return f"step {self.step}: {', '.join(changes)}: {self.reason}"


class Policy(Protocol):
    """Hears of every step, and says what should change. A `simulator.Tuner` with a memory of its decisions."""

    decisions: list[Decision]

    def __call__(self, record: StepRecord, knobs: Knobs) -> Knobs | None: ...


def worth(record: StepRecord, noise_scale: float | None) -> float:
    """Useful tokens of a step: trained tokens, less what a batch beyond the noise scale (in groups) adds nothing with."""
    return record.num_trained / (1 + record.num_groups / noise_scale if noise_scale else 1)


def useful_rate(records: Sequence[StepRecord], noise_scale: float | None) -> float:
    """Useful tokens per second."""
    return sum(worth(r, noise_scale) for r in records) / max(sum(r.seconds for r in records), 1e-9)


class Replay:
    """A Policy that repeats the decisions of a saved profile, each after its step."""

    def __init__(self, decisions: Iterable[Decision]):
        self.decisions: list[Decision] = []
        self._at = {decision.step: decision for decision in decisions}

    def __call__(self, record: StepRecord, knobs: Knobs) -> Knobs | None:
        decision = self._at.get(record.step)
        if decision is None or decision.after == knobs:
            return None
        self.decisions.append(replace(decision, before=knobs))
        return decision.after


class Autotuner:
    """A Policy. config: of the run. known: the machine as the config tells it (rows, slots, replicas); its curves are not read.
    noise_scale: in groups, None while there is no estimate."""

    def __init__(
        self,
        config: ControllerConfig,
        bounds: Bounds,
        known: Machine,
        group_size: int,
        calls: int,
        rows_of: PackRows,
        noise_scale: Callable[[], float | None] = lambda: None,
    ):
        self.config, self.bounds, self.known = config, bounds, known
        self.group_size, self.calls, self.rows_of, self.noise_scale = group_size, calls, rows_of, noise_scale
        self.decisions: list[Decision] = []
        self._recent: deque[StepRecord] = deque(maxlen=MEMORY)
        self._curves: deque[StepRecord] = deque(maxlen=CURVE_MEMORY)
        self._window: list[StepRecord] = []
        self._basis: tuple[float, float] | None = None  # mean length and latency that the last look saw
        self._predicted: float | None = None
        self._before: tuple[Knobs, float] | None = None  # settings before the last change, and their measured rate
        self._refused: set[Knobs] = set()
        self._num_looks = self._since_look = 0
        self._is_settling = False  # the window holds steps of the settings before

    def __call__(self, record: StepRecord, knobs: Knobs) -> Knobs | None:
        self._recent.append(record)
        if record.step > 1:
            self._curves.append(record)
        self._window.append(record)
        if len(self._window) < WINDOW:
            return None
        window, self._window = self._window, []
        if self._is_settling:
            self._is_settling = False
            window = window[WINDOW // 2 :]
        after = self._look(window, knobs)
        if after is None or after == knobs:
            return None
        self._is_settling = True
        return after

    def _look(self, window: Sequence[StepRecord], knobs: Knobs) -> Knobs | None:
        noise = self.noise_scale()
        measured = useful_rate(window, noise)
        seen = _means(window)
        has_changed = self._basis is not None and seen is not None and _differ(self._basis, seen)
        if has_changed:
            while len(self._recent) > WINDOW:
                self._recent.popleft()
            self._refused.clear()
            self._before = None
            self._num_looks = min(self._num_looks, EARLY_LOOKS - 2)
        elif self._before is not None:
            (old, old_rate), self._before = self._before, None
            if measured < (1 - REVERT) * old_rate:
                self._refused.add(knobs)
                self._basis = None
                return self._decide(window, knobs, old, f"it gave {measured:.0f} useful tokens/s, {old_rate:.0f} before: back")
        is_surprised = self._predicted is not None and abs(measured / max(self._predicted, 1e-9) - 1) > SURPRISE
        self._since_look += 1
        wanted = SURPRISED_LOOKS if is_surprised else LATE_LOOKS
        if self._num_looks >= EARLY_LOOKS and not has_changed and self._since_look < wanted:
            return None
        model = self.estimate()
        if model is None:
            return None
        self._since_look = 0
        self._num_looks += 1
        self._basis = _means(self._recent)
        best, rate, now_rate = self._search(*model, knobs, noise)
        if rate < (1 + LEAST_GAIN * (1 if self._num_looks <= EARLY_LOOKS else 2)) * now_rate:
            self._predicted = now_rate
            return None
        self._predicted = rate
        self._before = (knobs, measured)
        return self._decide(window, knobs, best, self._evidence(window, rate / max(now_rate, 1e-9) - 1, noise))

    def _decide(self, window: Sequence[StepRecord], before: Knobs, after: Knobs, reason: str) -> Knobs:
        self.decisions.append(Decision(window[-1].step, before, after, reason))
        return after

    def _evidence(self, window: Sequence[StepRecord], gain: float, noise: float | None) -> str:
        seconds = sum(r.seconds for r in window)
        length, latency = self._basis
        filled = sum(r.num_placed for r in window) / (
            sum(r.num_batches for r in window) * self.known.row_length * self.known.rows
        )
        parts = [
            f"of the last {len(window)} steps the trainer waited {sum(r.wait_seconds for r in window) / seconds:.0%} of the time",
            f"{sum(r.running * r.seconds for r in window) / seconds:.0f} answers were being written and "
            f"{sum(r.waiting * r.seconds for r in window) / seconds:.0f} waited for a place",
            f"rows were {filled:.0%} full",
            f"answers had {length:.0f} tokens, tools took {latency:.2g} s",
        ]
        if noise:
            parts.append(f"the gradient noise scale is {noise:.0f} groups")
        return f"{'; '.join(parts)}. Simulated, this gives {gain:+.0%} useful tokens per second"

    # The model.

    def estimate(self) -> tuple[Workload, Machine] | None:
        """The workload and the machine as recent steps show them; None as long as too few groups ended."""
        groups = [group for record in self._recent for group in record.finished]
        if len(groups) < FEWEST_GROUPS:
            return None
        levels = np.linspace(0, 1, NUM_QUANTILES)
        workload = Workload(
            lengths=tuple(np.quantile(np.concatenate([g.lengths.ravel() for g in groups]), levels).tolist()),
            latencies=tuple(np.quantile(np.concatenate([g.latencies.ravel() for g in groups]), levels).tolist()),
            group_size=self.group_size,
            calls=self.calls,
            prompt_tokens=float(np.mean([g.tokens - g.trained for g in groups])),
            failing=float(np.mean([g.failed.mean() for g in groups])),
            barren=float(np.mean([g.is_barren for g in groups])),
        )
        step_seconds, batch_seconds = fit_trainer(self._curves)
        publish = float(np.mean([r.publish_seconds for r in self._curves])) if self._curves else 0.0
        machine = replace(
            self.known,
            decode=fit_decode(self._curves, self.known.slots),
            step_seconds=step_seconds,
            batch_seconds=batch_seconds,
            publish_seconds=publish if self.config.mode == "inflight" else 0.0,
        )
        return workload, machine

    def _search(self, workload: Workload, machine: Machine, knobs: Knobs, noise: float | None) -> tuple[Knobs, float, float]:
        """The best settings found, their predicted rate, and that of `knobs`. One setting after the other, twice round."""
        rates: dict[tuple[Knobs, int], float] = {}

        def rate(candidate: Knobs, seed: int = 0) -> float:
            if (candidate, seed) not in rates:
                rates[candidate, seed] = self._simulated_rate(candidate, workload, machine, seed, noise)
            return rates[candidate, seed]

        best = knobs
        for _ in range(2):
            start = best
            for variants in (self._sizes, self._workers, self._least, self._intervals, self._queues):
                candidates = [k for k in variants(best, machine) if k not in self._refused]
                best = max([best, *candidates], key=rate)
            if best == start:
                break
        rate_best, rate_now = (float(np.mean([rate(k, seed) for seed in (0, *RUN_OFF_SEEDS)])) for k in (best, knobs))
        return best, rate_best, rate_now

    def _simulated_rate(self, knobs: Knobs, workload: Workload, machine: Machine, seed: int, noise: float | None) -> float:
        """Useful tokens per second of a run of these settings; 0 if it fails, as one does when whole steps of groups fail."""
        steps = WARM_UP + int(np.clip(MEASURED_GROUPS // knobs.groups_per_step, *MEASURED_STEPS))
        config = replace(self.config, steps=steps, checkpoint_every=steps + 1, **vars(knobs))
        config = replace(config, eval_every=0, eval_at_start=False, eval_at_end=False, checkpoint_at_start=False)
        try:
            return useful_rate(simulate(config, workload, machine, seed)[WARM_UP:], noise)
        except SimulatedFailure:
            return 0.0

    def _make(self, groups: int, least: float, workers: int, every: int) -> Knobs:
        groups = min(max(groups, SMALLEST_STEP), self.bounds.groups)
        workers = min(max(workers, 1), self.bounds.workers)
        fewest = max(1, min(groups, round(least * groups)))
        every = min(max(every, 1), self.bounds.max_lag + 1)
        return Knobs(fewest, groups, workers, max(groups, fewest - workers + 1), every)

    def _sizes(self, knobs: Knobs, machine: Machine) -> list[Knobs]:
        """Steps of as many groups as fill one row batch, two, ..., and of other sizes; as many workers per group as now."""
        recent = [g for record in self._recent for g in record.finished if g.trained and not g.is_barren][-128:]
        sizes = {round(knobs.groups_per_step * f) for f in (0.6, 1.4, 2.0)} | {self.bounds.groups}
        if recent:
            for batches in range(1, MOST_BATCHES + 1):
                rows, tokens = batches * machine.rows, batches * machine.rows * machine.row_length
                if tokens / np.mean([g.tokens for g in recent]) < 1.2 * self.bounds.groups:
                    counts = groups_that_fill(recent, rows, self.rows_of, tokens, NUM_REPACKINGS, self._num_looks)
                    sizes.add(counts[0])
        ratio = knobs.workers / knobs.groups_per_step
        least = (knobs.min_groups or knobs.groups_per_step) / knobs.groups_per_step
        return [self._make(size, least, round(size * ratio), knobs.publish_every) for size in sorted(sizes)]

    def _workers(self, knobs: Knobs, machine: Machine) -> list[Knobs]:
        counts = {round(knobs.workers * f) for f in (0.5, 0.75, 1.3, 2.0)}
        counts |= {-(-machine.slots * machine.replicas // self.group_size), self.bounds.workers}
        return [replace(knobs, workers=n) for n in sorted(counts) if 1 <= n <= self.bounds.workers]

    def _least(self, knobs: Knobs, machine: Machine) -> list[Knobs]:
        return [self._make(knobs.groups_per_step, least, knobs.workers, knobs.publish_every) for least in (1.0, 0.5)]

    def _intervals(self, knobs: Knobs, machine: Machine) -> list[Knobs]:
        return [replace(knobs, publish_every=every) for every in (1, 2) if every <= self.bounds.max_lag + 1]

    def _queues(self, knobs: Knobs, machine: Machine) -> list[Knobs]:
        return [replace(knobs, queue=knobs.groups_per_step * times) for times in (1, 2)]


def _means(records: Iterable[StepRecord]) -> tuple[float, float] | None:
    """Mean length and latency of the calls that ended."""
    groups = [group for record in records for group in record.finished]
    if not groups:
        return None
    return float(np.mean([g.lengths.mean() for g in groups])), float(np.mean([g.latencies.mean() for g in groups]))


def _differ(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return any(abs(x - y) > CHANGED * max(x, 1e-9) for x, y in zip(a, b, strict=True))


def fit_trainer(records: Iterable[StepRecord]) -> tuple[float, float]:
    """(seconds of a step, seconds of each of its row batches), least squares, neither negative. Steps of one size say nothing of
    the split: all of it is then the batches'."""
    batches = np.array([r.num_batches for r in records], float)
    seconds = np.array([r.train_seconds for r in records], float)
    if len(batches) == 0:
        return 0.0, 1.0
    if np.ptp(batches) > 0:
        slope, base = np.polyfit(batches, seconds, 1)
        if slope > 0 and base >= 0:
            return float(base), float(slope)
        if slope <= 0:
            return float(seconds.mean()), 0.0
    return 0.0, float(seconds.sum() / batches.sum())


def fit_decode(records: Iterable[StepRecord], slots: int) -> tuple[tuple[float, float], ...]:
    """Seconds per token of each of b sequences that a replica decodes: the mean of what was seen, by b within 20%, increasing.
    Where only one b was seen, half of its seconds are taken to be the fixed part."""
    points = [(r.running / r.busy, r.running * r.seconds / r.num_sampled, r.num_sampled) for r in records if r.num_sampled]
    if not points:
        return ((1.0, 1e-3),)
    bins: dict[int, list[tuple[float, float, float]]] = {}
    for point in points:
        bins.setdefault(int(np.log(max(point[0], 1.0)) / np.log(1.2)), []).append(point)
    curve: list[tuple[float, float]] = []
    for key in sorted(bins):
        b, t, weight = np.array(bins[key]).T
        y = float(np.average(t, weights=weight))
        curve.append((float(np.average(b, weights=weight)), max(y, curve[-1][1]) if curve else y))
    b, t = curve[0]
    if len(curve) == 1:
        return ((0.0, t / 2), (b, t), (max(2 * b, slots), t / 2 * (1 + max(2 * b, slots) / b)))
    return tuple(curve)
