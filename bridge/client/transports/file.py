"""Weights as safetensors files on a filesystem that trainer and servers share.

A file appears under its name when it is whole and on disk. Those of a publish are removed when the next one begins: the
servers have read them by then.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.client.weights import Unit
from jaxrl.rollout.protocol import SamplerError

BUCKET_BYTES = 2**30


class SharedFiles:
    """`folder` is this transport's own; servers must be allowed to read it (JAXRL_BRIDGE_FILES)."""

    name, staged = "file", True

    def __init__(self, folder: Path):
        self._folder = folder

    def begin(self, total_bytes: int, largest_unit: int) -> int:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        free = shutil.disk_usage(self._folder).free
        if total_bytes > free:
            raise SamplerError(
                f"{self._folder} has room for {free / 1e9:.2f} GB, the weights are {total_bytes / 1e9:.2f} GB: "
                "free some, or set sampler.shared_folder to another"
            )
        return max(BUCKET_BYTES, largest_unit)

    def put(self, bucket: int, units: Sequence[Unit], publish_id: str) -> dict[str, Any]:
        path = self._folder / f"{publish_id}-{bucket}.safetensors"
        part = path.with_suffix(".part")
        try:
            with open(part, "wb") as file:
                file.write(_header(units))
                for unit in units:
                    file.write(np.asarray(unit.words).data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise SamplerError(f"weights could not be written to {self._folder}: {error.strerror}") from error
        return {"path": str(path)}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _header(units: Sequence[Unit]) -> bytes:
    """Of a safetensors file whose data are the units, one behind the other. That format knows no gaps: what aligns a
    tensor is counted to none, so a tensor that is followed by padding has an entry of its own for it."""
    entries: dict[str, Any] = {}
    start = 0
    for unit in units:
        ends = (*unit.offsets[1:], unit.num_bytes)
        for spec, offset, end in zip(unit.specs, unit.offsets, ends, strict=True):
            begin = start + offset
            last = begin + spec.num_bytes
            entries[spec.name] = spec.as_json() | {"data_offsets": [begin, last]}
            del entries[spec.name]["name"]
            if last < start + end:
                gap = start + end - last
                entries[f"{spec.name}.padding"] = {"shape": [gap], "dtype": "U8", "data_offsets": [last, last + gap]}
        start += unit.num_bytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
