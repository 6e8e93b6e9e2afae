"""TensorBoard event files, written record by record: what was logged is on disk when `log` returns.

(The usual SummaryWriter hands events to a queue that its own flush does not drain; a killed process
would lose steps that a checkpoint already stands for.)
"""

import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

_HEADER = struct.Struct("<QI")  # length of the event, checksum of the length
_FOOTER = 4  # checksum of the event


class TensorBoardTracker:
    """One scalar per metric, in a new event file of `folder`. `start_step` is the last step that stands:
    later ones in older event files are cut, and a marker tells a TensorBoard that is already showing them."""

    def __init__(self, folder: str | Path, start_step: int):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            cut(old, start_step)
        self._writer = RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns() // 1000}.{os.getpid()}"))
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write(Event(step=int(step), summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())


def read(path: str | Path) -> Iterator[Event]:
    """The events of a file that are whole."""
    for _, event in _whole_events(Path(path)):
        yield event


def cut(path: str | Path, step: int) -> None:
    """Truncates an event file after its last scalar of `step`; a half-written last event goes too."""
    path = Path(path)
    end = 0
    for event_end, event in _whole_events(path):
        if event.HasField("summary") and event.step > step:
            break
        end = event_end
    if end < path.stat().st_size:
        os.truncate(path, end)


def _whole_events(path: Path) -> Iterator[tuple[int, Event]]:
    """(offset of the event's end, the event) up to the first that a crash left unfinished."""
    offset, size = 0, path.stat().st_size
    with open(path, "rb") as file:
        while offset + _HEADER.size <= size:
            length, _ = _HEADER.unpack(file.read(_HEADER.size))
            offset += _HEADER.size + length + _FOOTER
            if offset > size:
                return
            yield offset, Event.FromString(file.read(length))
            file.seek(_FOOTER, os.SEEK_CUR)
