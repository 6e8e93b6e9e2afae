"""The environment workers, seen from the trainer: who runs which episode, and what happens when one blocks or dies.

A worker that blocks is first left alone with the episode on its CPU: its other episodes start again on a fresh worker, where
the calls that were answered already get the same answers, and the ones still being generated go on: nothing is sampled
twice. If it goes on blocking it is killed, and that episode pays for it. Nothing here waits for a worker: frames are written
into a buffer and read as they come.
"""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.config import ConfigError, EnvConfig
from jaxrl.rollout.chat import Call, CallKey, LengthLimit
from jaxrl.rollout.protocol import Completion
from jaxrl.rollout.supervisor import BY_SIGNAL
from jaxrl.rollout.wire import NOBODY, Pulse, encode_frame, read_frame

WATCH_SECONDS = 0.1
# A step that does not await holds up every other episode of its worker: after some seconds these are worth a new start.
HELD_UP_SECONDS = 5.0
MOST_ALONE = 4  # workers that are left alone with an episode at once: each may keep a core busy
BLOCKED_SECONDS = 30.0  # half a minute is for the heaviest of checks
# The run ends when episodes of so many tasks blocked without any other coming to an end in between, or so many episodes if
# none ever came to one: one bad task, even with all its episodes, is no reason.
BLOCKED_TASKS = 8
BLOCKED_FROM_THE_START = 16
# A loop that does not turn although no episode is on the CPU (a thread that keeps the interpreter) stops for longer reasons.
SILENT_SECONDS = 60.0
STARTUP_SECONDS = 600.0  # to build the environment: large data sets take minutes
BLAMELESS_RESTARTS = 3  # of an episode whose worker died without saying whose fault it was
CLOSE_SECONDS = 3.0

BOOT = "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a.pop('path'); from jaxrl.rollout.supervisor import main; main(a)"
# Workers leave accelerators to the trainer, and cores to each other.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is built from. factory: "module:function" of the built-in environments, called with (env, seed)."""

    env: EnvConfig
    factory: str
    seed: int
    tokenizer: Path
    eos_ids: tuple[int, ...]
    limit: LengthLimit
    log: Path | None = None  # where the workers' own output goes; None: where the trainer's goes


@dataclass(eq=False)
class Job:
    """An episode in progress. `generate` samples; `calls` remembers each call's fingerprint and its (maybe unfinished) answer."""

    number: int
    task: Mapping[str, Any]
    max_tokens: int
    generate: Callable[[Call], Awaitable[Completion]]
    result: asyncio.Future[dict[str, Any]]
    calls: dict[CallKey, tuple[bytes, asyncio.Task[Completion]]] = field(default_factory=dict)
    restarts: int = 0  # without blame

    def answer(self, call: Call) -> asyncio.Task[Completion]:
        """What the sampler answers to a call: the recorded answer if the same was asked before."""
        asked = fingerprint(call)
        if call.key in self.calls:
            recorded, answer = self.calls[call.key]
            if recorded == asked:
                return answer
            answer.cancel()
        answer = asyncio.ensure_future(self.generate(call))
        self.calls[call.key] = asked, answer
        return answer

    def settle(self, result: dict[str, Any] | BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(result) if isinstance(result, BaseException) else self.result.set_result(result)


def fingerprint(call: Call) -> bytes:
    """Equal for calls that ask the same."""
    rest = json.dumps([call.max_tokens, call.stop]).encode()
    return hashlib.blake2b(array("i", call.prompt_ids).tobytes() + rest, digest_size=16).digest()


def _name(task: Mapping[str, Any]) -> str:
    """What tells a task row from others."""
    return json.dumps(task, sort_keys=True)


class _Process:
    """One worker process, below its supervisor, with its pipe and its pulse."""

    def __init__(self, settings: WorkerSettings):
        ours, theirs = socket.socketpair()
        self.pulse, pulse_fd = Pulse.create()
        arguments = {"path": sys.path, "socket": theirs.fileno(), "pulse": pulse_fd}
        output = open(settings.log, "ab") if settings.log else None
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(arguments)],
            pass_fds=(theirs.fileno(), pulse_fd),
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,  # nothing is written: it ends when this process does
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is the trainer's
        )
        theirs.close()
        os.close(pulse_fd)
        if output:
            output.close()
        self.socket = ours
        self.started = time.monotonic()
        self.jobs: dict[int, Job] = {}
        self.ready = False
        self.lost = False
        self.alone = False  # with one episode: it gets no other, and ends with it
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.reading: asyncio.Task | None = None

    def send(self, message: dict[str, Any]) -> None:
        if not self.lost:
            self.writer.write(encode_frame(message))

    def kill(self) -> int:
        """Ends it and what it started; returns its exit status."""
        self.lost = True
        self.writer.close()
        self.process.stdin.close()  # its supervisor kills it then
        try:
            return self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # something below it cannot be killed, at a disk say
            self.process.kill()
            return self.process.wait()


