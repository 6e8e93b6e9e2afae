"""The shared memory into which the gateway writes what a trainer without shared memory sends over HTTP."""

import os
import uuid

from jaxrl_bridge.errors import BridgeError
from jaxrl_bridge.sources import num_bytes


class Segment:
    """A bucket area that grows as it is written, up to the size of the manifest."""

    def __init__(self, manifest: dict):
        self.limit = sum(num_bytes(spec) + 16 for spec in manifest["tensors"])
        self.path = f"/dev/shm/jaxrl-gateway-{os.getpid()}-{uuid.uuid4().hex}"
        self.size = 0
        self._file = open(self.path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600))

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        if offset < 0 or end > self.limit:
            raise BridgeError(
                "bad_request", f"{len(data)} bytes at offset {offset} lie outside the manifest's {self.limit} bytes"
            )
        self._file.seek(offset)
        self._file.write(data)
        self._file.flush()
        self.size = max(self.size, end)

    def source(self) -> dict:
        return {"path": self.path, "size": self.size}

    def close(self) -> None:
        self._file.close()
        os.unlink(self.path)
