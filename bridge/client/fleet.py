"""Several vLLM servers, or one, as one: requests routed, generations carried over deaths, weights rolled out.

A generation belongs to the fleet, not to a server. What it has sampled so far is kept here; when its server dies, hangs, drains
or loses its weights, it goes on elsewhere behind those tokens, which keep their log-probs and versions. Versions never
fall within a generation, and no request goes to weights older than the newest publish that has returned.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from bridge.client.errors import BadRequest, ServerError, VersionRefused
from bridge.client.process import Launch
from bridge.client.replica import Attached, Moved, OpenLink, Replica, Target
from bridge.client.routing import Status, choose, prefixes
from jaxrl.rollout.protocol import PublishReport, SamplerError, SamplerLoad, SamplingParams

ATTEMPTS = 5  # of a generation, without a token between them


class Fleet:
    """servers: how each is started, or where it runs. open_link: how weights reach a server that is up.

    Use on one event loop. After `start` and a first `publish` it generates; `close` ends everything that it started.
    """

    def __init__(self, servers: Sequence[Launch | Attached], open_link: OpenLink):
        self.num_moved = 0  # generations that went on elsewhere, each time
        self._rolling = asyncio.Semaphore(max(1, len(servers) // 2))  # published to at once, while the others generate
        self._replicas = [Replica(server, open_link, self._rolling, self._tell) for server in servers]
        self._keepers: dict[Replica, asyncio.Task] = {}
        self._news = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._acknowledged = 0  # the newest version whose publish has returned
        self._newest = 0  # the newest that any server may have
        self._num_waiting = 0  # requests that no server takes at present
        self._closed = False

    @property
    def num_restarts(self) -> int:
        return sum(max(0, replica.num_starts - 1) for replica in self._replicas)

    async def start(self) -> None:
        """Starts the servers, all at once, or attaches to them. Raises the first SamplerError; nothing stays then."""
        starting = [asyncio.create_task(replica.come_up()) for replica in self._replicas]
        try:
            await asyncio.wait(starting, return_when=asyncio.FIRST_EXCEPTION)
            for task in starting:
                if task.done():
                    task.result()
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
            await self.close()
            raise
        for replica in self._replicas:
            self._keepers[replica] = asyncio.create_task(replica.keep())
            self._keepers[replica].add_done_callback(lambda task, replica=replica: _note_end(task, replica))

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0
    ) -> AsyncIterator[dict[str, Any]]:
        """Lines {"ids", "logp", "versions": [[version, count], ..]} of one generation, the last with "finish_reason".

        Closing the iterator aborts it. Raises SamplerError if a server refuses the request, if it fails ATTEMPTS times without a token
        between, or when no server is left.
        """
        prompt, ids = list(prompt_ids), []
        least, attempts = self._acknowledged, 0
        while (reason := _end(ids, params)) is None:
            replica = await self._route([*prompt, *ids], least)
            admitted = replica.version
            try:
                async with aclosing(replica.generate([*prompt, *ids], _rest(params, len(ids)), priority)) as lines:
                    async for line in lines:
                        least = self._check(replica, line, least)
                        attempts = 0 if line["ids"] else attempts
                        ids += line["ids"]
                        if line.get("finish_reason") is not None:
                            replica.memory.remember(prefixes([*prompt, *ids]), admitted)
                            yield line
                            return
                        yield line
            except BadRequest:
                raise
            except (Moved, ServerError) as error:
                self._check_open()
                attempts += not isinstance(error, Moved | VersionRefused)  # those are between server and fleet alone
                if attempts >= ATTEMPTS:
                    raise SamplerError(f"a generation failed {ATTEMPTS} times in a row; the last time: {error}") from error
                self.num_moved += 1
        yield {"ids": [], "logp": [], "versions": [], "finish_reason": reason}  # it died between a last token and its reason

    async def publish(self, weights: Any, version: int, in_flight: bool) -> PublishReport:
        """Gives every server the weights, a part of the fleet at a time. Returns when each has acknowledged them or is
        counted out; that one catches up by itself and gets no requests before. `weights` must not change any more.

        If no server acknowledges, it waits for those that are being started again; raises SamplerError, with the reasons, when
        all are given up. Then, and for servers that were counted out, what they served before is served on.
        """
        async with self._publishing:
            began = time.monotonic()
            self._newest = max(self._newest, version)
            for replica in self._replicas:
                replica.aim(Target(weights, version, in_flight))
            self._tell()
            await self._until(lambda: self._is_published(version))
            reports = [replica.report for replica in self._replicas if replica.version == version]
            if not reports:
                raise SamplerError(f"no vLLM server took version {version}: {self._failures()}")
            self._acknowledged = version
            self._tell()
        return PublishReport(
            version,
            sum(report.num_bytes for report in reports),
            time.monotonic() - began,
            sum(report.num_continued for report in reports),
        )

    async def drain(self, url: str) -> None:
        """Takes a server out: it gets nothing more, its generations go on elsewhere, and if it was started here it is
        stopped. Raises SamplerError if it is the only one."""
        replica = next((replica for replica in self._replicas if replica.name == url), None)
        if replica is None or len(self._replicas) == 1:
            raise SamplerError(f"{url} cannot be drained: the servers are {', '.join(r.name for r in self._replicas)}")
        replica.is_draining = True
        self._replicas.remove(replica)
        keeper = self._keepers.pop(replica)
        keeper.cancel()
        await asyncio.wait([keeper])
        await replica.go_down()
        self._tell()

    def load(self) -> SamplerLoad:
        """Of all servers together, as last heard, at most a poll ago; kv_use is their mean."""
        answers = [replica.answer for replica in self._replicas if replica.state().status is not Status.DOWN]
        return SamplerLoad(
            sum(answer["running"] for answer in answers),
            sum(answer["waiting"] for answer in answers) + self._num_waiting,
            sum(answer["kv_use"] for answer in answers) / max(1, len(answers)),
            sum(answer["tokens_per_second"] for answer in answers),
            self.num_moved,
            self.num_restarts,
        )

    async def close(self) -> None:
        """Ends the servers that were started here; whoever still waits gets SamplerError."""
        self._closed = True
        self._tell()
        if self._keepers:
            for keeper in self._keepers.values():
                keeper.cancel()
            await asyncio.wait(self._keepers.values())
        await asyncio.gather(*(replica.go_down() for replica in self._replicas))

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._news.wait()
            self._check_open()

    async def _route(self, prompt_ids: Sequence[int], least_version: int) -> Replica:
        """The replica that a request goes to; waits while there may yet be one."""
        beginnings = prefixes(prompt_ids)
        self._check_open()
        while (chosen := self._choose(beginnings, least_version)) is None:
            if all(replica.failure is not None for replica in self._replicas):
                raise SamplerError(f"no vLLM server is left: {self._failures()}")
            self._num_waiting += 1
            try:
                await self._news.wait()
            finally:
                self._num_waiting -= 1
            self._check_open()
        chosen.memory.remember(beginnings, chosen.version)
        return chosen

    def _choose(self, beginnings: Sequence[tuple[int, int]], least_version: int) -> Replica | None:
        states, memories = [r.state() for r in self._replicas], [r.memory for r in self._replicas]
        chosen = choose(states, memories, beginnings, least_version)
        return None if chosen is None else self._replicas[chosen]

    def _check(self, replica: Replica, line: dict[str, Any], least: int) -> int:
        """Returns the version that what follows may not fall below. Raises ServerError for versions that were never
        published to it, or that fall."""
        for version, _ in line["versions"]:
            if not least <= version <= self._newest:
                error = VersionRefused(
                    replica.name, f"it sent tokens of version {version} where {least} to {self._newest} were expected"
                )
                replica.distrust(error)
                raise error
            least = version
        return least

    def _is_published(self, version: int) -> bool:
        if all(replica.failure is not None for replica in self._replicas):
            return True
        settled = all(r.version == version or r.missed == version or r.failure for r in self._replicas)
        return settled and any(r.version == version for r in self._replicas)

    def _failures(self) -> str:
        return "; ".join(dict.fromkeys(str(replica.failure) for replica in self._replicas))

    def _check_open(self) -> None:
        if self._closed:
            raise SamplerError("the sampler was closed")


def _end(ids: Sequence[int], params: SamplingParams) -> str | None:
    """The finish reason of a generation that has sampled `ids`."""
    if ids and ids[-1] in params.stop_token_ids:
        return "stop"
    return "length" if len(ids) >= params.max_tokens else None


def _rest(params: SamplingParams, num_done: int) -> SamplingParams:
    """What is asked of the server that goes on behind `num_done` tokens. No seed is sent, so it draws other random numbers than
    those at the beginning."""
    return replace(params, max_tokens=params.max_tokens - num_done, num_continued=params.num_continued + num_done)


def _note_end(keeper: asyncio.Task, replica: Replica) -> None:
    """Nothing may wait for a replica that nobody looks after any more."""
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        replica.is_gone = True
        replica.failure = SamplerError(f"vLLM server {replica.name}: {type(error).__name__}: {error}")
        replica.failure.__cause__ = error
        replica.changed()
