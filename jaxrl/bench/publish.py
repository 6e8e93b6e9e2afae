"""`python -m jaxrl.bench publish --python PATH [--shape qwen3-0.6b]`: weights handed to a vLLM server while it generates.

Starts a server with random weights of a Qwen3 shape, keeps 64 generations of at most 1,024 tokens running, and publishes
again and again by every transport that reaches it, with both cache policies. JSON lines:

    generation   tokens/s of the server: before this process has anything on its GPU ("alone"), with the weights on the
                 GPU and nothing to compute ("resident"), and while it multiplies matrices without a pause ("computing")
    publish      medians over the publishes: bytes, seconds, those in which no token was computed by the server's clock, GB/s
                 over all seconds and, where the server holds the weights before it loads them, over those before the stop; and
                 the stop that running generations see: each one's gap between two lines at the publish less its median gap,
                 median and maximum over generations and publishes
"""

import argparse
import asyncio
import itertools
import json
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from jaxrl.bench.train_step import SHAPES, qwen3
from jaxrl.config import SamplerConfig
from jaxrl.rollout.protocol import SamplerError, SamplingParams

LENGTH = 1024
PUBLISH_SECONDS = 300.0
AFTER_SECONDS = 0.5  # a gap that ends this long after a publish still belongs to it


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.bench publish", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", required=True, help="interpreter of vLLM's environment")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--transports", nargs="+", default=["cuda_ipc", "shm", "http"])
    parser.add_argument("--caches", nargs="+", default=["keep", "recompute"])
    parser.add_argument("--publishes", type=int, default=5, help="of each kind, after one that makes everything ready")
    parser.add_argument("--generations", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement of tokens/s")
    parser.add_argument("--memory", type=float, default=0.35, help="share of the GPU that vLLM gets")
    options = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 - options.memory:.2f}")
    asyncio.run(_measure(options))


async def _measure(options: argparse.Namespace) -> None:
    from bridge.client import process
    from bridge.client.launch import find_interpreter, launches

    config = SamplerConfig(
        kind="vllm",
        python=options.python,
        slots=options.generations,
        max_length=LENGTH,
        dtype=options.dtype,
        memory=options.memory,
        flags=("--stream-interval", "1"),  # every token as it comes: a stop is seen between two
    )
    architecture = qwen3(options.shape)
    with tempfile.TemporaryDirectory() as folder:
        key = secrets.token_urlsafe(32)
        (launch,) = launches(config, architecture, None, find_interpreter(config), Path(folder), key)
        began = time.monotonic()
        server = await process.start(launch)
        _print(bench="publish", shape=options.shape, server_start_seconds=time.monotonic() - began)
        try:
            await _with_server(server.api, architecture, Path(folder), options)
        except SamplerError as error:
            raise error if server.alive else server.failure("ended") from error
        finally:
            await server.stop()


