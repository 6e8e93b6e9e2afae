"""`python -m jaxrl.bench shared-prefix --python PATH --tokenizer DIR [--peer-python PATH]`: whole steps on long shared prompts.

A run as `jaxrl.train` makes it, with a vLLM server on the trainer's GPU: random weights of a Qwen3 shape, six prompts of 5,200
tokens × sixteen answers of 100 tokens a step, GRPO, random rewards. One JSON line per step, seconds:

    all_in      from the end of one optimizer step to the end of the next, by the run's own metrics
    publish     weights handed to the server; seen_stop_ms: how long running generations stood still meanwhile, each one's gap
                between two tokens at the publish less its median gap (median and worst)
    generation  until every answer is there, with its environment and the journal, less the publish before it
                (sync alone: first_token, until each answer has one, and decode)
    pack, train rows made of the answers; forward, backward and optimizer on them

Step 1 has what happens once (compilation, the first use of everything): `counted` is false, and the summary leaves it out.
--modes sync does one thing after another; inflight goes on generating while it trains and publishes, with a lag of at most 1, and
there parts overlap. Then a summary per mode.

With --peer-python, an interpreter with trl, datasets and vLLM on the same GPU, the same prompts and weights go through TRL's
GRPOTrainer with vLLM colocated, by every setting in --peer-settings (see shared_prefix_peer.py), once our server is gone and
the GPU is free; the last line is the ratio to the fastest setting that ran.
"""

import argparse
import asyncio
import gc
import json
import math
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.bench.train_step import SHAPES, qwen3
from jaxrl.config import Config, SamplerConfig, parse
from jaxrl.rollout.protocol import Completion, PublishReport, Sampler, SamplerLoad, SamplingParams, join
from jaxrl.rollout.tokenizer import Tokenizer, load_tokenizer

AHEAD = 4  # steps' worth of prompts that an overlapped run may have begun when it ends
TASK = Path(__file__).with_name("random_reward.py")
PEER = Path(__file__).with_name("shared_prefix_peer.py")
PARTS = ("generation", "pack", "train", "publish")


def main(argv: list[str]) -> None:
    options = _parse(argv)
    if options.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            return _measure(options, Path(folder), argv)
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"--folder {folder} is not empty: a run in it would be continued, not measured")
    _measure(options, folder, argv)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.bench shared-prefix", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", required=True, help="interpreter of vLLM's environment")
    parser.add_argument("--tokenizer", required=True, help="folder of a Hugging Face tokenizer, for the prompts")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--modes", nargs="+", default=["sync", "inflight"], choices=("sync", "async", "inflight"))
    parser.add_argument("--steps", type=int, default=6, help="of each mode, the first one included")
    parser.add_argument("--prompts", type=int, default=6, help="of a step")
    parser.add_argument("--answers", type=int, default=16, help="of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=5200)
    parser.add_argument("--answer-tokens", type=int, default=100)
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of activations, and of the server"
    )
    parser.add_argument("--param-dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and optimizer")
    parser.add_argument("--remat", default="full", choices=("none", "dots", "full"))
    parser.add_argument("--cache", default="recompute", choices=("recompute", "keep"), help="of running generations")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU that vLLM gets")
    parser.add_argument("--batched-tokens", type=int, default=32768, help="which the server computes at once at most")
    parser.add_argument("--workers", type=int, default=4, help="environment processes: they encode the prompts")
    parser.add_argument("--folder", help="where to write weights, prompts and runs; a temporary one if left out")
    parser.add_argument("--peer-python", help="a Python interpreter with trl, datasets and vLLM")
    parser.add_argument("--peer-settings", nargs="+", default=["fast"], help="of shared_prefix_peer.py: plain, fast, ...")
    parser.add_argument("--peer-steps", type=int, default=3, help="the first of them not counted")
    parser.add_argument("--peer-seconds", type=float, default=300.0, help="which one setting of the peer may take")
    return parser.parse_args(argv)


def _measure(options: argparse.Namespace, folder: Path, argv: list[str]) -> None:
    if not options.peer_python:
        return _ours(options, folder)
    # The peer gets the GPU to itself, so ours is a process that is gone by then.
    alone = [*argv, "--folder", str(folder), "--peer-python", ""]
    ours = _lines([sys.executable, "-m", "jaxrl.bench", "shared-prefix", *alone])
    best = min((line["median_seconds"] for line in ours if line.get("what") == "summary"), default=None)
    if best is None:
        sys.exit("our own part ended without a summary: its error is above")
    peers = {}
    for setting in options.peer_settings:
        command = [options.peer_python, str(PEER), setting, str(folder / "model"), str(folder / "prompts.jsonl")]
        sizes = [str(getattr(options, name)) for name in ("prompts", "answers", "answer_tokens", "peer_steps")]
        lines = _lines([*command, *sizes], options.peer_seconds)
        if steps := [line["seconds"] for line in lines if line.get("what") == "step" and line["step"] > 1]:
            peers[setting] = statistics.median(steps)
    if not peers:
        sys.exit("no setting of the peer made two steps: its errors are above")
    fastest = min(peers, key=peers.__getitem__)
    _print(what="ratio", seconds=best, peer=fastest, peer_seconds=peers[fastest], ratio=peers[fastest] / best)


