"""An environment worker: one process, one event loop, many episodes.

It renders, encodes and runs the environment; the trainer samples. Every step of an episode's tasks is bracketed by the pulse.
An episode's clock stops while the policy answers and while other episodes hold the CPU: what it measures is the
environment's own time.
"""

import asyncio
import contextvars
import json
import math
import os
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from jaxrl.config import ConfigError, EnvConfig
from jaxrl.rollout.chat import Answer, Book, Call, CallKey, Conversation, LengthLimit, PromptTooLong
from jaxrl.rollout.environment import Environment, Outcome
from jaxrl.rollout.loading import load_environment
from jaxrl.rollout.tokenizer import Tokenizer, load_tokenizer
from jaxrl.rollout.wire import Pulse, encode_frame, read_frame

TICK_SECONDS = 0.1  # how often clocks are read and the pulse beats
THREADS = 256  # for asyncio.to_thread: one that hangs is lost until the worker ends, so there must be many
CLOSE_SECONDS = 2.0  # what an environment gets to clean up at the end

ON_CPU: contextvars.ContextVar["Job | None"] = contextvars.ContextVar("ON_CPU", default=None)


class Job:
    """An episode on this worker."""

    def __init__(self, number: int):
        self.number = number
        self.task: asyncio.Task | None = None
        self.finished = False
        self.answers: dict[CallKey, asyncio.Future[Answer]] = {}  # calls the policy has not answered
        self.on_cpu_ns = 0  # since the last tick
        self.used_seconds = 0.0


class Worker:
    """The episodes of this process. Messages in: start, answer, cancel; out: call and done, once for every start."""

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        pulse: Pulse,
        environment: Environment,
        tokenizer: Tokenizer,
        settings: dict[str, Any],
    ):
        self.writer = writer
        self.pulse = pulse
        self.environment = environment
        self.tokenizer = tokenizer
        self.timeout_seconds = settings["env"]["timeout_seconds"]
        self.limit = LengthLimit(**settings["limit"])
        self.eos_ids = frozenset(settings["eos_ids"])
        self.jobs: dict[int, Job] = {}
        self.dying: set[asyncio.Task] = set()  # told to end, not ended yet

    def start(self, message: dict[str, Any]) -> None:
        job = self.jobs[message["job"]] = Job(message["job"])
        context = contextvars.copy_context()
        context.run(ON_CPU.set, job)
        job.task = asyncio.get_running_loop().create_task(self._episode(job, message), context=context)

    def answer(self, message: dict[str, Any]) -> None:
        job = self.jobs.get(message["job"])
        future = job.answers.get(_key(message["key"])) if job else None
        if future is not None and not future.done():
            future.set_result(Answer(message["ids"], message["finish_reason"]))

    def cancel(self, number: int) -> None:
        if job := self.jobs.get(number):
            self._end(job)

    def tick(self, seconds: float) -> None:
        """`seconds` since the last tick. An episode has used what it was not waiting for: neither for the policy nor for
        the CPU that others held."""
        self.pulse.alive()
        jobs = list(self.jobs.values())
        busy = sum(job.on_cpu_ns for job in jobs) / 1e9
        for job in jobs:
            own = job.on_cpu_ns / 1e9
            job.on_cpu_ns = 0
            job.used_seconds += own if job.answers else max(own, seconds - (busy - own))
            if job.used_seconds > self.timeout_seconds:
                self._finish(
                    job, failure("timeout", f"took more than env.timeout_seconds = {self.timeout_seconds:g} of its own time")
                )
        self.dying = {task for task in self.dying if not task.done()}
        for task in self.dying:
            task.cancel()  # again, for those that swallow it

    async def _episode(self, job: Job, message: dict[str, Any]) -> None:
        book = Book(self.tokenizer, lambda call: self._generate(job, call), self.limit, message["max_tokens"], self.eos_ids)
        chat = Conversation(book)
        try:
            result = success(await self.environment.rollout(message["task"], chat))
        except asyncio.CancelledError:
            result = failure("raised", "CancelledError: something in the rollout cancelled it")
        except PromptTooLong as error:
            result = failure("too_long", str(error))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            result = failure("raised", f"{type(error).__name__}: {error}{_where(error)}")
        self._finish(job, {**result, **story(book, chat)})

    async def _generate(self, job: Job, call: Call) -> Answer:
        if job.finished:
            raise RuntimeError("this episode is over: its chats take no more calls")
        future = job.answers[call.key] = asyncio.get_running_loop().create_future()
        self._send({"type": "call", "job": job.number, **asdict(call)})
        try:
            return await future
        finally:
            del job.answers[call.key]

    def _finish(self, job: Job, message: dict[str, Any]) -> None:
        if not job.finished:
            self._send({"type": "done", "job": job.number, **message})
            self._end(job)

    def _end(self, job: Job) -> None:
        job.finished = True
        del self.jobs[job.number]
        if job.task is not asyncio.current_task():
            job.task.cancel()
            self.dying.add(job.task)

    def _send(self, message: dict[str, Any]) -> None:
        self.writer.write(encode_frame(message))


def failure(kind: str, error: str) -> dict[str, Any]:
    return {"kind": kind, "error": error}


