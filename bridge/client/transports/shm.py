"""Weights through /dev/shm: trainer and server on one host, on CPUs or GPUs.

Every bucket of a publish has a segment of its own, so that the server can load all of them at once when nothing is missing.
Segments are made once and used again by the next publish. From a GPU the bytes are copied straight into the segment, which is
page-locked for that: through numpy it would be 0.85 GB/s.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.client import cuda
from bridge.client.weights import Unit
from jaxrl.rollout.protocol import SamplerError

BUCKET_BYTES = 2**30


class SharedMemory:
    """`run_id` names the run and this process, and is in every segment's name."""

    name, staged = "shm", True

    def __init__(self, run_id: str, folder: Path = Path("/dev/shm")):
        self._prefix = folder / f"jaxrl-{run_id}-weights-{id(self):x}"
        self._segments: list[_Segment] = []

    def begin(self, total_bytes: int, largest_unit: int) -> int:
        have = sum(segment.size for segment in self._segments)
        free = os.statvfs(self._prefix.parent)
        free = free.f_bavail * free.f_frsize
        if total_bytes > have + free:
            raise SamplerError(
                f"{self._prefix.parent} has room for {(have + free) / 1e9:.2f} GB, the weights are {total_bytes / 1e9:.2f} GB: "
                'enlarge it, or set sampler.transport to another than "shm"'
            )
        return max(min(BUCKET_BYTES, total_bytes), largest_unit)

    def put(self, bucket: int, units: Sequence[Unit], publish_id: str) -> dict[str, Any]:
        size = sum(unit.num_bytes for unit in units)
        if bucket == len(self._segments):
            self._segments.append(_Segment(Path(f"{self._prefix}-{bucket}"), size))
        elif self._segments[bucket].size < size:
            self._segments[bucket].close()
            self._segments[bucket] = _Segment(Path(f"{self._prefix}-{bucket}"), size)
        segment = self._segments[bucket]
        segment.write(units)
        return {"path": str(segment.path), "size": segment.size}

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments.clear()


class _Segment:
    def __init__(self, path: Path, size: int):
        self.path, self.size = path, size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # now, or the first write to a full /dev/shm would be a bus error
            self._map = mmap.mmap(descriptor, size)
        except OSError as error:
            path.unlink()
            raise SamplerError(f"{path.parent} has no room for {size / 1e9:.2f} GB of weights: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._registered = False

    def write(self, units: Sequence[Unit]) -> None:
        offset = 0
        for unit in units:
            if cuda.is_on_gpu(unit.words):
                if not self._registered:
                    cuda.page_lock(self._bytes)
                    self._registered = True
                cuda.copy_to_host(self._bytes[offset : offset + unit.num_bytes], unit.words)
            else:
                self._bytes[offset : offset + unit.num_bytes] = np.asarray(unit.words).view(np.uint8)
            offset += unit.num_bytes
        if self._registered:
            cuda.wait()

    def close(self) -> None:
        if self._registered:
            cuda.page_unlock(self._bytes)
        del self._bytes
        self._map.close()
        self.path.unlink(missing_ok=True)
