"""One publish to one server: begin, buckets, commit; and what is done when a step of it fails.

The next bucket is made ready while the server reads the last, as far as the transport has room for two. Device work and copies
run in a thread: the event loop goes on.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import jax

from bridge.client.api import ServerApi
from bridge.client.errors import Busy, Mismatch, Quarantined, ServerError
from bridge.client.transports.nccl import Nccl
from bridge.client.transports.protocol import Transport
from bridge.client.weights import Unit, Weights
from jaxrl.rollout.protocol import PublishReport, SamplerError

ABORT_SECONDS = 10.0
REASON_SECONDS = 5.0  # in which a server may say why a broadcast failed: it knows better


async def publish(
    api: ServerApi,
    weights: Weights,
    version: int,
    *,
    in_flight: bool,
    cache: str,
    transport: Transport,
    timeout: float,
    force: bool = False,
) -> PublishReport:
    """Makes the server behind `api` serve `weights` as `version`. Afterwards nothing reads `weights` any more.

    A tensor that arrived damaged and a publish of somebody who is gone are overcome by a second try. Raises ServerError,
    and SamplerError naming the server after `timeout` seconds, and what a copy under way takes to end; the server then
    serves the old version, or is quarantined.
    """
    try:
        async with asyncio.timeout(timeout):
            try:
                return await _once(api, weights, version, in_flight, cache, transport, force)
            except (Busy, Quarantined, _Damaged):
                return await _once(api, weights, version, in_flight, cache, transport, True)
    except TimeoutError:
        raise SamplerError(f"{api.url} did not take version {version} by {transport.name} within {timeout:g} s") from None


class _Damaged(ServerError):
    """What arrived is not what was sent, though the manifest fits."""

    kind = Mismatch.kind


async def _once(
    api: ServerApi, weights: Weights, version: int, in_flight: bool, cache: str, transport: Transport, force: bool
) -> PublishReport:
    began = time.monotonic()
    limit = await asyncio.to_thread(transport.begin, weights.num_bytes, weights.largest_unit)
    opening = api.begin(
        version,
        weights.manifest(),
        transport.name,
        in_flight=in_flight,
        cache=cache,
        staged=transport.staged,
        force=force,
        group=transport.group if isinstance(transport, Nccl) else None,
    )
    publish_id = await _met(transport, opening)
    try:
        report = await _send(api, publish_id, _buckets(weights, limit), transport)
    except BaseException as error:
        with contextlib.suppress(ServerError, TimeoutError):  # it gives the publish up by itself when nothing more comes
            await asyncio.wait_for(api.abort(publish_id), ABORT_SECONDS)
        if isinstance(error, Mismatch):
            raise _Damaged(api.url, error.message) from error
        raise
    seconds = time.monotonic() - began
    return PublishReport(version, report["num_bytes"], seconds, report["num_continued"], report["stop_seconds"])


async def _send(api: ServerApi, publish_id: str, buckets: Iterator[list[Unit]], transport: Transport) -> dict[str, Any]:
    """What `commit` reports. The last bucket goes with it: most models are one bucket, and each call waits for a step of vLLM."""
    reading: asyncio.Task[None] | None = None
    try:
        number, units = 0, await _in_thread(next, buckets)
        while True:
            if reading is not None and transport.name in ("http", "nccl"):  # one area, one broadcast at a time
                await reading
            source, entries = await _in_thread(_put, transport, number, units, publish_id)
            if reading is not None:
                await reading
            if (units := await _in_thread(next, buckets, None)) is None:
                if not isinstance(transport, Nccl):
                    return await api.commit(publish_id, entries, source)
                # A commit may wait for generations first, and a network is too slow for the time they stand still.
                await _met(transport, api.bucket(publish_id, entries, source))
                return await api.commit(publish_id)
            reading = asyncio.create_task(_met(transport, api.bucket(publish_id, entries, source)))
            number += 1
    finally:
        if reading is not None and not reading.done():
            reading.cancel()


async def _met[T](transport: Transport, request: Coroutine[Any, Any, T]) -> T:
    """The request's answer. A broadcast moves only while both sides take part in it, so the trainer's part goes on beside the
    request; when either fails the group is left, which ends the other."""
    if not isinstance(transport, Nccl):
        return await request
    answer, meeting = asyncio.ensure_future(request), asyncio.ensure_future(asyncio.to_thread(transport.meet))
    try:
        await asyncio.wait([answer, meeting], return_when=asyncio.FIRST_EXCEPTION)
        if not answer.done():
            await asyncio.wait([answer], timeout=REASON_SECONDS)
        if answer.done() and answer.exception() is not None:
            raise answer.exception()
        await meeting
        return answer.result()
    except BaseException:
        answer.cancel()
        await asyncio.shield(asyncio.to_thread(transport.close))
        await asyncio.wait([answer, meeting])
        meeting.exception()  # it was read
        raise


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it gives. A thread cannot be stopped: who is cancelled here waits for it, since afterwards the caller may
    donate what it reads, and the next publish uses the same transport."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def _put(transport: Transport, number: int, units: list[Unit], publish_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(source, entries) of a bucket, once the server may read it."""
    source = transport.put(number, units, publish_id)
    checksums = jax.device_get([unit.checksums for unit in units])  # one wait for all
    entries, start = [], 0
    for unit, totals in zip(units, checksums, strict=True):
        for spec, offset, checksum in zip(unit.specs, unit.offsets, totals.tolist(), strict=True):
            entries.append({"name": spec.name, "offset": start + offset, "checksum": checksum})
        start += unit.num_bytes
    return source, entries


def _buckets(weights: Weights, limit: int) -> Iterator[list[Unit]]:
    """Runs of units of at most `limit` bytes, or of one unit."""
    bucket: list[Unit] = []
    for unit in weights.units():
        if bucket and sum(u.num_bytes for u in bucket) + unit.num_bytes > limit:
            yield bucket
            bucket = []
        bucket.append(unit)
    yield bucket
