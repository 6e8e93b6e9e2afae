"""The life of a publish: begin, buckets, commit or abort; at most one at a time.

What a failure leaves behind depends on one thing, whether a tensor was loaded before it: if not, the server goes on with
the weights it had; if so, it stays paused and quarantined until a publish has gone through. A client that falls silent
counts as a failure, so a dead trainer never leaves the server waiting for good.
"""

import asyncio
import logging
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from jaxrl_bridge.errors import BridgeError
from jaxrl_bridge.segment import Segment
from jaxrl_bridge.sources import DTYPES
from jaxrl_bridge.streams import Streams

TRANSPORTS = ("shm", "cuda_ipc", "http", "file", "nccl")
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
    group: dict | None  # nccl: {"unique_id", "world_size"}
    publish_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one step at a time
    given_up: asyncio.Event = field(default_factory=asyncio.Event)  # also set when it has been committed
    stopped: float | None = None  # when generation was paused
    num_bytes: int = 0
    num_continued: int = 0
    segment: Segment | None = None  # of the transport http
    opening: dict | None = None  # what the workers still have to hear of it, with their first bucket


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
        self._accepted: dict | None = None  # the manifest that the workers last compared with the model
        self._watcher: asyncio.Task | None = None

    async def begin(self, body: dict) -> dict:
        publish, force = _parse(body), body.get("force", False)
        while self.open is not None:
            if not force:
                raise BridgeError("busy", f"a publish of version {self.open.version} is open")
            await self._give_up(self.open, "another publish was forced")
        if publish.version <= self.streams.version and not force:
            raise BridgeError("version", f"version {publish.version} is not above the served version {self.streams.version}")
        if self.streams.adapter is not None and (not force or any(stream.adapter for stream in self.streams.running)):
            raise BridgeError("busy", "adapters are served: a full publish would change the weights under them")
        self.open = publish  # from here on a second one is refused
        self._watcher = asyncio.create_task(self._watch(publish))
        async with self._step(publish):
            transport = _worker_transport(publish)
            if publish.manifest == self._accepted and publish.group is None:  # a call to the workers waits for vLLM's step
                publish.opening = {"transport": transport, "staged": publish.staged}
            else:
                await self.workers(
                    "bridge_begin", publish.publish_id, publish.manifest, transport, publish.staged, publish.group
                )
                self._accepted = publish.manifest
            if publish.transport == "http":
                publish.segment = Segment(publish.manifest)
            if not publish.staged:
                await self._stop(publish)
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
        tensors, source = body["tensors"], body["source"]
        async with self._step(publish):
            await self._load(publish, "bridge_bucket", tensors, source)
        return {}

    async def commit(self, publish_id: str, body: dict) -> dict:
        """`body` may hold the last bucket: where it is the only one, a publish is one call to the workers."""
        publish = self._find(publish_id)
        tensors, source = (body["tensors"], body["source"]) if body else ([], {})
        async with self._step(publish):
            if publish.stopped is None:
                await self._stop(publish)
            await self._load(publish, "bridge_commit", tensors, source)
            await tell_version(self.engine, publish.version)
            self._num_publishes += 1
            self.streams.version = publish.version
            self.streams.salt = f"{self._num_publishes}"
            self.streams.adapter = None
            self.quarantined = None
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
        await self._give_up(self._find(publish_id), "its trainer aborted it")
        return {"quarantined": self.quarantined}

    async def _load(self, publish: Publish, method: str, tensors: list[dict], source: dict) -> None:
        if publish.segment is not None:
            source = publish.segment.source()
        opening, publish.opening = publish.opening, None
        answer = await self.workers(method, publish.publish_id, tensors, source, opening)
        publish.num_bytes += answer["num_bytes"]

    def _find(self, publish_id: str) -> Publish:
        if self.open is None or self.open.publish_id != publish_id:
            raise BridgeError("bad_request", f"no publish {publish_id} is open")
        self.open.heard = time.monotonic()
        return self.open

    @asynccontextmanager
    async def _step(self, publish: Publish):
        """One step of a publish at a time; whatever goes wrong in it ends the publish."""
        async with publish.lock:
            if publish.given_up.is_set():
                raise BridgeError("bad_request", f"publish {publish.publish_id} was given up meanwhile")
            try:
                yield
            except BridgeError as error:
                await self._fail(publish, str(error), getattr(error, "loading", False))
                raise
            except Exception as error:
                logger.exception("a step of a publish failed")
                await self._fail(publish, str(error))
                raise BridgeError("internal", f"{type(error).__name__}: {error}") from error
            publish.heard = time.monotonic()

    async def _give_up(self, publish: Publish, reason: str) -> None:
        """Ends an open publish from outside: a step that waits for generations is cut short, any other is let finish."""
        publish.given_up.set()
        async with publish.lock:
            if self.open is publish:
                await self._fail(publish, reason)

    async def _stop(self, publish: Publish) -> None:
        """Holds new generations back, lets running ones finish if asked to, pauses vLLM, labels what it had computed."""
        streams = self.streams
        streams.admit.clear()
        if not publish.in_flight and not self.paused:
            waits = [asyncio.ensure_future(event.wait()) for event in (streams.idle, publish.given_up)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if publish.given_up.is_set():
                raise BridgeError("busy", "the publish was given up while it waited for running generations")
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

    async def _fail(self, publish: Publish, reason: str, loading: bool = False) -> None:
        """Closes a publish that did not come through: old weights where they are whole, quarantine where not."""
        self._close(publish)
        logger.warning("the publish of version %d failed: %s", publish.version, reason)
        try:
            loading |= (await self.workers("bridge_abort", publish.publish_id))["loading"]
        except BridgeError as error:
            loading = True
            logger.error("the workers could not drop the publish: %s", error)
        if loading:
            self.quarantined = f"the publish of version {publish.version} failed halfway: {reason}"
        if self.quarantined is None:
            return await self._resume()
        self.streams.refusal = BridgeError("quarantined", self.quarantined)
        self.streams.admit.set()  # those at the gate are refused

    def _close(self, publish: Publish) -> None:
        publish.given_up.set()
        self.open = None
        if publish.segment is not None:
            publish.segment.close()

    async def _watch(self, publish: Publish) -> None:
        while not publish.given_up.is_set():
            await asyncio.sleep(min(1.0, self.silence / 4))
            silent = time.monotonic() - publish.heard
            if silent > self.silence and not publish.lock.locked():
                await self._give_up(publish, f"nothing was heard of its trainer for {silent:.0f} s")


async def tell_version(engine, version: int) -> None:
    """Where vLLM labels tokens itself, it shall use our versions: the two are compared when a generation ends."""
    if tell := getattr(engine, "update_weight_version", None):
        await tell(str(version))


def _parse(body: dict) -> Publish:
    """Raises BridgeError (bad_request) naming the key that is wrong."""

    def get(key: str, kind: type, *default):
        value = body.get(key, *default) if default else body[key]
        if not isinstance(value, kind):
            raise BridgeError("bad_request", f"{key} must be {kind.__name__}, not {value!r}")
        return value

    transport, cache, manifest = get("transport", str), get("cache", str, "recompute"), get("manifest", dict)
    if transport not in TRANSPORTS:
        raise BridgeError("bad_request", f"transport must be one of {', '.join(TRANSPORTS)}, not {transport!r}")
    if cache not in ("recompute", "keep"):
        raise BridgeError("bad_request", f"cache must be recompute or keep, not {cache!r}")
    for spec in manifest["tensors"]:
        if spec["dtype"] not in DTYPES:
            raise BridgeError("mismatch", f"{spec['name']} has dtype {spec['dtype']}; known are {', '.join(DTYPES)}")
        if not all(isinstance(size, int) and size >= 0 for size in spec["shape"]):
            raise BridgeError("bad_request", f"{spec['name']} has shape {spec['shape']}")
    group = {"unique_id": get("unique_id", str), "world_size": get("world_size", int)} if transport == "nccl" else None
    return Publish(
        version=get("version", int),
        manifest=manifest,
        transport=transport,
        group=group,
        in_flight=get("in_flight", bool, True),
        recompute=cache == "recompute",
        staged=get("staged", bool, False),
    )


def _worker_transport(publish: Publish) -> str:
    return "shm" if publish.transport == "http" else publish.transport
