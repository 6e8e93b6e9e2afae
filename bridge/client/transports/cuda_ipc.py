"""Weights from one process's GPU memory to another's, on one GPU or over NVLink.

JAX's own buffers cannot be opened by another process, so bytes go through two staging areas of plain device memory: one is
filled while the server reads the other. A publish whose weights the server can hold twice is staged there, so that
generation stops only for the loading.
"""

from collections.abc import Sequence
from typing import Any

from bridge.client import cuda
from bridge.client.weights import Unit

BUCKET_BYTES = 2**29
STAGED_BYTES = 2**32  # a server keeps this much beside its weights: more than a small model, less than what a large one leaves


class CudaIpc:
    name = "cuda_ipc"

    def __init__(self):
        self.staged = True
        self._areas: list[tuple[int, str]] = []  # address, handle as hex
        self._size = 0

    def begin(self, total_bytes: int, largest_unit: int) -> int:
        self.staged = total_bytes <= STAGED_BYTES
        self._needed = max(min(BUCKET_BYTES, total_bytes), largest_unit)
        return self._needed

    def put(self, bucket: int, units: Sequence[Unit], publish_id: str) -> dict[str, Any]:
        cuda.select(units[0].words)
        if self._size < self._needed:
            self._free()
            self._areas = [self._allocate(self._needed) for _ in range(2)]
            self._size = self._needed
        address, handle = self._areas[bucket % 2]
        for unit in units:
            cuda.copy_on_device(address, unit.words)
            address += unit.num_bytes
        cuda.wait()
        return {"handle": handle, "size": self._size, "device": next(iter(units[0].words.devices())).local_hardware_id}

    def close(self) -> None:
        self._free()

    def _allocate(self, size: int) -> tuple[int, str]:
        address = int(cuda.call("cudaMalloc", size))
        return address, bytes(cuda.call("cudaIpcGetMemHandle", address).reserved).hex()

    def _free(self) -> None:
        for address, _ in self._areas:
            cuda.call("cudaFree", address)
        self._areas, self._size = [], 0
