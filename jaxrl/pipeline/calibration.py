"""From a run's metrics.jsonl to a simulated run: how long its answers were, and how fast both sides were.

What a run does not log is not guessed: the time that environments take is part of the decode curve here, so that a
calibrated run predicts other sizes, lags and modes of the same task, not other tools.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxrl.config import Config
from jaxrl.pipeline.rollouts import LENGTH_PERCENTILES
from jaxrl.pipeline.workload import Machine, Workload

Metrics = Mapping[str, float]

NEEDED = ("completion/tokens_p50", "tokens/placed", "packing/rows", "load/running", "time/step", "time/train", "time/pack")
FIRST_STEPS = 2  # not representative: things compile
FEWEST_STEPS = 8
NUM_QUANTILES = 33


class CalibrationError(Exception):
    """The metrics of a run that do not suffice."""


def read_steps(path: Path) -> list[Metrics]:
    """The optimizer steps of a metrics.jsonl, but for the first. Raises CalibrationError."""
    if not path.is_file():
        raise CalibrationError(f"{path}: no such file; it is written by a run of `python -m jaxrl.train`")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if "time/train" in line][FIRST_STEPS:]
    if len(steps) < FEWEST_STEPS:
        raise CalibrationError(
            f"{path} has {len(steps)} steps after the first {FIRST_STEPS}, at least {FEWEST_STEPS} are needed"
        )
    missing = [name for name in NEEDED if not any(name in step for step in steps)]
    if missing:
        raise CalibrationError(f"{path} has no {missing[0]}: it is of an older version, run again")
    return steps


def calibrate(steps: Sequence[Metrics], config: Config) -> tuple[Workload, Machine]:
    """The workload and the machine of a run of `config` with these metrics."""
    return _workload(steps, config), _machine(steps, config)


def _total(steps: Sequence[Metrics], name: str) -> float:
    return float(sum(step.get(name, 0.0) for step in steps))


def _workload(steps: Sequence[Metrics], config: Config) -> Workload:
    """Lengths: the quantiles of every step, weighted by its episodes."""
    levels = np.array([*LENGTH_PERCENTILES, 100]) / 100
    names = [*(f"completion/tokens_p{p}" for p in LENGTH_PERCENTILES), "completion/tokens_max"]
    told = [step for step in steps if names[0] in step]
    even = np.linspace(0, 1, NUM_QUANTILES)
    drawn = [np.interp(even, levels, [step[name] for name in names]) for step in told]
    repeats = [max(1, round(step["episodes/finished"] / NUM_QUANTILES)) for step in told]
    pool = np.concatenate([np.tile(values, n) for values, n in zip(drawn, repeats, strict=True)])
    finished, trained = _total(steps, "groups/finished"), max(_total(steps, "groups/trained"), 1.0)
    episodes = max(_total(steps, "episodes/finished"), 1.0)
    sampled = max(_total(steps, "tokens/trained"), 1.0)
    prompt = (_total(steps, "tokens/logical") - sampled) / (trained * config.pipeline.group_size)
    return Workload(
        lengths=tuple(np.quantile(pool, even).tolist()),
        group_size=config.pipeline.group_size,
        prompt_tokens=max(0.0, prompt),
        stored=max(0.0, _total(steps, "tokens/placed") - max(0.0, prompt) * trained) / sampled,
        failing=_total(steps, "episodes/failed") / episodes,
        barren=_total(steps, "groups/zero_variance") / max(finished, 1.0),
    )


def _machine(steps: Sequence[Metrics], config: Config) -> Machine:
    sampler = config.sampler
    batches = np.array([max(1, -(-step["packing/rows"] // config.packing.rows)) for step in steps])
    seconds = np.array([step["time/train"] + step["time/pack"] for step in steps])
    base, slope = 0.0, float(seconds.sum() / batches.sum())
    if np.ptp(batches) > 0:
        fitted, at_none = np.polyfit(batches, seconds, 1)
        if fitted > 0 and at_none > 0:
            base, slope = float(at_none), float(fitted)
    # A row may be full of terms or trajectories before it is of tokens: simulated ones hold what the fullest of these held.
    held = np.quantile([step["tokens/placed"] / max(step["packing/rows"], 1) for step in steps], 0.9)
    publishes = [step["time/publish"] for step in steps if step.get("time/publish")]
    replicas = len(sampler.urls) or sampler.replicas if sampler.kind == "vllm" else 1
    machine = Machine(
        decode=_decode(steps, config, replicas),
        slots=sampler.slots,
        replicas=replicas,
        concurrency=config.env.concurrency,
        step_seconds=base,
        batch_seconds=slope,
        rows=config.packing.rows,
        row_length=max(1, round(float(held))),
    )
    return replace(machine, publish_seconds=float(np.mean(publishes)) if publishes else 0.0)


def _decode(steps: Sequence[Metrics], config: Config, replicas: int) -> tuple[tuple[float, float], ...]:
    """Seconds per token of each of b sequences, base + slope · b.

    In sync the sampler works while the trainer waits, for as many decode steps as the longest answer has tokens, and more if
    not all fit at once: seconds = base · decode steps + slope · tokens. In the other modes it always works, and sequences
    decoded at once over tokens per second are the seconds of a token (Little's law).
    """
    told = [step for step in steps if step.get("completion/tokens_mean", 0) > 0 and step["time/step"] > 0]
    sampled = np.array([step["completion/tokens_mean"] * step["episodes/finished"] for step in told]) / replicas
    if config.pipeline.mode == "sync":
        longest = np.maximum([step["completion/tokens_max"] for step in told], sampled / config.sampler.slots)
        base, slope = _not_negative(longest, sampled, np.array([step["time/wait"] for step in told]))
    else:
        running = np.array([max(1.0, step["load/running"] / replicas) for step in told])
        seconds = running * np.array([step["time/step"] for step in told]) / sampled
        base, slope = _not_negative(np.ones(len(told)), running, seconds)
    return (0.0, base), (float(config.sampler.slots), base + slope * config.sampler.slots)


def _not_negative(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> tuple[float, float]:
    """a and b, neither negative, that make a x + b y closest to z."""
    a, b = np.linalg.lstsq(np.stack([x, y], 1), z, rcond=None)[0].tolist()
    if a >= 0 and b >= 0:
        return a, b
    return (0.0, float(y @ z / (y @ y))) if a < 0 else (float(x @ z / (x @ x)), 0.0)