def _where(error: BaseException) -> str:
    """The innermost line outside this package that raised; nothing for a returned value that is no reward."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if os.path.dirname(f.filename) != os.path.dirname(__file__)]
    return f" ({outside[-1].filename}, line {outside[-1].lineno})" if outside else ""


def success(result: Any) -> dict[str, Any]:
    """What a rollout returned. Raises TypeError or ValueError if it is no reward."""
    outcome = result if isinstance(result, Outcome) else Outcome(_number("reward", result))
    return {
        "reward": _number("reward", outcome.reward),
        "step_rewards": [_number("step reward", r) for r in outcome.step_rewards],
        "metrics": {str(name): _number(f"metric {name!r}", value) for name, value in outcome.metrics.items()},
    }


def _number(what: str, value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"the {what} is {value!r}: a rollout returns a number or an Outcome of numbers")
    if not math.isfinite(value):
        raise ValueError(f"the {what} is {float(value)}: rewards and metrics are finite")
    return float(value)


def story(book: Book, chat: Conversation) -> dict[str, Any]:
    """The lines that sampled something, what their pieces are, and the transcript."""
    lines = []
    for line in book.lines:
        pieces = [
            {"ids": piece.ids}
            if piece.call is None
            else {"call": piece.call, "num_tokens": len(piece.ids), "inherited": i < line.inherited}
            for i, piece in enumerate(line.pieces)
        ]
        if len(pieces) > line.inherited:
            lines.append(pieces)
    counts = {"num_calls": book.num_calls, "num_rewrites": book.num_rewrites, "num_truncated": book.num_truncated}
    return {"lines": lines, "messages": json.loads(json.dumps(_transcript(chat, 0), default=str)), **counts}


def _transcript(chat: Conversation, depth: int) -> list[dict[str, Any]]:
    own = [*chat.messages[chat.num_inherited_messages :], *chat.plain]
    mine = [{**message, "fork": depth} if depth else message for message in own]
    return mine + [message for fork in chat.forks for message in _transcript(fork, depth + 1)]


def _key(path_and_number: list) -> CallKey:
    path, number = path_and_number
    return tuple(path), number


@types.coroutine
def bracketed(coroutine: Coroutine, job: Job, pulse: Pulse):
    """Runs a coroutine; around every step the pulse says that `job` is on the CPU."""
    resume, value = coroutine.send, None
    while True:
        began = pulse.enter(job.number)
        try:
            awaited = resume(value)
        except StopIteration as stop:
            return stop.value
        except (SystemExit, KeyboardInterrupt) as error:  # of a task the rollout started: these would end the worker
            raise RuntimeError(f"{type(error).__name__}({error}) in a rollout") from error
        finally:
            job.on_cpu_ns += pulse.leave() - began
        try:
            resume, value = coroutine.send, (yield awaited)
        except BaseException as error:
            resume, value = coroutine.throw, error


def task_factory(pulse: Pulse):
    """Tasks of an episode, and tasks that these start, run bracketed."""

    async def run(coroutine: Coroutine, job: Job) -> Any:
        return await bracketed(coroutine, job, pulse)

    def factory(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine, context: contextvars.Context | None = None, **kwargs
    ) -> asyncio.Task:
        job = ON_CPU.get() if context is None else context.get(ON_CPU)
        if job is not None:
            coroutine = run(coroutine, job)
        return asyncio.Task(coroutine, loop=loop, context=context, **kwargs)

    return factory


async def serve(connection: socket.socket, pulse: Pulse, started: float) -> None:
    """Builds what the first message describes, says so, and works until the trainer hangs up."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    settings = await read_frame(reader)
    if settings is None:
        return
    try:
        environment = load_environment(EnvConfig(**settings["env"]), settings["factory"], settings["seed"])
        worker = Worker(writer, pulse, environment, load_tokenizer(settings["tokenizer"]), settings)
    except Exception as error:
        key = error.key if isinstance(error, ConfigError) else "env.name"
        text = str(error).removeprefix(f"config key `{key}`: ") if isinstance(error, ConfigError) else traceback.format_exc()
        writer.write(encode_frame({"type": "broken", "key": key, "error": text}))
        await writer.drain()
        return
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    loop.set_task_factory(task_factory(pulse))
    writer.write(encode_frame({"type": "ready", "seconds": time.monotonic() - started}))
    beat = loop.create_task(_beat(worker))
    while (message := await read_frame(reader)) is not None:
        match message["type"]:
            case "start":
                worker.start(message)
            case "answer":
                worker.answer(message)
            case "cancel":
                worker.cancel(message["job"])
    beat.cancel()
    for job in list(worker.jobs.values()):
        worker.cancel(job.number)
    if worker.dying:
        await asyncio.wait(worker.dying, timeout=CLOSE_SECONDS)


async def _beat(worker: Worker) -> None:
    last = time.monotonic()
    while True:
        await asyncio.sleep(TICK_SECONDS)
        now = time.monotonic()
        worker.tick(now - last)
        last = now


def main(arguments: dict[str, Any]) -> None:
    """Entry point of the process. arguments: socket and pulse (file descriptors)."""
    started = time.monotonic()
    for descriptor in (arguments["socket"], arguments["pulse"]):
        os.set_inheritable(descriptor, False)  # tools that outlive this process must not hold its pipe open
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop
    asyncio.run(_serve_and_exit(arguments, started))


async def _serve_and_exit(arguments: dict[str, Any], started: float) -> None:
    """Leaves without waiting for threads and tasks that hang."""
    status = 1
    try:
        await serve(socket.socket(fileno=arguments["socket"]), Pulse(arguments["pulse"]), started)
        status = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
