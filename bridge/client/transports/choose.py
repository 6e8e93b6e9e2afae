"""Which way weights take to a server: the quickest that reaches it, or the one that the config names."""

import asyncio
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from bridge.client import cuda
from bridge.client.api import ServerApi
from bridge.client.transports.cuda_ipc import CudaIpc
from bridge.client.transports.file import SharedFiles
from bridge.client.transports.http import Http
from bridge.client.transports.protocol import Transport
from bridge.client.transports.shm import SharedMemory
from jaxrl.rollout.protocol import SamplerError

log = logging.getLogger(__name__)
PIECE_SECONDS = 30.0  # for one piece over HTTP
SHM = "/dev/shm"


def choose(name: str, state: Mapping[str, Any], shared_folder: str | None) -> tuple[str, str]:
    """(transport, why). name: of the config, "auto" among them; state: what the server says of itself. Raises SamplerError
    for a transport that the server does not have or that cannot reach it."""
    known = state["transports"]
    same_host = state["host_id"] == host_id()
    if name == "auto":
        if same_host and state["device"] == "cuda" and jax.default_backend() == "gpu":
            if any(_uuid(device) == _digits(state["uuid"]) for device in jax.local_devices()):
                return "cuda_ipc", "trainer and server share a GPU"
        if same_host:
            return "shm", "trainer and server share a host"
        if shared_folder is not None:
            return "file", "trainer and server share sampler.shared_folder"
        return "http", "trainer and server share nothing"
    if name not in known:
        raise SamplerError(f'sampler.transport = "{name}": the server has {", ".join(known)}')
    if name in ("shm", "cuda_ipc") and not same_host:
        raise SamplerError(f'sampler.transport = "{name}" needs trainer and server on one host: use "file" or "http"')
    return name, "as configured"


def open_transport(
    name: str, state: Mapping[str, Any], run_id: str, *, api: ServerApi, shared_folder: str | None = None
) -> Transport:
    """The transport that the config names for the server behind `api`; say `close` when it is needed no more. Call it on the
    event loop that `api` belongs to."""
    chosen, why = choose(name, state, shared_folder)
    log.info("weights go to %s by %s: %s", api.url, chosen, why)
    if chosen == "shm":
        return SharedMemory(run_id)
    if chosen == "cuda_ipc":
        return CudaIpc()
    if chosen == "file":
        port = re.sub(r"[^\w.-]", "_", api.url)
        return SharedFiles(Path(shared_folder) / f"jaxrl-{run_id}" / port)
    if chosen == "http":
        loop = asyncio.get_running_loop()

        def send(publish_id: str, offset: int, data: memoryview) -> None:
            sending = api.put_data(publish_id, offset, data, timeout=PIECE_SECONDS)
            asyncio.run_coroutine_threadsafe(sending, loop).result()

        return Http(send)
    raise SamplerError(
        f'sampler.transport = "{chosen}": the trainer cannot send by it; use "auto", cuda_ipc, shm, file or http'
    )


def host_id() -> str:
    """Equal for processes that share /dev/shm; the server's side computes the same."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat(SHM).st_dev}"


def _uuid(device: jax.Device) -> str:
    """Of the GPU behind a JAX device, as its hexadecimal digits."""
    properties = cuda.call("cudaGetDeviceProperties", device.local_hardware_id)
    return bytes(properties.uuid.bytes)[:16].hex()


def _digits(uuid: str) -> str:
    return re.sub(r"[^0-9a-f]", "", uuid.lower().removeprefix("gpu-"))