def _lines(command: Sequence[str], seconds: float = math.inf) -> list[dict[str, Any]]:
    """Runs a command for at most so long and passes on the JSON lines of its output, which it returns."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), _kill, (process,))
    timer.start()
    lines = []
    try:
        for line in process.stdout:
            if line.startswith('{"bench"'):
                lines.append(json.loads(line))
            print(line, end="", file=sys.stdout if line.startswith('{"bench"') else sys.stderr, flush=True)
    finally:
        timer.cancel()
        _kill(process)
        process.wait()
    return lines


def _kill(process: subprocess.Popen) -> None:
    """With what it started: a peer that hangs leaves an engine on the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ours(options: argparse.Namespace, folder: Path) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 - options.memory:.2f}")
    tokenizer = load_tokenizer(options.tokenizer)
    texts = _prompts(tokenizer, options.prompt_tokens, (options.steps + AHEAD) * options.prompts)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    _write_model(folder / "model", options)
    _with_server(options, folder)


def _prompts(tokenizer: Tokenizer, length: int, count: int) -> list[str]:
    """Texts that start a sequence of exactly `length` tokens, so that no side has to pad."""
    rng = np.random.default_rng(0)
    special = set(tokenizer.hf.all_special_ids)
    usual = np.array([i for i in range(len(tokenizer.hf)) if i not in special])
    texts = []
    while len(texts) < count:
        ids = rng.choice(usual, length).tolist()
        for _ in range(8):  # pieces of characters and of words change when they are encoded again, less each time
            text = tokenizer.decode(ids)
            again = [*tokenizer.bos, *tokenizer.encode(text, start=True)]
            if len(again) == length:
                texts.append(text)
                break
            ids = [*again, *rng.choice(usual, length)][len(tokenizer.bos) : length]
    return texts


def _write_model(folder: Path, options: argparse.Namespace) -> None:
    import jax

    from jaxrl.config import MeshConfig
    from jaxrl.mesh import make_mesh
    from jaxrl.models.decoder import Decoder, init_variables
    from jaxrl.models.hf import save_checkpoint

    architecture, mesh = qwen3(options.shape), make_mesh(MeshConfig(), jax.devices()[:1])
    decoder = Decoder(architecture, options.dtype, options.dtype, mesh=mesh)
    params = init_variables(decoder, jax.random.key(0), mesh)["params"]
    save_checkpoint(folder, params, architecture, options.dtype, options.tokenizer)


def _with_server(options: argparse.Namespace, folder: Path) -> None:
    """One server for all modes: it takes longer to start than a mode to run."""
    from bridge.client import process
    from bridge.client.launch import find_interpreter, launches
    from jaxrl.pipeline.run import RunError

    settings = SamplerConfig(
        kind="vllm",
        python=options.python,
        slots=_slots(options),
        max_length=options.prompt_tokens + options.answer_tokens,
        dtype=options.dtype,
        memory=options.memory,
        flags=("--max-num-batched-tokens", str(options.batched_tokens)),
    )
    key = secrets.token_urlsafe(32)
    (launch,) = launches(settings, qwen3(options.shape), None, find_interpreter(settings), folder, key)
    os.environ[process.KEY_VARIABLE] = key
    began = time.monotonic()
    with asyncio.Runner() as runner:  # each run has a loop of its own
        server = runner.run(process.start(launch))
        _print(what="server", shape=options.shape, start_seconds=time.monotonic() - began)
        try:
            for mode in options.modes:
                _run(mode, server.url, options, folder)
                gc.collect()  # the next mode needs the memory
        except RunError as error:
            raise error if server.alive else server.failure("ended") from error
        finally:
            runner.run(server.stop())


def _run(mode: str, url: str, options: argparse.Namespace, folder: Path) -> None:
    from jaxrl.metrics.jsonl import read
    from jaxrl.pipeline.run import run
    from jaxrl.samplers import make_sampler

    watched: list[_Watched] = []

    async def make(*arguments: Any) -> Sampler:
        watched.append(_Watched(await make_sampler(*arguments)))
        return watched[0]

    config = _config(mode, url, options, folder)
    run(config, make)
    metrics = [line for line in read(folder / mode / "metrics.jsonl") if "time/step" in line]
    lines = [_line(mode, values, watched[0], options) for values in metrics]
    for line in lines:
        _print(**line)
    counted = [line for line in lines if line["counted"]]
    if counted:
        parts = {name: statistics.median(line[name] for line in counted) for name in PARTS}
        seconds = [line["all_in"] for line in counted]
        mean = statistics.fmean(seconds)
        _print(what="summary", mode=mode, median_seconds=statistics.median(seconds), mean_seconds=mean, **parts)


