"""One vLLM server as a child process: started, waited for until it answers, watched, stopped.

    trainer ── stdin ──> supervisor ── fork ──> server ──> engine core, workers

The supervisor (jaxrl.rollout.supervisor) sees to it that none of them outlives the trainer, whatever kills that. All of them
hold the server's log open, and with it a lock: a server is not started again before the last process of the one before is gone.
"""

import asyncio
import fcntl
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.client.api import ServerApi
from jaxrl.rollout.protocol import SamplerError
from jaxrl.rollout.supervisor import BY_SIGNAL

BOOT = "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a['path']; from jaxrl.rollout.supervisor import run_command; run_command(a)"
KEY_VARIABLE = "JAXRL_BRIDGE_KEY"
LOOK_SECONDS = 0.2  # between two looks at whether a server answers, or lives
GRACE_SECONDS = 5.0  # what a server gets to end by itself
KILL_SECONDS = 10.0  # what the kernel gets to end what was killed: it frees the memory of a GPU first
LAST_LINES = 25
CAUSE = re.compile(r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .*)")
VAGUE = "Engine core initialization failed"  # what vLLM's parent process says of an error of its child


@dataclass(frozen=True)
class Launch:
    """How a server is started, as often as it has to be. `command` lacks the address, which is new each time."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    folder: Path  # working directory: one without Python modules
    log: Path
    key: str = field(repr=False)
    start_seconds: float


class Server:
    """A started server. `api` talks to it."""

    def __init__(self, launch: Launch, port: int, process: subprocess.Popen, log_start: int):
        self.launch = launch
        self.url = f"http://127.0.0.1:{port}"
        self.api = ServerApi(self.url, launch.key)
        self._process = process
        self._log_start = log_start  # bytes of the log that earlier starts wrote

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ended(self) -> SamplerError:
        """Returns, when the server has ended, an error that says how, with its last lines."""
        while self.alive:
            await asyncio.sleep(LOOK_SECONDS)
        return self.failure(f"ended {_how(self._process.returncode)}")

    async def stop(self) -> None:
        """Ends it and all that it started: first asked, then killed."""
        await self._end(b"")

    async def kill(self) -> None:
        """Ends it at once: one that hangs."""
        await self._end(b"!")

    async def _end(self, word: bytes) -> None:
        await self.api.close()
        if self._process.stdin.closed:
            return
        try:
            self._process.stdin.write(word)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # its supervisor is gone, and it with it
        deadline = time.monotonic() + GRACE_SECONDS + KILL_SECONDS
        while self.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.alive:  # something below it cannot be killed, at a device say
            self._process.kill()

    def failure(self, what: str) -> SamplerError:
        """An error about this server with its last lines."""
        lines = self.last_lines()
        cause = next((line for line in map(_cause, reversed(lines)) if line and VAGUE not in line), None)
        shown = "\n".join(f"  | {line}" for line in lines[-LAST_LINES:]) or "  | (nothing)"
        because = f": {cause}" if cause else ""
        return SamplerError(f"the vLLM server at {self.url} {what}{because}; its last lines in {self.launch.log}:\n{shown}")

    def last_lines(self) -> list[str]:
        with open(self.launch.log, "rb") as log:
            log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - 2**16))
            text = log.read().decode(errors="replace")
        text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(self.launch.key, "KEY")
        return [line.rstrip() for line in text.splitlines() if line.strip()]


async def start(launch: Launch) -> Server:
    """A server that answers. Raises SamplerError with vLLM's last lines if it does not come up in `launch.start_seconds`."""
    server = await _spawn(launch)
    try:
        deadline = time.monotonic() + launch.start_seconds
        while not await server.api.healthy():
            if not server.alive:
                raise server.failure("did not start")
            if time.monotonic() > deadline:
                raise server.failure(f"did not answer within sampler.start_seconds = {launch.start_seconds:g}")
            await asyncio.sleep(LOOK_SECONDS)
    except BaseException:
        await server.kill()
        raise
    return server


async def _spawn(launch: Launch) -> Server:
    launch.folder.mkdir(parents=True, exist_ok=True)
    with open(launch.log, "ab") as log, socket.socket() as probe:
        await _lock(log.fileno(), launch.log)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        supervised = {
            "path": [path or os.getcwd() for path in sys.path],
            # No two starts, nor two replicas, may draw the same random numbers: requests bring no seed of their own.
            "command": [*launch.command, "--host", "127.0.0.1", "--port", str(port), "--seed", str(secrets.randbits(31))],
            "grace_seconds": GRACE_SECONDS,
        }
        log_start = os.fstat(log.fileno()).st_size
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(supervised)],
            env={**launch.environment, KEY_VARIABLE: launch.key},
            cwd=launch.folder,
            stdin=subprocess.PIPE,  # what is written says how to end; it ends when this process does
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is the trainer's
        )
        return Server(launch, port, process, log_start)


async def _lock(log: int, path: Path) -> None:
    """The lock belongs to the open file, which every process of the server inherits."""
    deadline = time.monotonic() + GRACE_SECONDS + KILL_SECONDS
    while True:
        try:
            return fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise SamplerError(f"processes of an earlier vLLM server still write to {path}: end them") from None
        await asyncio.sleep(LOOK_SECONDS)


def _cause(line: str) -> str | None:
    match = CAUSE.match(line)
    return match and match[1]


def _how(status: int) -> str:
    if status < 0 or status > BY_SIGNAL:
        return f"by signal {-status if status < 0 else status - BY_SIGNAL}"
    return f"with exit status {status}"
