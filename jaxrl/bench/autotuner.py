"""`python -m jaxrl.bench autotuner`: the autotuner and the threshold rules against the best static settings, on simulated workloads.

60 seeded workloads of ten kinds. Each policy starts from bad settings and is measured from step 41 on; in the `shift` workloads,
where answers change their length at step 61, in two phases: steps 41 to 60, and from 20 steps after the change on.
The best static setting is found by exhaustive search over a grid for each phase: all settings over few steps, the best of them
again, with smaller least batches and another publish interval, over more. Rates are useful tokens per second (`autotuner.worth`).
The last line is JSON. It takes some minutes; --limit N takes only the first N workloads.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jaxrl.config import PackingConfig
from jaxrl.packing import RowLimits
from jaxrl.pipeline.autotuner import Autotuner, Bounds, Policy, useful_rate
from jaxrl.pipeline.events import ControllerConfig, Knobs
from jaxrl.pipeline.fill import pack_rows
from jaxrl.pipeline.simulator import StepRecord, simulate
from jaxrl.pipeline.threshold_rules import ThresholdRules
from jaxrl.pipeline.workload import Machine, Workload

KINDS = ("short", "long", "tools", "slow_trainer", "fast_trainer", "stragglers", "failures", "drift", "shift", "crowded")
MEASURED_FROM = 40  # steps after a bad start
SHIFT_STEP, RECOVERY = 60, 20
STEPS = 100
SIZES, WORKERS, LEAST = (4, 8, 12, 16, 24, 32, 48), (4, 8, 16, 32, 64, 96), (1.0, 0.5)
SHORT, LONG, SKIPPED, FINALISTS = 14, 40, 5, 3
GROUP_SIZE = 2
CLOSE = 0.95


@dataclass(frozen=True)
class Case:
    kind: str
    seed: int
    workload: Workload
    machine: Machine
    noise_scale: float | None  # groups
    max_lag: int
    start: Knobs
    bounds: Bounds


def make_case(number: int) -> Case:
    """Workload `number`, of kind number mod 10."""
    kind = KINDS[number % len(KINDS)]
    rng = np.random.default_rng((7, number))
    sigma = {"short": 0.3, "long": 1.1}.get(kind, float(rng.uniform(0.4, 0.8)))
    lengths = np.exp(np.log(rng.uniform(150, 500)) + sigma * np.array([-2.5, -1.5, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 1.5, 2.5]))
    mean = float(np.mean(lengths))
    calls = int(rng.integers(2, 4)) if kind == "tools" else 1
    slots, replicas = int(rng.choice([16, 32, 64])), int(rng.integers(1, 4))
    base, slope = 0.012, 0.012 / rng.uniform(16, 64)
    decode = ((1.0, base + slope), (float(slots), base + slope * slots))
    if kind == "crowded":  # past a knee, more answers at once are fewer tokens per second
        knee = slots // 3
        decode = ((1.0, base + slope), (float(knee), base + slope * knee), (float(slots), (base + slope * knee) * 6))
    best_rate = replicas * max(b / t for b, t in decode)  # sampled tokens per second
    rows, row_length = int(rng.integers(1, 4)), 4096
    per_batch = rows * row_length / best_rate
    share = {"slow_trainer": rng.uniform(1.2, 2.0), "fast_trainer": rng.uniform(0.1, 0.3)}.get(kind, rng.uniform(0.4, 1.2))
    latency = rng.uniform(2, 12) if kind == "tools" else rng.uniform(0, 0.5)
    workload = Workload(
        lengths=tuple(lengths),
        group_size=GROUP_SIZE,
        latencies=(0.2 * latency, latency, 3 * latency),
        calls=calls,
        prompt_tokens=float(rng.uniform(50, 300)),
        failing=0.15 if kind == "failures" else 0.01,
        barren=0.4 if kind == "failures" else float(rng.uniform(0, 0.2)),
        stragglers=0.03 if kind == "stragglers" else 0.0,
        straggler_seconds=float(rng.uniform(5, 15)) * mean * base,
        growth=float(rng.uniform(0.004, 0.012)) if kind == "drift" else 0.0,
        shift_step=SHIFT_STEP if kind == "shift" else 0,
        shift=float(rng.choice([0.4, 2.5])),
    )
    machine = Machine(
        decode=decode,
        slots=slots,
        replicas=replicas,
        batch_seconds=float(per_batch * share),
        step_seconds=float(per_batch * rng.uniform(0.1, 0.5)),
        row_length=row_length,
        rows=rows,
        publish_seconds=float(per_batch * rng.uniform(0.02, 0.2)),
    )
    max_lag = int(rng.integers(1, 5))
    starts = (Knobs(4, 4, 4, 4, 1), Knobs(48, 48, 8, 48, 1), Knobs(4, 4, 96, 4, 1), Knobs(48, 48, 96, 48, 1))
    noise = float(rng.uniform(16, 128)) if rng.random() < 0.5 else None
    return Case(
        kind, number, workload, machine, noise, max_lag, starts[int(rng.integers(4))], Bounds(max_lag, SIZES[-1], WORKERS[-1])
    )


def run_config(case: Case, steps: int, knobs: Knobs) -> ControllerConfig:
    return ControllerConfig(
        mode="inflight",
        steps=steps,
        max_lag=case.max_lag,
        window=2 * case.bounds.workers,
        checkpoint_every=steps + 1,
        **vars(knobs),
    )


def phases(case: Case) -> list[tuple[int, int, Workload]]:
    """(first step, one past the last, workload) of what is measured. The workload of static settings has no change within it."""
    if not case.workload.shift_step:
        return [(MEASURED_FROM, STEPS, case.workload)]
    before = replace(case.workload, shift_step=0)
    after = replace(before, lengths=tuple(v * case.workload.shift for v in before.lengths))
    return [(MEASURED_FROM, SHIFT_STEP, before), (SHIFT_STEP + RECOVERY, STEPS + SHIFT_STEP, after)]


def static_rate(case: Case, workload: Workload, knobs: Knobs, steps: int, skipped: int) -> float:
    records = simulate(run_config(case, steps, knobs), workload, case.machine, seed=1000 + case.seed)
    return useful_rate(records[skipped:], case.noise_scale)


def best_static(case: Case, first: int, workload: Workload) -> tuple[float, Knobs]:
    """The best rate over the steps from `first` on, and its settings. Where lengths drift, every run is as long as the tuned one."""
    drifts = workload.growth > 0
    steps, skipped = (STEPS, first) if drifts else (SHORT, SKIPPED)
    rates = {}
    for size, workers in itertools.product(SIZES, WORKERS):
        knobs = Knobs(size, size, workers, size, 1)
        rates[knobs] = static_rate(case, workload, knobs, steps, skipped)
    finalists = sorted(rates, key=rates.__getitem__)[-FINALISTS:]
    final = {}
    for knobs, least, every in itertools.product(finalists, LEAST, (1, 2)):
        if every <= case.max_lag + 1:
            other = replace(knobs, min_groups=max(1, round(least * knobs.groups_per_step)), publish_every=every)
            final[other] = static_rate(case, workload, other, LONG, first if drifts else 2 * SKIPPED)
    best = max(final, key=final.__getitem__)
    return final[best], best


def tuned(case: Case, policy: Policy) -> list[StepRecord]:
    steps = phases(case)[-1][1]
    return simulate(run_config(case, steps, case.start), case.workload, case.machine, seed=case.seed, tuner=policy)


def measure(number: int) -> dict:
    case = make_case(number)
    limits = RowLimits.from_config(PackingConfig(row_length=case.machine.row_length, reads=4 * case.machine.row_length))
    unknown = replace(case.machine, decode=((1.0, 1.0),), batch_seconds=1.0, step_seconds=0.0, publish_seconds=0.0)
    autotuner = Autotuner(
        run_config(case, STEPS, case.start),
        case.bounds,
        unknown,
        GROUP_SIZE,
        case.workload.calls,
        partial(pack_rows, limits=limits),
        lambda: case.noise_scale,
    )
    capacity = case.machine.rows * case.machine.row_length

    def rows_of(groups: Sequence) -> int:  # as the simulated trainer counts them
        return case.machine.num_batches(sum(g.tokens for g in groups)) * case.machine.rows

    rules = ThresholdRules(case.bounds, rows_of, case.machine.rows, capacity)
    best = [best_static(case, first, workload) for first, _, workload in phases(case)]
    line: dict = {
        "workload": number,
        "kind": case.kind,
        "best": [round(rate, 1) for rate, _ in best],
        "best_settings": best[-1][1],
    }
    for name, policy in (("autotuner", autotuner), ("threshold_rules", rules)):
        records = tuned(case, policy)
        rates = [useful_rate(records[first:end], case.noise_scale) for first, end, _ in phases(case)]
        line[name] = [round(rate / top, 3) for rate, (top, _) in zip(rates, best, strict=True)]
        line[f"{name}_decisions"] = [str(decision) for decision in policy.decisions]
        line[f"{name}_violations"] = sum(lag > case.max_lag for record in records for lag in record.lags)
    return line


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.bench autotuner", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=60, help="workloads, at most 60")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--decisions", action="store_true", help="also print what the autotuner decided, and why")
    options = parser.parse_args(argv)
    print(
        f"{'':>4} {'kind':<13} {'autotuner':>14} {'threshold':>14}  of the best static rate (shift: before, after)", flush=True
    )
    lines = []
    with ProcessPoolExecutor(options.processes) as pool:
        for line in pool.map(measure, range(min(options.limit, 60))):
            lines.append(line)
            columns = (" ".join(f"{v:.3f}" for v in line[name]) for name in ("autotuner", "threshold_rules"))
            print(f"{line['workload']:>4} {line['kind']:<13} " + " ".join(f"{c:>14}" for c in columns), flush=True)
            if options.decisions:
                print(f"       best: {line['best_settings']}")
                print("".join(f"       {decision}\n" for decision in line["autotuner_decisions"]), end="", flush=True)
    result = {
        "bench": "autotuner",
        "within_5_percent": sum(min(line["autotuner"]) >= CLOSE for line in lines),
        "of": len(lines),
        "lag_violations": sum(line["autotuner_violations"] for line in lines),
        "threshold_rules_within_5_percent": sum(min(line["threshold_rules"]) >= CLOSE for line in lines),
        "worst": min(min(line["autotuner"]) for line in lines),
    }
    print(json.dumps(result))