def _config(mode: str, url: str, options: argparse.Namespace, folder: Path) -> Config:
    trajectories = options.prompts * options.answers
    reads = _round_up(trajectories * options.answer_tokens, 512)
    return parse(
        {
            "name": mode,
            "out": str(folder),
            "model": {
                "checkpoint": str(folder / "model"),
                "dtype": options.dtype,
                "param_dtype": options.param_dtype,
                "remat": options.remat,
            },
            "env": {
                "name": f"{TASK}:rollout",
                "data": str(folder / "prompts.jsonl"),
                "workers": options.workers,
            },
            "sampling": {"max_tokens": options.answer_tokens},
            "sampler": {
                "kind": "vllm",
                "urls": [url],
                "slots": _slots(options),
                "max_length": options.prompt_tokens + options.answer_tokens,
                "dtype": options.dtype,
                "cache": options.cache,
            },
            "pipeline": {
                "mode": mode,
                "steps": options.steps,
                "groups_per_step": options.prompts,
                "group_size": options.answers,
            },
            "packing": {
                "row_length": _round_up(options.prompts * options.prompt_tokens + trajectories * options.answer_tokens, 1024),
                "reads": reads,
                "terms": reads,
                "trajectories": _round_up(trajectories, 64),
                "segments": _round_up(2 * trajectories, 64),
            },
            "optimizer": {"lr": 1e-6},
            "log": {"tensorboard": False, "live": False},
        }
    )


def _slots(options: argparse.Namespace) -> int:
    return 2 * options.prompts * options.answers  # what a lag of 1 keeps running


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _line(mode: str, values: dict[str, Any], watched: "_Watched", options: argparse.Namespace) -> dict[str, Any]:
    """What is printed of a step, from its line in metrics.jsonl and from what was seen of its sampler."""
    step = values["step"]
    line = {
        "what": "step",
        "mode": mode,
        "step": step,
        "counted": step > 1,
        "all_in": values["time/step"],
        "generation": values["time/wait"],
        "pack": values["time/pack"],
        "train": values["time/train"],
        "publish": values["time/publish"],
        "tokens_computed": values["tokens/placed"],
        "lag": values["lag/mean"],
        "logp_difference": values.get("parity/logp_mean_abs"),
    }
    if mode == "sync":
        count = options.prompts * options.answers
        calls = watched.calls[(step - 1) * count : step * count]
        first = max(times[1] for times in calls)
        line |= {"first_token": first - min(times[0] for times in calls), "decode": max(times[-1] for times in calls) - first}
    if stops := watched.stops(step - 1):
        line["seen_stop_ms"] = [1e3 * statistics.median(stops), 1e3 * max(stops)]
    return line


class _Watched:
    """A sampler, with the moments at which it was called, gave tokens and published."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        self.calls: list[list[float]] = []  # of each its start and every part's arrival, seconds
        self._publishes: dict[int, tuple[float, float]] = {}  # by version, its beginning and end

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> AsyncIterator[Completion]:
        times = [time.monotonic()]
        self.calls.append(times)
        async with aclosing(self._sampler.stream(prompt_ids, params, priority)) as parts:
            async for part in parts:
                times.append(time.monotonic())
                yield part

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> Completion:
        async with aclosing(self.stream(prompt_ids, params, priority)) as stream:
            parts = [part async for part in stream]
        return Completion(join([part.tokens for part in parts]), parts[-1].finish_reason)

    async def publish(self, weights: Any, version: int, in_flight: bool) -> PublishReport:
        began = time.monotonic()
        report = await self._sampler.publish(weights, version, in_flight)
        self._publishes[version] = (began, time.monotonic())
        return report

    def load(self) -> SamplerLoad:
        return self._sampler.load()

    async def close(self) -> None:
        await self._sampler.close()

    def stops(self, version: int) -> list[float]:
        """How long each generation that ran while `version` was published stood still for it, seconds."""
        if version not in self._publishes:
            return []
        began, ended = self._publishes[version]
        stops = []
        for times in self.calls:
            arrivals = np.array(times[1:])
            gaps = np.diff(arrivals)
            touching = gaps[(arrivals[1:] >= began) & (arrivals[:-1] <= ended)]
            if len(touching):
                stops.append(max(0.0, float(touching.max() - np.median(gaps))))
        return stops


def _print(**values: Any) -> None:
    print(json.dumps({"bench": "shared-prefix"} | _rounded(values)), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
