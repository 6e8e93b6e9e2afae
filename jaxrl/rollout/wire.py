"""What passes between the trainer and its environment workers: JSON frames, and a pulse in shared memory.

A frame is four bytes of length and a JSON object. The pulse says which episode is on the worker's CPU and since when, so that
the trainer can see a worker that no longer answers, and whose fault that is. Times are CLOCK_MONOTONIC, one clock for
all processes of a host.
"""

import asyncio
import json
import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import Any

LENGTH = struct.Struct("<I")
NOBODY = -1


def encode_frame(message: dict[str, Any]) -> bytes:
    """Raises TypeError or ValueError if the message is not JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None at the end of the stream, in the middle of a frame too: the writer died."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


@dataclass(frozen=True)
class Beat:
    job: int  # whose task is on the CPU, or NOBODY
    since: float  # seconds, when its step began
    alive: float  # seconds, when the event loop last turned


class Pulse:
    """Three aligned 64-bit words in a file without a name: written by the worker, read by the trainer."""

    def __init__(self, fd: int):
        self._words = memoryview(mmap.mmap(fd, 24)).cast("q")

    @classmethod
    def create(cls) -> tuple["Pulse", int]:
        """A pulse and a descriptor of its file, to be handed to the worker and closed."""
        with tempfile.TemporaryFile() as file:
            file.truncate(24)
            fd = os.dup(file.fileno())
        pulse = cls(fd)
        pulse._words[0] = NOBODY
        pulse.alive()
        return pulse, fd

    def enter(self, job: int) -> int:
        """A task of `job` goes onto the CPU. Returns the time in nanoseconds."""
        now = time.monotonic_ns()
        self._words[1] = now  # before the job: a reader must never see it with an older time
        self._words[0] = job
        return now

    def leave(self) -> int:
        self._words[0] = NOBODY
        return time.monotonic_ns()

    def alive(self) -> None:
        self._words[2] = time.monotonic_ns()

    def read(self) -> Beat:
        job, since, alive = self._words[0], self._words[1], self._words[2]
        return Beat(job if job == self._words[0] else NOBODY, since / 1e9, alive / 1e9)
