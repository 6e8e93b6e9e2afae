"""The life of a publish: begin, buckets, commit or abort; at most one at a time.

What a failure leaves behind depends on one thing, whether a tensor was loaded before it: if not, the server goes on with
the weights it had; if so, it stays paused and quarantined until a publish has gone through. A client that falls silent
counts as a failure, so a dead trainer never leaves the server waiting for good.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field

from jaxrl_bridge.errors import BridgeError
from jaxrl_bridge.segment import Segment
from jaxrl_bridge.streams import Streams

logger = logging.getLogger("vllm.jaxrl_bridge")


@dataclass
class Publish:
    """An open publish. Times are in seconds of the monotonic clock."""

    version: int
    manifest: dict
    transport: str
    in_flight: bool
    recompute: bool
    staged: bool
    publish_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one step at a time
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: float | None = None  # when generation was paused
    num_bytes: int = 0
    num_continued: int = 0
    segment: Segment | None = None  # of the transport http


class Publisher:
    """The served version and how it changes. `workers` calls a method of `BridgeWorker` on every rank."""

    def __init__(self, engine, streams: Streams, workers, silence: float):
        self.engine = engine
        self.streams = streams
        self.workers = workers
        self.silence = silence  # seconds without a word after which an open publish is abandoned
        self.open: Publish | None = None
        self.quarantined: str | None = None
        self.paused = False
        self._num_publishes = 0

    async def begin(self, body: dict) -> dict:
        publish = Publish(
            version=body["version"],
            manifest=body["manifest"],
            transport=body["transport"],
            in_flight=body.get("in_flight", True),
            recompute={"recompute": True, "keep": False}[body.get("cache", "recompute")],
            staged=body.get("staged", False),
        )
        force = body.get("force", False)
        if self.open is not None:
            if not force:
                raise BridgeError("busy", f"a publish of version {self.open.version} is open")
            await self._fail(self.open, "another publish was forced")
        if publish.version <= self.streams.version and not force:
            raise BridgeError("version", f"version {publish.version} is not above the served version {self.streams.version}")
        if self.streams.adapter is not None and (not force or any(stream.adapter for stream in self.streams.running)):
            raise BridgeError("busy", "adapters are served: a full publish would change the weights under them")
        self.open = publish  # from here on a second one is refused
        asyncio.create_task(self._watch(publish))
        async with publish.lock:
            try:
                group = {key: body[key] for key in ("unique_id", "world_size")} if publish.transport == "nccl" else None
                await self.workers(
                    "bridge_begin", publish.publish_id, publish.manifest, _worker_transport(publish), publish.staged, group
                )
                if publish.transport == "http":
                    publish.segment = Segment(publish.manifest)
                if not publish.staged:
                    await self._stop(publish)
            except BridgeError as error:
                await self._fail(publish, str(error))
                raise
            self._check_open(publish)
            publish.heard = time.monotonic()
        return {"publish_id": publish.publish_id}

    def segment(self, publish_id: str) -> Segment:
        """Where the bytes of a publish over HTTP go."""
        publish = self._find(publish_id)
        if publish.segment is None:
            raise BridgeError("bad_request", f"publish {publish_id} does not go over http but {publish.transport}")
        publish.heard = time.monotonic()
        return publish.segment

    async def bucket(self, publish_id: str, body: dict) -> dict:
        publish = self._find(publish_id)
        async with publish.lock:
            self._check_open(publish)
            try:
                source = body["source"] if publish.segment is None else publish.segment.source()
                answer = await self.workers("bridge_bucket", publish.publish_id, body["tensors"], source)
            except BridgeError as error:
                await self._fail(publish, str(error), error)
                raise
            publish.num_bytes += answer["num_bytes"]
            publish.heard = time.monotonic()
        return {}

    async def commit(self, publish_id: str) -> dict:
        publish = self._find(publish_id)
        async with publish.lock:
            self._check_open(publish)
            try:
                if publish.stopped is None:
                    await self._stop(publish)
                await self.workers("bridge_commit", publish.publish_id)
            except BridgeError as error:
                await self._fail(publish, str(error), error)
                raise
            self._num_publishes += 1
            self.streams.version = publish.version
            self.streams.salt = f"{self._num_publishes}"
            self.streams.adapter = None
            self.quarantined = None
            if tell := getattr(self.engine, "update_weight_version", None):
                await tell(str(publish.version))
            self._close(publish)
            await self._resume()
            now = time.monotonic()
        return {
            "version": publish.version,
            "num_bytes": publish.num_bytes,
            "num_continued": publish.num_continued,
            "seconds": now - publish.began,
            "stop_seconds": now - publish.stopped,
        }

    async def abort(self, publish_id: str) -> dict:
        publish = self._find(publish_id)
        await self._fail(publish, "the trainer aborted the publish")
        return {"quarantined": self.quarantined}

    def _find(self, publish_id: str) -> Publish:
        if self.open is None or self.open.publish_id != publish_id:
            raise BridgeError("bad_request", f"no publish {publish_id} is open")
        self.open.heard = time.monotonic()
        return self.open

    def _check_open(self, publish: Publish) -> None:
        if publish.closed.is_set():
            raise BridgeError("bad_request", f"publish {publish.publish_id} was closed meanwhile")

    async def _stop(self, publish: Publish) -> None:
        """Holds new generations back, lets running ones finish if asked to, pauses vLLM, labels what it had computed."""
        streams = self.streams
        streams.admit.clear()
        if not publish.in_flight and not self.paused:
            idle, closed = asyncio.ensure_future(streams.idle.wait()), asyncio.ensure_future(publish.closed.wait())
            await asyncio.wait({idle, closed}, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel(), closed.cancel()
            self._check_open(publish)
        await streams.added()
        publish.stopped = time.monotonic()
        self.paused = True
        await self.engine.pause_generation(mode="keep", clear_cache=publish.recompute)
        await streams.settle()
        publish.num_continued = len(streams.running)

    async def _resume(self) -> None:
        if self.paused:
            await self.engine.resume_generation()
            self.paused = False
        self.streams.refusal = None
        self.streams.admit.set()

    async def _fail(self, publish: Publish, reason: str, error: BridgeError | None = None) -> None:
        """Closes a publish that did not come through: old weights where they are whole, quarantine where not."""
        if publish.closed.is_set():
            return
        self._close(publish)
        logger.warning("publish of version %d failed: %s", publish.version, reason)
        loading = getattr(error, "loading", False)
        try:
            loading |= (await self.workers("bridge_abort", publish.publish_id))["loading"]
        except BridgeError as second:
            loading = True
            logger.error("the workers could not drop the publish: %s", second)
        if loading or self.quarantined is not None:
            self.quarantined = (
                f"the publish of version {publish.version} failed halfway: {reason}" if loading else self.quarantined
            )
            self.streams.refusal = BridgeError("quarantined", self.quarantined)
            self.streams.admit.set()  # those at the gate are refused
        else:
            await self._resume()

    def _close(self, publish: Publish) -> None:
        publish.closed.set()
        if self.open is publish:
            self.open = None
        if publish.segment is not None:
            publish.segment.close()

    async def _watch(self, publish: Publish) -> None:
        while not publish.closed.is_set():
            await asyncio.sleep(min(1.0, self.silence / 4))
            silent = time.monotonic() - publish.heard
            if silent > self.silence and not publish.lock.locked() and not publish.closed.is_set():
                async with publish.lock:
                    await self._fail(publish, f"nothing was heard of its trainer for {silent:.0f} s")


def _worker_transport(publish: Publish) -> str:
    return "shm" if publish.transport == "http" else publish.transport
