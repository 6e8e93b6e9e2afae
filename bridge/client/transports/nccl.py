"""Weights by NCCL broadcast, from this process's GPU to those of a server's workers on another host.

A group is one trainer and one server: servers fail and are published to one by one, and a dead member is the end of its
group. It is kept from publish to publish; what fails ends it, and the next publish opens another. Units are sent from where
JAX has put them.
"""

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bridge.client import cuda, nccl
from bridge.client.weights import Unit
from jaxrl.rollout.protocol import SamplerError

BUCKET_BYTES = 2**29
STAGED_BYTES = 2**32  # as for cuda_ipc: what a server can keep beside its weights
MEET_SECONDS = 60.0  # for all members to come, and for a bucket to reach them; the server's side waits as long
POLL_SECONDS = 2e-4


class Nccl:
    """`num_workers`: of the server, one GPU each. After `begin` and after each `put` comes `meet`, beside the request that
    makes the server take part: `begin` with `group`, or the bucket's."""

    name = "nccl"

    def __init__(self, num_workers: int):
        self.staged = True
        self._num_workers = num_workers
        self._unique_id = b""
        self._group: nccl.Group | None = None
        self._stream: int | None = None
        self._outgoing: list[jax.Array] = []

    def begin(self, total_bytes: int, largest_unit: int) -> int:
        self.staged = total_bytes <= STAGED_BYTES
        self._device = jax.local_devices()[0]
        if self._group is None:
            cuda.select_device(self._device)
            if self._stream is None:
                self._stream = cuda.new_stream()
            self._unique_id = nccl.new_unique_id()
            self._group = nccl.Group(self._unique_id, 1 + self._num_workers, nccl.ROOT)
        return max(min(BUCKET_BYTES, total_bytes), largest_unit)

    @property
    def group(self) -> dict[str, Any]:
        """What the route `begin` is told of the group."""
        return {"unique_id": base64.b64encode(self._unique_id).decode(), "world_size": 1 + self._num_workers}

    def put(self, bucket: int, units: Sequence[Unit], publish_id: str) -> dict[str, Any]:
        """The units are kept until `meet` has sent them."""
        self._outgoing = [jax.device_put(unit.words, self._device).block_until_ready() for unit in units]
        return {"sizes": [unit.num_bytes for unit in units]}

    def meet(self) -> None:
        """Blocks until the server's workers have joined and have what was put. Raises SamplerError after MEET_SECONDS, when a
        member is lost, or when `close` is called meanwhile; the group is then left."""
        group = self._group
        if group is None:
            raise SamplerError("the NCCL group was left")
        try:
            cuda.select_device(self._device)
            deadline = time.monotonic() + MEET_SECONDS
            self._until(group.ready, deadline, "did not join the trainer's NCCL group")
            for words in self._outgoing:
                group.broadcast(words.unsafe_buffer_pointer(), words.nbytes, self._stream)
                self._until(group.ready, deadline, "did not take part in a broadcast")
            self._until(lambda: group.ready() and cuda.is_done(self._stream), deadline, "did not take a bucket")
        except SamplerError:
            self.close()
            raise
        self._outgoing = []

    def close(self) -> None:
        """Leaves the group, also while another thread is in `meet`."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._outgoing = []

    def _until(self, done: Callable[[], bool], deadline: float, failure: str) -> None:
        while not done():
            if time.monotonic() > deadline:
                n = self._num_workers
                who = "the server's worker (rank 1)" if n == 1 else f"at least one of the server's {n} workers (ranks 1 to {n})"
                raise SamplerError(f"{who} {failure} within {MEET_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
