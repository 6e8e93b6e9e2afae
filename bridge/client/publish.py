"""One publish to one server: begin, buckets, commit; and what is done when a step of it fails.

The next bucket is made ready while the server reads the last, as far as the transport has room for two. Device work and copies
run in a thread: the event loop goes on.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from bridge.client.api import ServerApi
from bridge.client.errors import Busy, Mismatch, Quarantined, ServerError
from bridge.client.transports.protocol import Transport
from bridge.client.weights import Unit, Weights
from jaxrl.rollout.protocol import PublishReport, SamplerError

ABORT_SECONDS = 10.0


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
    publish_id = await api.begin(
        version,
        weights.manifest(),
        transport.name,
        in_flight=in_flight,
        cache=cache,
        staged=transport.staged,
        force=force,
    )
    try:
        await _send(api, publish_id, _buckets(weights, limit), transport)
        report = await api.commit(publish_id)
    except BaseException as error:
        with contextlib.suppress(ServerError, TimeoutError):  # it gives the publish up by itself when nothing more comes
            await asyncio.wait_for(api.abort(publish_id), ABORT_SECONDS)
        if isinstance(error, Mismatch):
            raise _Damaged(api.url, error.message) from error
        raise
    seconds = time.monotonic() - began
    return PublishReport(version, report["num_bytes"], seconds, report["num_continued"], report["stop_seconds"])


async def _send(api: ServerApi, publish_id: str, buckets: Iterator[list[Unit]], transport: Transport) -> None:
    reading: asyncio.Task[None] | None = None
    try:
        number = 0
        while (units := await _in_thread(next, buckets, None)) is not None:
            if reading is not None and transport.name == "http":  # it has one area
                await reading
            source, entries = await _in_thread(_put, transport, number, units, publish_id)
            if reading is not None:
                await reading
            reading = asyncio.create_task(api.bucket(publish_id, entries, source))
            number += 1
        if reading is not None:
            await reading
    finally:
        if reading is not None and not reading.done():
            reading.cancel()


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
