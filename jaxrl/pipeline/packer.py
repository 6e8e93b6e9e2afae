"""Packing in a process of its own, so that the event loop keeps the interpreter.

    trainer ── config and limits, once; then step, groups ──> worker: make_batch
            <── rows, metrics, or what went wrong ──

The worker starts with the run, so that it is warm by the first step. It dies with the trainer, in the middle of a batch
too: its stdin ends then. It leaves accelerators alone.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from jaxrl.config import Config
from jaxrl.data import Group
from jaxrl.packing import PackingError, RowLimits
from jaxrl.pipeline.batch import Batch
from jaxrl.pipeline.packer_process import receive, send
from jaxrl.rollout.workers import ENVIRONMENT

PACK_SECONDS = 600.0  # for the largest batch, with the start of the worker: a hundred times what one of 37 million tokens takes

_BOOT = "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a['path']; from jaxrl.pipeline.packer_process import main; main(a['socket'])"


class PackerError(Exception):
    """The packing process died, hangs, or raised what it should not."""


class Packer:
    """The process that packs the batches of a run. `close` it."""

    def __init__(self, config: Config, limits: RowLimits):
        ours, theirs = socket.socketpair()
        arguments = {"path": sys.path, "socket": theirs.fileno()}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(arguments)],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,  # nothing is written: it ends when this process does
            start_new_session=True,  # Ctrl-C is the trainer's
        )
        theirs.close()
        self._socket = ours
        self._socket.settimeout(PACK_SECONDS)
        send(self._socket, (config.model_dump(exclude_none=True), limits))

    async def make_batch(self, groups: Sequence[Group], step: int) -> Batch:
        """`batch.make_batch` of the run's config. Raises PackingError as it does, PackerError if the process is of no use
        any more."""
        try:
            kind, *answer = await asyncio.to_thread(self._ask, groups, step)
        except TimeoutError:
            raise PackerError(f"the packing process did not answer within {PACK_SECONDS:g} s") from None
        except (EOFError, ConnectionError):
            raise PackerError(f"the packing process died ({self._how_it_ended()})") from None
        if kind == "refused":
            raise PackingError(*answer)
        if kind == "broken":
            raise PackerError(f"the packing process failed: {answer[0]}")
        return Batch(*answer)

    def _ask(self, groups: Sequence[Group], step: int) -> tuple:
        send(self._socket, (step, len(groups)))
        for group in groups:  # one by one: pickling keeps the interpreter from every other thread
            send(self._socket, _without_texts(group))
        kind, *answer = receive(self._socket)
        if kind != "packed":
            return kind, *answer
        num_batches, *rest = answer
        return kind, [receive(self._socket) for _ in range(num_batches)], *rest

    def _how_it_ended(self) -> str:
        status = self._process.wait(PACK_SECONDS)
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    def close(self) -> None:
        """Ends the process, whatever it is at; a batch that is waited for raises PackerError."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._socket.close()


def _without_texts(group: Group) -> Group:
    """The group without what no batch depends on."""
    return replace(group, episodes=tuple(replace(episode, messages=(), metrics={}) for episode in group.episodes))