async def _with_server(api: Any, architecture: Any, folder: Path, options: argparse.Namespace) -> None:
    import jax

    from bridge.client.publish import publish
    from bridge.client.segments import run_id
    from bridge.client.transports.choose import open_transport
    from bridge.client.weights import Weights
    from jaxrl.config import MeshConfig
    from jaxrl.mesh import make_mesh
    from jaxrl.models.decoder import Decoder, init_variables

    state = await api.state()
    rng = np.random.default_rng(0)
    async with _generating(api, architecture.vocab_size, options.generations, rng) as streams:
        await asyncio.sleep(options.seconds)  # compilation and warm-up
        alone = await _rate(streams, options.seconds)
        _print(bench="publish", what="generation", trainer="absent", tokens_per_second=alone)
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        decoder = Decoder(architecture, options.dtype, options.dtype, mesh=mesh)
        params = (await asyncio.to_thread(init_variables, decoder, jax.random.key(0), mesh))["params"]
        jax.block_until_ready(params)
        resident = await _rate(streams, options.seconds)
        _print(bench="publish", what="generation", trainer="resident", tokens_per_second=resident, share=resident / alone)
        computing = await _while_computing(streams, options.seconds)
        _print(bench="publish", what="generation", trainer="computing", tokens_per_second=computing, share=computing / alone)

        version = itertools.count()
        for name, cache in itertools.product(options.transports, options.caches):
            if name not in state["transports"]:
                _print(bench="publish", what="publish", transport=name, skipped=f"the server has {state['transports']}")
                continue
            transport = await open_transport(name, state, run_id(folder), api=api)
            reports, windows = [], []
            for _ in range(options.publishes + 1):
                await asyncio.sleep(1.5)
                began = time.monotonic()
                weights = Weights(params, architecture, options.dtype)
                report = await publish(
                    api, weights, next(version), in_flight=True, cache=cache, transport=transport, timeout=PUBLISH_SECONDS
                )
                reports.append(report)
                windows.append((began, time.monotonic() + AFTER_SECONDS))
            await asyncio.sleep(AFTER_SECONDS + 1.0)
            await asyncio.to_thread(transport.close)
            stops = [stop for window in windows[1:] for stop in _stops(streams, window)]
            seconds, stop = (median(getattr(r, name) for r in reports[1:]) for name in ("seconds", "stop_seconds"))
            _print(
                bench="publish",
                what="publish",
                shape=options.shape,
                transport=name,
                cache=cache,
                publishes=options.publishes,
                gigabytes=reports[0].num_bytes / 1e9,
                seconds=seconds,
                worst_seconds=max(report.seconds for report in reports[1:]),
                stop_seconds=stop,
                gigabytes_per_second=reports[0].num_bytes / 1e9 / seconds,
                transfer_gigabytes_per_second=reports[0].num_bytes / 1e9 / (seconds - stop if transport.staged else seconds),
                num_continued=median(report.num_continued for report in reports[1:]),
                seen_stop_ms=1e3 * median(stops),
                worst_seen_stop_ms=1e3 * max(stops),
            )


@dataclass
class _Stream:
    """One generation after another in a slot: when lines came, and with how many tokens."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


@asynccontextmanager
async def _generating(api: Any, vocab_size: int, count: int, rng: np.random.Generator) -> AsyncIterator[list[_Stream]]:
    """`count` generations at any time; each begins with 64 to 512 tokens and ends at LENGTH."""
    streams = [_Stream() for _ in range(count)]

    async def generate(stream: _Stream, number: int) -> None:
        for again in itertools.count():
            prompt = rng.integers(0, vocab_size, int(rng.integers(64, 513))).tolist()
            params = SamplingParams(max_tokens=LENGTH - len(prompt) - int(rng.integers(0, 128)), seed=number)
            async for line in api.generate(f"bench-{number}-{again}", prompt, params):
                stream.times.append(time.monotonic())
                stream.counts.append(len(line["ids"]))

    tasks = [asyncio.create_task(generate(stream, i)) for i, stream in enumerate(streams)]
    try:
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
    if failures := [error for error in done if isinstance(error, Exception)]:
        raise failures[0]


async def _rate(streams: list[_Stream], seconds: float) -> float:
    """Tokens per second from now on."""
    before, began = sum(sum(stream.counts) for stream in streams), time.monotonic()
    await asyncio.sleep(seconds)
    return (sum(sum(stream.counts) for stream in streams) - before) / (time.monotonic() - began)


async def _while_computing(streams: list[_Stream], seconds: float) -> float:
    import jax
    import jax.numpy as jnp

    size = 8192 if jax.default_backend() == "gpu" else 512
    x = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 16, lambda _, y: jnp.tanh(y @ x), x))
    stop = asyncio.Event()

    def compute() -> None:
        while not stop.is_set():
            product(x).block_until_ready()

    computing = asyncio.create_task(asyncio.to_thread(compute))
    await asyncio.sleep(1.0)
    rate = await _rate(streams, seconds)
    stop.set()
    await computing
    return rate


def _stops(streams: list[_Stream], window: tuple[float, float]) -> list[float]:
    """For each generation the longest gap between lines that touches the window, less its median gap."""
    stops = []
    for stream in streams:
        times = np.array(stream.times)
        gaps = np.diff(times)
        touching = gaps[(times[1:] >= window[0]) & (times[:-1] <= window[1])]
        if len(touching):
            stops.append(max(0.0, float(touching.max() - np.median(gaps))))
    return stops


def _print(**values: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}), flush=True)
