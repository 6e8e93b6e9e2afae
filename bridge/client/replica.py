"""The life of one server: up, given the newest weights before anything else, watched, and brought back after whatever happens.

    down ── start or attach ──> up ── publish ──> serving ── a new version ──> publish, …
      └──────────── back-off <── dead, silent or failing ──┘

One task, `keep`, goes round this circle. A death, a publish that failed and a server that lost its weights are the same to it:
what is missing is made good, in order, with a pause that doubles and a limit to failures in a row.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from bridge.client import process
from bridge.client.api import ServerApi
from bridge.client.errors import BadRequest, EngineDead, Mismatch, ServerError, TimedOut, Unauthorised, Unreachable
from bridge.client.process import Launch
from bridge.client.routing import PrefixMemory, ReplicaState, Status
from jaxrl.rollout.protocol import PublishReport, SamplerError, SamplingParams

log = logging.getLogger(__name__)

PROTOCOL = 1  # of docs/bridge.md
POLL_SECONDS = 0.25  # between two looks at a server's state
ANSWER_SECONDS = 10.0  # which such a look may take
SILENT_SECONDS, SILENT_LOOKS = 30.0, 3  # without an answer to so many: it hangs
FAILURES = 5  # in a row, after which a server is given up
STABLE_SECONDS = 60.0  # of service, after which earlier failures are forgotten
BACK_OFF_SECONDS, LONGEST_BACK_OFF = 1.0, 30.0
LEAVE_SECONDS = 1.0  # what generations get to leave, and a process to be seen dead, before connections are closed
FAILED_ANSWERS = 3  # generations in a row that it failed, though its state was well each time: it is sick
IN_VAIN = (Mismatch, Unauthorised)  # answers that stay the same however often one asks


@dataclass(frozen=True)
class Attached:
    """A server that somebody else runs."""

    url: str
    key: str = field(repr=False)


@dataclass(frozen=True)
class Target:
    """What every server shall serve. weights: not written to any more, kept for servers that start later."""

    weights: Any
    version: int
    in_flight: bool


class Link(Protocol):
    """How weights reach one server; opened when it is up, closed when it is gone."""

    async def publish(self, weights: Any, version: int, *, in_flight: bool, force: bool) -> PublishReport:
        """Makes it serve the weights. force: whatever it serves now, even a higher version or a half of one. Raises
        SamplerError; cancelling it gives the publish up."""

    def close(self) -> None: ...


OpenLink = Callable[[ServerApi, dict[str, Any]], Link]  # (the server's routes, its state)


class Moved(Exception):
    """A generation has to go on elsewhere, through no fault of its server's answer."""


