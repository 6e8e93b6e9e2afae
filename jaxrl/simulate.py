"""Predicts a run from one that was: python -m jaxrl.simulate CONFIG [--from RUN] [--KEY VALUE ...]

The simulator is calibrated with RUN/metrics.jsonl (default: the folder of CONFIG's own run) and RUN/config.toml; CONFIG and the
keys after it are the run to predict. --replicas N simulates N samplers instead of the config's. The last line is JSON: seconds of a
step, tokens per second, utilisation of both sides, lag.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxrl.config import ConfigError, load
from jaxrl.pipeline.calibration import CalibrationError, calibrate, read_steps
from jaxrl.pipeline.command_line import read_command
from jaxrl.pipeline.events import ControllerConfig, controller_config
from jaxrl.pipeline.simulator import SimulatedFailure, StepRecord, simulate
from jaxrl.pipeline.workload import Machine, Workload


def predict(config: ControllerConfig, workload: Workload, machine: Machine) -> dict:
    """What a run is like once it is under way: the first steps, as many as the lag allows, are left out."""
    records = simulate(config, workload, machine)
    return summary(records[min(config.max_lag + 1, len(records) - 1) :], machine)


def summary(records: Sequence[StepRecord], machine: Machine) -> dict:
    seconds = sum(r.seconds for r in records)
    lags = Counter(lag for r in records for lag in r.lags)
    return {
        "steps": len(records),
        "step_seconds": round(seconds / len(records), 4),
        "step_seconds_p90": round(float(np.percentile([r.seconds for r in records], 90)), 4),
        "sampled_tokens_per_second": round(sum(r.num_sampled for r in records) / seconds, 1),
        "trained_tokens_per_second": round(sum(r.num_trained for r in records) / seconds, 1),
        "trainer_busy": round(sum(r.train_seconds for r in records) / seconds, 3),
        "trainer_waits": round(sum(r.wait_seconds for r in records) / seconds, 3),
        "sampler_busy": round(sum(r.busy * r.seconds for r in records) / seconds / machine.replicas, 3),
        "slots_used": round(sum(r.running * r.seconds for r in records) / seconds / machine.replicas / machine.slots, 3),
        "lag": {str(lag): round(n / sum(lags.values()), 4) for lag, n in sorted(lags.items())},
        "groups_dropped_stale": sum(r.num_stale for r in records),
    }


def main(arguments: Sequence[str]) -> int:
    """0: predicted. 2: it cannot be, as it is."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN", help="folder of the run that was")
    parser.add_argument("--replicas", type=int, metavar="N", help="samplers of the simulated run")
    options, keys = parser.parse_known_args(arguments)
    try:
        config = read_command([options.config, *keys])
        run = options.run or Path(config.out) / config.name
        steps = read_steps(run / "metrics.jsonl")
        workload, machine = calibrate(steps, load(run / "config.toml"))
        machine = replace(
            machine,
            slots=config.sampler.slots,
            replicas=options.replicas or machine.replicas,
            concurrency=config.env.concurrency,
        )
        workload = replace(workload, group_size=config.pipeline.group_size, extra=config.pipeline.extra_episodes)
        predicted = predict(controller_config(config), workload, machine)
    except (ConfigError, CalibrationError, SimulatedFailure) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"calibrated_on": str(run), **predicted}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
