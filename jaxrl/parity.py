"""Trainer against sampler on the same tokens: python -m jaxrl.parity CONFIG [--publishes N] [--tasks N] [--KEY VALUE ...]

Samples answers to the config's own tasks with the config's own sampler, publishes the unchanged weights N times while it
generates, and computes every sampled token with the trainer. One JSON line per publish, the worst tokens, and a verdict.
Exit status 1 if the mean difference is more than rounding of the dtypes.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import Config, ConfigError
from jaxrl.data import TrainingTrajectory
from jaxrl.metrics.parity import MEAN_LIMIT, compare, likely_cause, of_rows
from jaxrl.pipeline.command_line import read_command

WORST = 8  # tokens shown
COARSER = ("bfloat16", "float16", "float32", "float64")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.parity CONFIG", description=__doc__.partition("\n")[0])
    parser.add_argument("--publishes", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=32, help="tasks answered between two publishes")
    options, rest = parser.parse_known_args(arguments)
    try:
        config = read_command(rest)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from jaxrl.rollout.protocol import SamplerError  # jax and all that follows, only once the config is right
    from jaxrl.samplers import share_gpus

    share_gpus(config)
    try:
        return 0 if asyncio.run(_measure(config, options.publishes, options.tasks)) else 1
    except (ConfigError, SamplerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


async def _measure(config: Config, publishes: int, num_tasks: int) -> bool:
    """Whether trainer and sampler agree."""
    from jaxrl.pipeline.setup import build, initial_variables, make_runner
    from jaxrl.rollout.checked import CheckedSampler
    from jaxrl.rollout.episodes import sampling_params
    from jaxrl.samplers import make_sampler

    parts = build(config)
    state = parts.trainer.init(initial_variables(parts))
    weights: asyncio.Future[tuple[Any, int]] = asyncio.get_running_loop().create_future()
    weights.set_result((parts.trainer.variables(state), 0))
    with tempfile.TemporaryDirectory() as folder:
        sampler = CheckedSampler(
            await make_sampler(config, parts.architecture, parts.tokenizer, parts.eos_ids, Path(folder), weights), 0
        )
        runner = make_runner(parts, sampler)
        tasks, params = parts.environment.train, sampling_params(config, evaluation=False)
        try:
            await runner.start()
            means, tokens = [], []
            for number in range(publishes + 1):
                chosen = [(number * num_tasks + i) % len(tasks) for i in range(num_tasks)]
                running = asyncio.gather(
                    *(
                        runner.run(tasks[i], params, task_index=i, group=number * num_tasks + k, index=0)
                        for k, i in enumerate(chosen)
                    )
                )
                report = None
                if number:
                    while sampler.load().num_running == 0 and not running.done():
                        await asyncio.sleep(0.005)
                    report = await sampler.publish(parts.trainer.variables(state), number, in_flight=True)
                episodes = await running
                new = _tokens(parts, state, episodes)
                figures = compare(new["sampler"], new["trainer"])
                continued = (
                    {} if report is None else {"num_continued": report.num_continued, "seconds": round(report.seconds, 4)}
                )
                print(json.dumps({"publish": number, **continued, **_rounded(asdict(figures))}), flush=True)
                means.append(figures.mean)
                tokens.append(new)
        finally:
            await runner.close()
            await sampler.close()
    both = {name: np.concatenate([t[name] for t in tokens]) for name in tokens[0]}
    for i in np.argsort(-np.abs(both["sampler"] - both["trainer"]))[:WORST]:
        token = parts.tokenizer.decode([int(both["target"][i])], special=True)
        where = {"worst": token, "position": int(both["position"][i]), "version": int(both["version"][i])}
        print(json.dumps(where | {name: round(float(both[name][i]), 6) for name in ("sampler", "trainer")}))
    dtype = min((config.model.dtype, config.sampler.dtype), key=COARSER.index)
    agree = max(means) <= MEAN_LIMIT[dtype]
    verdict = {"agree": agree, "mean": max(means), "limit": MEAN_LIMIT[dtype], "first_mean": means[0], "last_mean": means[-1]}
    if not agree:
        verdict["likely_cause"] = likely_cause(both["sampler"], both["trainer"], both["trajectory"])
    print(json.dumps(verdict), flush=True)
    return agree


def _tokens(parts: Any, state: Any, episodes: Sequence[Any]) -> dict[str, np.ndarray]:
    """The sampled tokens as the sampler and the trainer see them, each [n]."""
    from jaxrl.packing import pack

    trajectories = [t for episode in episodes for t in episode.trajectories if t.trainable.any()]
    if not trajectories:
        raise ConfigError("env", f"no episode gave a token; the first said: {episodes[0].error}")
    training = [
        TrainingTrajectory(t, np.ones(len(t.ids), np.float32), np.ones(len(t.ids), np.float32), trajectory_index=i)
        for i, t in enumerate(trajectories)
    ]
    batches, _ = pack(training, parts.limits, parts.config.packing.rows)
    parts_of = [of_rows(rows, np.asarray(parts.trainer.logprobs(state, rows))) for rows in batches]
    return {name: np.concatenate([part[name] for part in parts_of]) for name in parts_of[0]}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