class Replica:
    """where: how the server is started, or which one it is. open_link: see Link. rolling: bounds how many serving replicas
    are published to at once. changed: called whenever what is asked of this object may have another answer."""

    def __init__(self, where: Launch | Attached, open_link: OpenLink, rolling: asyncio.Semaphore, changed: Callable[[], None]):
        self.where, self.open_link, self.rolling, self.changed = where, open_link, rolling, changed
        self.name = where.url if isinstance(where, Attached) else f"of {where.log.name}"
        self.status = Status.DOWN
        self.version = -1  # of the weights that it acknowledged
        self.memory = PrefixMemory()
        self.answer: dict[str, Any] = {}  # its state when last heard of
        self.num_open = 0  # generations of ours there
        self.num_starts = 0
        self.failure: SamplerError | None = None  # why it is given up
        self.is_gone = False  # for good: nothing looks after it any more
        self.missed: int | None = None  # the version that it did not take when that was published
        self.report: PublishReport | None = None
        self.target: Target | None = None
        self.is_draining = False
        self.api: ServerApi | None = None
        self._server: process.Server | None = None
        self._link: Link | None = None
        self._lost: asyncio.Future[SamplerError] | None = None
        self._monitors: list[asyncio.Task] = []
        self._limits: set[asyncio.Timeout] = set()  # of reads that must end when the generations are to go
        self._epoch = 0  # counts how often its generations were given away
        self._failures = 0  # in a row
        self._wake = asyncio.Event()
        self._suspected = False
        self._failed_answers = 0
        self._others = 0  # requests there that are not ours
        self._paused_since: float | None = None
        self._published_at = 0.0

    # What is known of it

    def state(self) -> ReplicaState:
        status = self.status
        if self.is_draining and status in (Status.SERVING, Status.PUBLISHING):
            status = Status.DRAINING
        if self._suspected and status in (Status.SERVING, Status.PUBLISHING):
            status = Status.DOWN
        paused = 0.0 if self._paused_since is None else time.monotonic() - self._paused_since
        return ReplicaState(status, self.version, self.num_open + self._others, paused)

    # What is asked of it

    def aim(self, target: Target) -> None:
        """From now on it shall serve `target`. One that is not up, or behind already, counts as having missed it: it gets there
        in its own time."""
        is_behind = self.target is not None and self.version != self.target.version
        self.missed = target.version if self.status is Status.DOWN or is_behind else None
        self.target = target
        if not self.is_gone:
            self.failure, self._failures = None, 0
        self._wake.set()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int) -> AsyncIterator[dict[str, Any]]:
        """Lines of ServerApi.generate. Raises its errors, and Moved when this replica gives its generations away."""
        self.num_open += 1
        epoch = self._epoch
        try:
            async with aclosing(self.api.generate(uuid.uuid4().hex, prompt_ids, params, priority)) as lines:
                while (line := await self._next(lines, epoch)) is not None:
                    self._failed_answers = 0
                    yield line
        except ServerError as error:
            if not isinstance(error, BadRequest):
                self._failed_answers += not (self._suspected or isinstance(error, Unreachable))
                self._suspect(error)
            raise
        finally:
            self.num_open -= 1
            self._wake.set()

    async def _next(self, lines: AsyncIterator[dict[str, Any]], epoch: int) -> dict[str, Any] | None:
        if epoch != self._epoch:
            raise Moved
        try:
            async with asyncio.timeout(None) as limit:  # `give_away` brings it forward; cheaper than a task for each line
                self._limits.add(limit)
                return await anext(lines, None)
        except TimeoutError:
            raise Moved from None
        finally:
            self._limits.discard(limit)

    def give_away(self) -> None:
        """Its generations end here, with Moved."""
        self._epoch += 1
        limits, self._limits = self._limits, set()
        for limit in limits:
            limit.reschedule(asyncio.get_running_loop().time())

    def distrust(self, error: SamplerError) -> None:
        """It sent what it should not have: it gets its weights again before anything else."""
        if self.version >= 0:
            log.warning("%s", error)
        self.version = -1
        self._wake.set()
        self.changed()

    # Its life

    async def come_up(self) -> None:
        """Starts it, or attaches to it. Raises SamplerError."""
        self.num_starts += 1
        if isinstance(self.where, Attached):
            self.api = ServerApi(self.where.url, self.where.key)
        else:
            self._server = await process.start(self.where)
            self.api = self._server.api
        self.answer = await self.api.state()
        check_state(self.api.url, self.answer)
        self.name = self.api.url
        self._link = self.open_link(self.api, self.answer)
        self._lost = asyncio.get_running_loop().create_future()
        self._suspected, self._failed_answers, self._paused_since, self._others = False, 0, None, 0
        watches = [self._poll()] + ([] if self._server is None else [self._server.ended()])
        self._monitors = [asyncio.create_task(watch) for watch in watches]
        for monitor in self._monitors:
            monitor.add_done_callback(self._lose)

    async def keep(self) -> None:
        """Until cancelled, or given up for good: a server of our own that does not stay up."""
        while True:
            serving_since = None
            try:
                if self.api is None:
                    await self.come_up()
                if self.target is not None and self.version != self.target.version:
                    await self._or_lost(self._publish(self.target))
                self.failure = None
                self._set(Status.SERVING)
                serving_since = time.monotonic()
                await self._or_lost(self._until_needed())
                self._failures = 0
            except SamplerError as error:
                if serving_since is not None and time.monotonic() - serving_since > STABLE_SECONDS:
                    self._failures = 0
                await self._clear_up_after(error)
                if self.failure is not None and self.api is None and isinstance(self.where, Launch):
                    self.is_gone = True
                    return
                await self._back_off()

    async def go_down(self, at_once: bool = False) -> None:
        """Ends what was started; its generations end with Moved or Unreachable."""
        self._set(Status.DOWN)
        self.version, self.answer = -1, {}
        self.give_away()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._until_idle()
        for monitor in self._monitors:
            monitor.cancel()
        api, self.api, self._lost = self.api, None, None
        if self._server is not None:  # forgotten only when it has ended, for this may be cancelled and called again
            await (self._server.kill() if at_once else self._server.stop())
            self._server = None
        elif api is not None:
            await api.close()
        if self._link is not None:
            await asyncio.to_thread(self._link.close)
            self._link = None

    async def _publish(self, target: Target) -> None:
        async with contextlib.AsyncExitStack() as held:
            if self.version >= 0:  # one that serves nothing may be published to at any time
                await held.enter_async_context(self.rolling)
            if not target.in_flight:
                self._set(Status.DRAINING)
                await self._until_idle()
            while self._suspected:
                await self._news()
            self._set(Status.PUBLISHING)
            force = self.version < 0 and (self.answer["version"] >= target.version or bool(self.answer["quarantined"]))
            report = await self._link.publish(target.weights, target.version, in_flight=target.in_flight, force=force)
        self._published_at, self._paused_since = time.monotonic(), None
        self.version, self.report, self.missed = target.version, report, None
        self._set(Status.SERVING)  # in the same moment: whoever waits for the version finds it open

    async def _until_needed(self) -> None:
        """Returns when there is another version to serve."""
        while self.target is None or self.version == self.target.version:
            await self._news()

    async def _until_idle(self) -> None:
        while self.num_open:
            await self._news()

    async def _news(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    async def _back_off(self) -> None:
        """A pause that doubles with every failure; a new target ends it."""
        target = self.target
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(LONGEST_BACK_OFF, BACK_OFF_SECONDS * 2 ** (self._failures - 1))):
                while self.target is target:
                    await self._news()

    async def _or_lost(self, work: Awaitable[None]) -> None:
        """Does the work, unless the server is lost meanwhile: raises how."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._lost.result()
            await task
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _clear_up_after(self, error: SamplerError) -> None:
        self._failures += 1
        if self.target is not None and self.version != self.target.version:
            self.missed = self.target.version
        if self._lost is not None and self._server is not None:  # a connection breaks a moment before its process has ended
            await asyncio.wait((self._lost,), timeout=LEAVE_SECONDS if isinstance(error, Unreachable | EngineDead) else 0)
        if self._lost is not None and self._lost.done():
            error = self._lost.result()
        log.warning("%s", error)
        if self._lost is None or self._lost.done() or isinstance(error, EngineDead):
            await self.go_down(at_once=True)
        else:
            await self._look()
        if self._failures >= FAILURES:
            self.failure = SamplerError(f"{error}\n(given up after {FAILURES} failures in a row)")
        elif isinstance(error, IN_VAIN):
            self.failure = error
        self.changed()

    async def _look(self) -> None:
        """What a publish that failed has left: the old weights, or quarantine."""
        try:
            self.answer = await asyncio.wait_for(self.api.state(), ANSWER_SECONDS)
        except (SamplerError, TimeoutError):
            return self._set(Status.DOWN)  # `_poll` decides what becomes of it
        if self.answer["quarantined"] or self.answer["version"] != self.version:
            self.version = -1
            self._set(Status.QUARANTINED)
            self.give_away()
        else:
            self._set(Status.SERVING)

    def _set(self, status: Status) -> None:
        self.status = status
        self.changed()

    # Watching it

    async def _poll(self) -> SamplerError:
        """Asks for its state, until it is lost; returns how."""
        heard, unanswered = time.monotonic(), 0
        while True:
            asked = time.monotonic()
            try:
                answer = await asyncio.wait_for(self.api.state(), ANSWER_SECONDS)
            except (EngineDead, Unauthorised) as error:
                return error
            except (SamplerError, TimeoutError) as error:
                self._suspect(error)
                unanswered += 1  # counted too: this event loop may have been busy itself
                if unanswered >= SILENT_LOOKS and time.monotonic() - heard > SILENT_SECONDS:
                    why = f"no state of it for {SILENT_SECONDS:g} s: {error or 'it does not answer'}"
                    return TimedOut(self.api.url, why)
            else:
                heard, unanswered = time.monotonic(), 0
                if self._failed_answers >= FAILED_ANSWERS:
                    return EngineDead(self.api.url, f"{FAILED_ANSWERS} generations in a row failed there")
                self._hear(answer, asked)
            await asyncio.sleep(POLL_SECONDS)

    def _hear(self, answer: dict[str, Any], asked: float) -> None:
        if self._suspected:
            self._suspected = False
            self._wake.set()
        if asked < self._published_at:
            return self.changed()  # of before the publish
        self.answer = answer
        self._others = max(0, answer["running"] + answer["waiting"] - self.num_open)
        self._paused_since = (self._paused_since or asked) if answer["paused"] else None
        is_settled = self.status is Status.SERVING and self.version >= 0
        if is_settled and (answer["quarantined"] or answer["version"] != self.version):
            what = answer["quarantined"] or f"it serves version {answer['version']}, not {self.version}"
            self.distrust(SamplerError(f"vLLM server {self.name}: {what}; it gets its weights again"))
        self.changed()

    def _suspect(self, error: Exception) -> None:
        if not self._suspected and self.status is Status.SERVING:
            log.info("%s gets no requests until it has answered for itself: %s", self.name, error)
        self._suspected = True
        self.changed()

    def _lose(self, monitor: asyncio.Task) -> None:
        if not monitor.cancelled() and self._lost is not None and not self._lost.done():
            error = monitor.exception()
            broken = error and SamplerError(f"vLLM server {self.name} could not be watched: {type(error).__name__}: {error}")
            self._lost.set_result(broken or monitor.result())


def check_state(url: str, state: dict[str, Any]) -> None:
    """Raises SamplerError for a server that this side cannot work with."""
    if state["protocol"] != PROTOCOL:
        raise SamplerError(
            f"vLLM server {url} speaks protocol {state['protocol']} of the bridge, not {PROTOCOL}: use one release"
        )
    if state["logprobs_mode"] != "processed_logprobs":
        raise SamplerError(
            f"vLLM server {url} returns {state['logprobs_mode']}: start it with --logprobs-mode processed_logprobs"
        )
