"""Which way weights take to a server: the quickest that reaches it, or the one that the config names."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax

from bridge.client import cuda, nccl
from bridge.client.api import ServerApi
from bridge.client.errors import BadRequest
from bridge.client.transports.cuda_ipc import CudaIpc
from bridge.client.transports.file import SharedFiles
from bridge.client.transports.http import Http
from bridge.client.transports.nccl import Nccl
from bridge.client.transports.protocol import Transport
from bridge.client.transports.shm import SharedMemory
from jaxrl.rollout.protocol import SamplerError

log = logging.getLogger(__name__)
PIECE_SECONDS = 30.0  # for one piece over HTTP
SHM = "/dev/shm"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def choose(name: str, state: Mapping[str, Any], shared_folder: str | None, url: str) -> tuple[str, str]:
    """(transport, why). name: of the config, "auto" among them; state: what the server at `url` says of itself. Raises
    SamplerError for a transport that the server does not have or that cannot reach it.

    Between hosts NCCL goes before a shared folder, which costs a write to disk and two ways over the network; a server behind
    a tunnel is reached by that one port only, so not by NCCL.
    """
    known = state["transports"]
    same_host = state["host_id"] == host_id()
    if name == "auto":
        if same_host and (why := _cuda_ipc(state)):
            return "cuda_ipc", why
        if same_host:
            return "shm", "trainer and server share a host"
        if urlsplit(url).hostname not in LOOPBACK and not _no_nccl(state):
            return "nccl", "trainer and server have GPUs on two hosts"
        if shared_folder is not None:
            return "file", "trainer and server share sampler.shared_folder"
        return "http", "trainer and server share nothing"
    if name == "file" and name not in known:
        raise SamplerError(f'sampler.transport = "file": {_unshared(shared_folder, "the server may read no folder")}')
    if name not in known:
        raise SamplerError(f'sampler.transport = "{name}": the server has {", ".join(known)}')
    if name in ("shm", "cuda_ipc") and not same_host:
        raise SamplerError(f'sampler.transport = "{name}" needs trainer and server on one host: use "nccl", "file" or "http"')
    if name == "nccl" and (why := _no_nccl(state)):
        raise SamplerError(f'sampler.transport = "nccl": {why}')
    return name, "as configured"


async def open_transport(
    name: str, state: Mapping[str, Any], run_id: str, *, api: ServerApi, shared_folder: str | None = None
) -> Transport:
    """The transport that the config names for the server behind `api`; say `close` when it is needed no more. A folder is tried
    first: if the server does not see it, SamplerError, or with "auto" a warning and HTTP."""
    chosen, why = choose(name, state, shared_folder, api.url)
    if chosen == "file" and (failure := await _probe(api, Path(shared_folder))):
        if name != "auto":
            raise SamplerError(f'sampler.transport = "file": {_unshared(shared_folder, failure)}')
        log.warning("weights do not go to %s by file: %s", api.url, _unshared(shared_folder, failure))
        chosen, why = "http", "trainer and server share nothing"
    log.info("weights go to %s by %s: %s", api.url, chosen, why)
    if chosen == "shm":
        return SharedMemory(run_id)
    if chosen == "cuda_ipc":
        return CudaIpc()
    if chosen == "nccl":
        return Nccl(state["num_workers"])
    if chosen == "file":
        port = re.sub(r"[^\w.-]", "_", api.url)
        return SharedFiles(Path(shared_folder) / f"jaxrl-{run_id}" / port)
    loop = asyncio.get_running_loop()

    def send(publish_id: str, offset: int, data: memoryview) -> None:
        sending = api.put_data(publish_id, offset, data, timeout=PIECE_SECONDS)
        asyncio.run_coroutine_threadsafe(sending, loop).result()

    return Http(send)


def host_id() -> str:
    """Equal for processes that share /dev/shm; the server's side computes the same."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat(SHM).st_dev}"


def _cuda_ipc(state: Mapping[str, Any]) -> str | None:
    """Why a server of this host can read this process's GPU memory; None if it cannot."""
    if state["device"] != "cuda" or jax.default_backend() != "gpu":
        return None
    theirs, own = cuda.find(_digits(state["uuid"])), jax.local_devices()[0].local_hardware_id
    if theirs == own:
        return "trainer and server share a GPU"
    if theirs is not None and cuda.are_peers(theirs, own):
        return "the server's GPU reads the trainer's"
    return None


def _no_nccl(state: Mapping[str, Any]) -> str | None:
    """Why no NCCL group of trainer and server can be; None if one can."""
    if state["device"] != "cuda" or jax.default_backend() != "gpu":
        return "it goes from GPU to GPU, and one of trainer and server has none"
    if (own := nccl.version()) != state["nccl"]:
        return f"the server has NCCL {state['nccl']}, the trainer {own}: they must be the same"
    return None


async def _probe(api: ServerApi, folder: Path) -> str | None:
    """Why the server does not see what this process writes to the folder; None if it does."""
    token = secrets.token_hex(16)
    path = folder.absolute() / f"jaxrl-probe-{token}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(token)
        return None if await api.probe(str(path), token) else f"the server reads something else from {path}"
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    except BadRequest as error:
        return error.message
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _unshared(folder: str | None, why: str) -> str:
    return (
        f"{why}. sampler.shared_folder = {folder!r} must be one folder for trainer and server, at one path, and among the "
        "server's JAXRL_BRIDGE_FILES"
    )


def _digits(uuid: str) -> str:
    return re.sub(r"[^0-9a-f]", "", uuid.lower().removeprefix("gpu-"))