class Workers:
    """`settings.env.workers` processes. Use start(), run(), close() on one event loop."""

    def __init__(self, settings: WorkerSettings):
        self.settings = settings
        self.startup_seconds = 0.0  # of the slowest of the first workers
        self.num_killed = 0
        self._blocked_seconds = min(settings.env.timeout_seconds, BLOCKED_SECONDS)
        self._held_up_seconds = min(HELD_UP_SECONDS, self._blocked_seconds / 2)
        self._num_ended = 0  # episodes that did not block
        self._blocked: list[str] = []  # tasks of the episodes that blocked since the last one that did not
        self._suspects: set[str] = set()  # tasks that held others up: these start before them
        self._processes: list[_Process] = []
        self._tasks: set[asyncio.Task] = set()
        self._next_job = 0
        self._broken: BaseException | None = None
        self._all_ready = asyncio.Event()
        self._closed = False

    async def start(self) -> None:
        """Returns when every worker has built its environment. Raises ConfigError if one cannot."""
        for _ in range(self.settings.env.workers):
            await self._spawn()
        self._keep(self._watch())
        await self._all_ready.wait()
        if self._broken:
            await self.close()
            raise self._broken

    async def run(
        self, task: Mapping[str, Any], max_tokens: int, generate: Callable[[Call], Awaitable[Completion]]
    ) -> tuple[Job, dict[str, Any]]:
        """Runs one episode to its end, whatever that is: a "done" message of worker.py, with `kind` and `error` if it
        failed. Raises what `generate` raises, and ConfigError if the environment cannot be built any more."""
        if self._broken:
            raise self._broken
        job = Job(self._next_job, task, max_tokens, generate, asyncio.get_running_loop().create_future())
        self._next_job += 1
        self._assign(job, self._least_busy())
        try:
            return job, await job.result
        finally:
            for p in list(self._processes):
                if p.jobs.pop(job.number, None):  # it is not over there
                    p.send({"type": "cancel", "job": job.number})
                    self._dismiss(p)
            for _, answer in job.calls.values():
                answer.cancel()

    async def close(self) -> None:
        """Ends the workers: hangs up, and kills those that do not leave."""
        self._closed = True
        for process in self._processes:
            process.writer.write_eof()
        if self._processes:
            await asyncio.wait([process.reading for process in self._processes], timeout=CLOSE_SECONDS)
        for process in self._processes:
            process.kill()
        self._processes.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _spawn(self) -> _Process:
        process = _Process(self.settings)
        process.reader, process.writer = await asyncio.open_unix_connection(sock=process.socket)
        self._processes.append(process)
        s = self.settings
        process.send(
            {
                "env": s.env.model_dump(mode="json"),
                "factory": s.factory,
                "seed": s.seed,
                "tokenizer": str(s.tokenizer),
                "eos_ids": s.eos_ids,
                "limit": asdict(s.limit),
            }
        )
        process.reading = self._keep(self._read(process))
        return process

    def _keep(self, coroutine: Coroutine) -> asyncio.Task:
        """Runs until close(). If it raises, the workers are of no more use, and every episode says so."""

        def ended(task: asyncio.Task) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception():
                self._break(task.exception())

        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(ended)
        return task

    def _least_busy(self) -> _Process:
        return min((p for p in self._processes if not p.alone), key=lambda p: len(p.jobs))

    def _assign(self, job: Job, process: _Process) -> None:
        try:
            process.send({"type": "start", "job": job.number, "task": job.task, "max_tokens": job.max_tokens})
        except (TypeError, ValueError) as error:
            job.settle(ConfigError("env.name", f"a task row of {self.settings.env.name} is not JSON: {error}"))
            return
        process.jobs[job.number] = job

    async def _read(self, process: _Process) -> None:
        while (message := await read_frame(process.reader)) is not None:
            if process.lost:
                return
            match message["type"]:
                case "ready":
                    process.ready = True
                    self.startup_seconds = max(self.startup_seconds, time.monotonic() - process.started)
                    if all(p.ready for p in self._processes):
                        self._all_ready.set()
                case "broken":
                    self._break(ConfigError(message["key"], message["error"]))
                case "call":
                    job = process.jobs.get(message["job"])
                    if job is not None:
                        self._keep(self._answer(process, job, message))
                case "done":
                    job = process.jobs.pop(message["job"], None)
                    if job is not None:
                        self._num_ended += 1
                        self._blocked.clear()
                        job.settle(message)
                        self._dismiss(process)
        if not process.lost and not self._closed:
            await self._lose(process, process.pulse.read().job, "raised", "its worker process died")

    async def _answer(self, process: _Process, job: Job, message: dict[str, Any]) -> None:
        path, number = message["key"]
        call = Call((tuple(path), number), message["prompt_ids"], message["max_tokens"], tuple(message["stop"]))
        try:
            completion = await asyncio.shield(job.answer(call))
        except asyncio.CancelledError:
            return
        except Exception as error:  # the sampler's: the run cannot go on
            job.settle(error)
            return
        ids = [int(i) for i in completion.tokens.ids]
        process.send(
            {"type": "answer", "job": job.number, "key": [path, number], "ids": ids, "finish_reason": completion.finish_reason}
        )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            for process in list(self._processes):
                if process.lost:
                    continue
                beat = process.pulse.read()
                if not process.ready:
                    if now - process.started > STARTUP_SECONDS:
                        self._break(
                            ConfigError("env.name", f"{self.settings.env.name} was not ready after {STARTUP_SECONDS:g} s")
                        )
                elif beat.job != NOBODY and now - beat.since > self._blocked_seconds:
                    await self._lose(
                        process,
                        beat.job,
                        "hung",
                        f"blocked its worker for {self._blocked_seconds:g} s without awaiting: long computations belong into asyncio.to_thread or a subprocess",
                    )
                elif beat.job != NOBODY and now - beat.since > self._held_up_seconds:
                    await self._leave_alone(process, beat.job)
                elif beat.job == NOBODY and now - beat.alive > SILENT_SECONDS:
                    await self._lose(process, NOBODY, "hung", f"its worker was silent for {SILENT_SECONDS:g} s")

    async def _leave_alone(self, process: _Process, number: int) -> None:
        """Moves the episodes that `number` holds up to a fresh worker."""
        if process.alone or len(process.jobs) < 2 or sum(p.alone for p in self._processes) >= MOST_ALONE:
            return
        fresh = await self._spawn()
        if process.lost:  # it died meanwhile, and its episodes are elsewhere
            return
        process.alone = True
        held_up = [job for job in process.jobs.values() if job.number != number]
        process.jobs = {n: job for n, job in process.jobs.items() if n == number}
        self._suspects |= {_name(job.task) for job in process.jobs.values()}
        for job in held_up:
            process.send({"type": "cancel", "job": job.number})  # should it come back to them
        self._start_again(held_up, fresh)
        self._dismiss(process)  # if what is on the CPU is no episode in progress

    def _start_again(self, jobs: Iterable[Job], process: _Process) -> None:
        """Suspects come last: others may be done before these block again."""
        for job in sorted(jobs, key=lambda job: _name(job.task) in self._suspects):
            if self._broken:
                job.settle(self._broken)
            elif not job.result.done():
                self._assign(job, process)

    def _dismiss(self, process: _Process) -> None:
        """Ends a worker that was left alone with an episode, when that is over."""
        if process.alone and not process.jobs and not process.lost:
            self._processes.remove(process)
            process.kill()

    def _charge(self, job: Job, kind: str, error: str) -> None:
        """Fails an episode, and the run if nothing but blocking ones is left of it."""
        job.settle({"kind": kind, "error": error})
        if kind != "hung":
            return
        self._suspects.add(_name(job.task))
        self._blocked.append(_name(job.task))
        if len(set(self._blocked)) >= BLOCKED_TASKS or (not self._num_ended and len(self._blocked) >= BLOCKED_FROM_THE_START):
            name = self.settings.env.name
            self._break(
                ConfigError(
                    "env.name", f"the last {len(self._blocked)} episodes of {name} failed and no other ended; each {error}"
                )
            )

    async def _lose(self, process: _Process, guilty: int, kind: str, error: str) -> None:
        """Ends a worker, charges the guilty episode, and starts the others again on a fresh one."""
        process.lost = True  # what is assigned to it meanwhile moves with the rest
        self.num_killed += 1
        fresh = await self._spawn() if process.ready and not process.alone else None
        status = process.kill()
        self._processes.remove(process)
        if kind == "raised":
            error = f"{error} ({signal.Signals(status - BY_SIGNAL).name if status > BY_SIGNAL else f'exit status {status}'})"
        if not process.ready:
            self._break(ConfigError("env.name", f"a worker of {self.settings.env.name} ended while it started: {error}"))
            return
        jobs, process.jobs = process.jobs, {}
        if guilty in jobs:
            self._charge(jobs.pop(guilty), kind, error)
        for job in jobs.values():
            if guilty == NOBODY:
                job.restarts += 1
            if job.restarts > BLAMELESS_RESTARTS:
                self._charge(job, kind, f"{error}, {job.restarts} times in a row")
        self._start_again(jobs.values(), fresh or self._least_busy())

    def _break(self, error: BaseException) -> None:
        self._broken = self._broken or error  # the first is the cause
        self._all_ready.set()
        for process in self._processes:
            for job in process.jobs.values():
                job.settle(self._broken)
