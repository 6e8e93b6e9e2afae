"""The embedded sampler: the engine on a thread of its own, behind the sampler protocol.

The thread owns every device call. Commands reach it through a queue; results go back to each caller's event loop with
call_soon_threadsafe, so the asyncio side never waits on a device. If the engine fails, every waiting and later call raises
SamplerError.
"""

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from jaxrl.config import LoraConfig, SamplerConfig
from jaxrl.engine.core import Emission, Engine, Request
from jaxrl.models.architecture import Architecture
from jaxrl.rollout.protocol import Completion, PublishReport, SamplerError, SamplerLoad, SamplingParams, join


class _Reply:
    """A future of an event loop, to be resolved from the engine's thread."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future = self._loop.create_future()

    def set(self, value: Any = None, error: Exception | None = None) -> None:
        def resolve():
            if not self.future.done():
                self.future.set_exception(error) if error else self.future.set_result(value)

        _call(self._loop, resolve)


class _Sink:
    """Where a request's tokens go: a queue of its event loop."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[Emission | SamplerError] = asyncio.Queue()


@dataclass(frozen=True)
class _Submit:
    request: Request


@dataclass(frozen=True)
class _Cancel:
    request: Request


@dataclass(frozen=True)
class _Publish:
    weights: Any
    version: int
    in_flight: bool
    reply: _Reply
    began: float


class _Close:
    pass


class EmbeddedSampler:
    """Generates with a JAX model in this process.

    weights: variables of the decoder, stacked or unrolled, with or without "lora"; copied. tokenizer_decode: token ids to
    text, needed for stop strings only. eos_token_ids end every generation.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Any,
        version: int,
        config: SamplerConfig,
        tokenizer_decode: Callable[[list[int]], str] | None = None,
        eos_token_ids: tuple[int, ...] = (),
        lora: LoraConfig | None = None,
    ):
        self._engine = Engine(architecture, weights, version, config, tokenizer_decode, eos_token_ids, lora)
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._requests: set[Request] = set()  # submitted and not finished; the engine's thread alone touches it
        self._publishes: list[_Publish] = []  # waiting until none is running, in order
        self._failure: SamplerError | None = None
        self._failing = threading.Lock()  # between reading _failure and putting into the inbox, or setting and emptying
        self._thread = threading.Thread(target=self._run, name="embedded-sampler", daemon=True)
        self._thread.start()

    # The protocol, on the caller's event loop

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> AsyncIterator[Completion]:
        sink = _Sink()
        request = self._engine.make_request(prompt_ids, params, priority, sink)
        self._send(_Submit(request))
        is_over = False
        try:
            while not is_over:
                item = await sink.items.get()
                is_over = isinstance(item, SamplerError) or item.finish_reason is not None
                if isinstance(item, SamplerError):
                    raise item
                yield Completion(item.tokens, item.finish_reason)
        finally:
            if not is_over:
                self._inbox.put(_Cancel(request))

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> Completion:
        async with aclosing(self.stream(prompt_ids, params, priority)) as stream:
            parts = [part async for part in stream]
        return Completion(join([part.tokens for part in parts]), parts[-1].finish_reason)

    async def publish(self, weights: Any, version: int, in_flight: bool) -> PublishReport:
        """As the protocol has it. Raises SamplerError naming a tensor that does not fit; the old weights then stay."""
        reply = _Reply()
        self._send(_Publish(weights, version, in_flight, reply, time.monotonic()))
        return await reply.future

    def load(self) -> SamplerLoad:
        engine = self._engine
        num_waiting = engine.num_waiting + self._inbox.qsize()
        return SamplerLoad(engine.num_running, num_waiting, engine.kv_use, engine.tokens_per_second)

    async def close(self) -> None:
        """Stops the engine; whatever still waits for it raises SamplerError."""
        self._inbox.put(_Close())
        await asyncio.to_thread(self._thread.join)

    def _send(self, command: Any) -> None:
        with self._failing:
            if self._failure is not None:
                raise SamplerError(str(self._failure)) from self._failure
            self._inbox.put(command)

    # The engine's thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._finish_publishes()
                if self._engine.can_work:
                    self._deliver(self._engine.step())
            failure = SamplerError("the sampler was closed")
        except Exception as error:  # the thread's last line: whatever happened must reach those who wait
            failure = SamplerError(f"the embedded sampler failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._fail(failure)

    def _take_commands(self) -> bool:
        """Handles what is in the inbox, waiting for a command if there is nothing to compute. False: close."""
        is_idle = not self._engine.can_work and not self._publishes
        while is_idle or not self._inbox.empty():
            command = self._inbox.get()
            is_idle = False
            match command:
                case _Submit(request):
                    self._requests.add(request)
                    self._engine.submit(request)
                case _Cancel(request):
                    if request in self._requests:
                        self._requests.discard(request)
                        self._engine.cancel(request)
                case _Publish():
                    self._publishes.append(command)
                case _Close():
                    return False
        return True

    def _finish_publishes(self) -> None:
        """Carries out publishes in order. One that is not in flight holds new requests back until none is running."""
        while self._publishes and (self._publishes[0].in_flight or self._engine.num_running == 0):
            publish = self._publishes.pop(0)
            try:
                num_bytes, num_continued = self._engine.publish(publish.weights, publish.version)
            except SamplerError as error:  # refused before anything changed
                publish.reply.set(error=error)
            else:
                seconds = time.monotonic() - publish.began
                publish.reply.set(PublishReport(publish.version, num_bytes, seconds, num_continued))
        self._engine.hold = bool(self._publishes)

    def _deliver(self, emissions: list[Emission]) -> None:
        by_loop = defaultdict(list)
        for emission in emissions:
            if emission.finish_reason is not None:
                self._requests.discard(emission.request)
            by_loop[emission.request.sink.loop].append(emission)
        for loop, items in by_loop.items():

            def put(items=items):
                for item in items:
                    item.request.sink.items.put_nowait(item)

            if not _call(loop, put):
                for item in items:
                    if item.finish_reason is None:
                        self._requests.discard(item.request)
                        self._engine.cancel(item.request)

    def _fail(self, failure: SamplerError) -> None:
        with self._failing:
            self._failure = failure
            while not self._inbox.empty():
                match self._inbox.get():
                    case _Submit(request):
                        self._requests.add(request)
                    case _Publish() as publish:
                        self._publishes.append(publish)
        for publish in self._publishes:
            publish.reply.set(error=failure)
        for request in self._requests:
            _call(request.sink.loop, lambda sink=request.sink: sink.items.put_nowait(failure))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> bool:
    """Runs function on an event loop. False if the loop is closed: nobody waits there any more."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True
