"""From a config to a run that goes on: makes its parts, in order, and ends them. What runs then is the shell.

On every process but 0 it is a follower that runs.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrl.checkpoint import Checkpoints, saved_steps
from jaxrl.config import Config
from jaxrl.data import Trajectory
from jaxrl.metrics import JsonlTracker, cut, make_trackers
from jaxrl.pipeline import controller as c
from jaxrl.pipeline.follower import follow
from jaxrl.pipeline.journal import open_journal
from jaxrl.pipeline.packer import Packer
from jaxrl.pipeline.rollouts import cut_rollouts
from jaxrl.pipeline.run_folder import lock, open_run
from jaxrl.pipeline.setup import Parts, build, make_runner
from jaxrl.pipeline.shell import RunError, Shell, kept
from jaxrl.pipeline.start import restore_or_start
from jaxrl.pipeline.warm_start import read_traces, warm_start
from jaxrl.rollout.checked import CheckedSampler
from jaxrl.rollout.protocol import Sampler, SamplerError
from jaxrl.trainer.gather import gather
from jaxrl.trainer.processes import POLL_SECONDS, Action, Peers, ProcessError, Record
from jaxrl.trainer.state import TrainState, variables_of

Weights = tuple[Any, int]  # the decoder's pytree and its policy version
# (config, architecture, tokenizer, eos_ids, the run's folder, weights to begin with, once there are any)
MakeSampler = Callable[..., Awaitable[Sampler]]

SIGNAL_SECONDS = 0.2  # between two looks for a signal


def run(config: Config, make_sampler: MakeSampler) -> dict[str, Any] | None:
    """Runs, or continues, the run a config describes; returns its summary, on process 0 alone if there are several: each
    of them calls this. `make_sampler` makes what generates: `jaxrl.samplers.make_sampler`.
    Raises ConfigError and errors that name a file or tensor before anything expensive starts, RunError for what goes
    wrong later."""
    if jax.process_index() == 0:
        return asyncio.run(_with_signals(config, make_sampler, time.monotonic()))
    with Peers() as peers:
        follow(config, peers)
    return None


async def _with_signals(config: Config, make_sampler: MakeSampler, began: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[c.Event | Exception] = asyncio.Queue()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, events.put_nowait, c.Signal(signal.Signals(number).name))

    lost: list[RunError] = []

    def hear(news: str | ProcessError) -> None:
        if isinstance(news, ProcessError):
            lost.append(RunError(f"{news}\n{kept(config)}"))
        loop.call_soon_threadsafe(events.put_nowait, c.Signal(news) if isinstance(news, str) else lost[0])

    try:
        with Peers(hear) as peers:
            try:
                return await _run(config, make_sampler, peers, events, began)
            except jax.errors.JaxRuntimeError as error:
                if peers.count == 1:
                    raise
                await asyncio.sleep(3 * POLL_SECONDS)  # a process that failed says why, a killed one does not
                problem = f"a computation of all processes failed, maybe because one died: {str(error).splitlines()[0]}"
                raise (lost[0] if lost else RunError(f"{problem}\n{kept(config)}")) from error
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _run(config: Config, make_sampler: MakeSampler, peers: Peers, events: asyncio.Queue, began: float) -> dict[str, Any]:
    parts = build(config)
    folder = Path(config.out) / config.name
    with lock(folder):  # before anything is written there: a start that is refused must not change the run that goes on
        open_run(config)
        return await _run_in(folder, parts, make_sampler, peers, events, began)


async def _run_in(
    folder: Path, parts: Parts, make_sampler: MakeSampler, peers: Peers, events: asyncio.Queue, began: float
) -> dict[str, Any]:
    config = parts.config
    saved = max(saved_steps(folder / "checkpoints"), default=None)
    traces = read_traces(parts) if saved is None and config.sft is not None else []
    peers.send(Record(Action.START, -1 if saved is None else saved, detail=config.model_dump_json(exclude_none=True)))
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep, config.checkpoint.keep_best)
    journal = open_journal(folder / "journal")
    packer = Packer(config, parts.limits)
    trainer_thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
    on_trainer = _on(trainer_thread)
    first_weights: asyncio.Future[Weights] = asyncio.get_running_loop().create_future()
    # Servers take their time to start, so they do it while the weights are read and the step is compiled.
    making = asyncio.create_task(
        make_sampler(config, parts.architecture, parts.tokenizer, parts.eos_ids, folder, first_weights)
    )
    try:
        await asyncio.sleep(0)  # it says at once what of the config cannot work
        if making.done():
            await _made(making, config, lambda: False)
        warm = partial(_warm_start, parts, traces, folder, peers, lambda: not events.empty() or making.done())
        restoring = on_trainer(restore_or_start, parts, folder, checkpoints, saved, warm)
        state, host = await _unless_failed(making, restoring, config)
        step = int(state.step)
        frozen = await on_trainer(gather, state.frozen)
        first_weights.set_result((variables_of(await on_trainer(gather, state.trainable), frozen), step))
        del first_weights
        sampler = CheckedSampler(await _made(making, config, lambda: not events.empty()), step)
        runner = make_runner(parts, sampler, folder / "environment.log")
        try:
            await runner.start()
            cut_rollouts(folder / "rollouts", step)
            trackers = make_trackers(config.log, folder, -1 if host is None else step, config.pipeline.steps)
            try:
                shell = Shell(
                    parts,
                    folder,
                    peers,
                    state,
                    frozen,
                    host,
                    sampler,
                    runner,
                    packer,
                    checkpoints,
                    journal,
                    trackers,
                    on_trainer,
                    events,
                    began,
                )
                del state  # every step donates it
                return await shell.run()
            finally:
                trackers.close()
        finally:
            await runner.close()
            await sampler.close()
    finally:
        making.cancel()
        await asyncio.wait([making])  # what it started ends with it
        packer.close()
        trainer_thread.shutdown()
        journal.close()
        checkpoints.close()


async def _unless_failed(making: asyncio.Task[Sampler], work: Awaitable[Any], config: Config) -> Any:
    """What `work` gives; if meanwhile no sampler can be made, that is raised."""
    work = asyncio.ensure_future(work)
    await asyncio.wait((work, making), return_when=asyncio.FIRST_COMPLETED)
    if making.done():
        await asyncio.wait([work])  # a thread cannot be left
        await _made(making, config, lambda: False)
    return await work


async def _made(making: asyncio.Task[Sampler], config: Config, is_signalled: Callable[[], bool]) -> Sampler:
    while not making.done():
        if is_signalled():
            raise RunError(f"stopped by a signal while the sampler started\n{kept(config)}")
        await asyncio.wait([making], timeout=SIGNAL_SECONDS)
    try:
        return making.result()
    except SamplerError as error:
        raise RunError(f"{error}\n{kept(config)}") from error


def _on(thread: ThreadPoolExecutor) -> Callable[..., Awaitable[Any]]:
    async def call(function: Callable, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, function, *args)

    return call


def _warm_start(
    parts: Parts, traces: Sequence[Trajectory], folder: Path, peers: Peers, is_signalled: Callable[[], bool], state: TrainState
) -> TrainState:
    def log(step: int, metrics: Mapping[str, float]) -> None:
        if is_signalled():
            raise RunError(f"stopped by a signal at warm-start step {step}: the same command starts again")
        tracker.log(step, metrics)
        print(f"warm start {step}/{parts.config.sft.steps} · loss {metrics['loss']:.4f}", flush=True)

    cut(folder / "sft.jsonl", 0)
    tracker = JsonlTracker(folder / "sft.jsonl")
    try:
        return warm_start(parts, traces, state, peers, log)
    finally:
        tracker.close()
