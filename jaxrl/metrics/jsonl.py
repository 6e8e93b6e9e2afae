"""metrics.jsonl: one JSON object per line, flushed, so that a killed process loses no finished line."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class JsonlTracker:
    """Appends {"step": …, "time": seconds since 1970, metric: value, …}. NaN and infinities become null:
    JSON has no word for them."""

    def __init__(self, path: str | Path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        line = {"step": int(step), "time": round(time.time(), 3)} | {
            n: v if math.isfinite(v) else None for n, v in values.items()
        }
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error  # a full disk does not say which file

    def close(self) -> None:
        self._file.close()


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file that are whole."""
    for _, line in _whole_lines(Path(path)):
        yield line


def cut(path: str | Path, step: int) -> None:
    """Removes the lines of later steps than `step` and a half-written last line from a file of JSON lines; what was logged late of
    an earlier step stays. A file that is not there is left alone."""
    path = Path(path)
    if not path.exists():
        return
    begin, kept = 0, []
    for end, line in _whole_lines(path):
        if line["step"] <= step:
            kept.append((begin, end))
        begin = end
    data = path.read_bytes()
    left = b"".join(data[begin:end] for begin, end in kept)
    if left != data:
        part = path.with_suffix(".part")
        part.write_bytes(left)
        part.replace(path)


def _whole_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset of the line's end, its object) up to the first line that a crash left unfinished."""
    offset = 0
    with open(path, "rb") as file:
        for raw in file:
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:  # blocks of a line can reach the disk out of order when the machine goes down
                line = None
            if line is None:
                return
            offset += len(raw)
            yield offset, line
