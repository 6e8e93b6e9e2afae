"""Weights in pieces over HTTP: for a server on another host that shares nothing with this one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bridge.client.weights import Unit

BUCKET_BYTES = 2**28
PIECE_BYTES = 2**25


class Http:
    """`send(publish_id, offset, data)` hands the server bytes of a bucket and returns when it has them."""

    name, staged = "http", False

    def __init__(self, send: Callable[[str, int, memoryview], None]):
        self._send = send

    def begin(self, total_bytes: int, largest_unit: int) -> int:
        return max(BUCKET_BYTES, largest_unit)

    def put(self, bucket: int, units: Sequence[Unit], publish_id: str) -> dict[str, Any]:
        start = 0
        for unit in units:
            data = np.asarray(unit.words).view(np.uint8).data
            for offset in range(0, len(data), PIECE_BYTES):
                self._send(publish_id, start + offset, data[offset : offset + PIECE_BYTES])
            start += unit.num_bytes
        return {}

    def close(self) -> None:
        pass
