"""Finished episodes, on disk before anything else happens to them.

A folder of append-only segments. A record is its length, its CRC-32 and a MessagePack array whose first
item is the record's kind; it counts once it is whole. Every append is fsynced. A segment is deleted once a
checkpoint stands for all its groups, so the journal holds little more than what was sampled since.

Kinds: "episodes", the finished episodes of a group. A reader leaves out kinds it does not know, which is
the room for partial rollouts: today a generation that was running when the process died starts again. Its
randomness follows from the run's seed and its place, so under the same weights it draws the same tokens.
"""

import dataclasses
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from jaxrl.data import Episode, Group, Trajectory

log = logging.getLogger(__name__)

_MAGIC = b"jaxrl journal 1\n"
_HEADER = struct.Struct("<II")  # length of the body, CRC-32 of the body
_SUFFIX = ".journal"


class JournalError(Exception):
    """The journal cannot be written or read; the message names the file and the fix."""


class Journal:
    """Use `open_journal`. Methods may be called from any thread."""

    def __init__(self, folder: Path, segments: dict[int, set[int]], number: int):
        self._folder = folder
        self._segments = segments  # number of a segment -> groups with episodes in it; the last is the open one
        self._number = number
        self._lock = threading.Lock()
        self._file = _create(self._path(number))
        self._segments[number] = set()

    def append(self, *groups: Group) -> None:
        """Records finished episodes: those of whole groups, or single ones as they finish, in several
        calls. One fsync a call, some milliseconds: on disk when it returns. Raises JournalError if the
        disk refuses, and then the journal is as before the call."""
        bodies = [msgpack.packb(["episodes", _pack(group)]) for group in groups]
        data = b"".join(_HEADER.pack(len(body), zlib.crc32(body)) + body for body in bodies)
        with self._lock:
            end = self._file.seek(0, os.SEEK_END)
            try:
                _write(self._file, data)
            except OSError as error:
                self._file.truncate(end)  # half a record would hide those after it
                problem = f"cannot write to {self._folder}: {error.strerror}; free space there or fix its permissions"
                raise JournalError(problem) from error
            self._segments[self._number].update(group.index for group in groups)

    def replay(self, wanted: Callable[[int], bool] = lambda index: True) -> Iterator[Group]:
        """The recorded groups whose index is wanted, by index, with their episodes by index; an episode
        recorded twice comes once, as it was first. A group may lack episodes that never finished."""
        found: dict[int, Group] = {}
        for number in sorted(self._segments):
            for group in _groups(self._path(number)):
                if wanted(group.index):
                    known = found.get(group.index)
                    found[group.index] = group if known is None else _merge(known, group)
        for index in sorted(found):
            episodes = tuple(sorted(found[index].episodes, key=lambda e: e.index))
            yield dataclasses.replace(found[index], episodes=episodes)

    def forget(self, is_done: Callable[[int], bool]) -> None:
        """Call when a checkpoint is complete: `is_done(index)` tells whether it stands for the group (trained
        on, or dropped). Segments with nothing else are deleted, and a new one is begun."""
        with self._lock:
            if self._segments[self._number]:
                self._file.close()
                self._number += 1
                self._file = _create(self._path(self._number))
                self._segments[self._number] = set()
            for number, groups in list(self._segments.items()):
                if number != self._number and all(map(is_done, groups)):
                    self._path(number).unlink()
                    del self._segments[number]

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}{_SUFFIX}"


def open_journal(folder: str | Path) -> Journal:
    """Opens or creates the journal of a run. A record that a crash left half-written is cut, with a warning."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        segments = {}
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            if _MAGIC.startswith(path.read_bytes()):
                path.unlink()  # empty: nothing was appended, or it was killed while it was created
            else:
                segments[int(path.stem)] = _repair(path)
        return Journal(folder, segments, max(segments, default=0) + 1)
    except OSError as error:
        raise JournalError(f"cannot open {folder}: {error.strerror}; free space there or fix its permissions") from error


def _create(path: Path) -> FileIO:
    file = open(path, "xb", buffering=0)
    _write(file, _MAGIC)
    folder = os.open(path.parent, os.O_RDONLY)  # the file's name has to reach the disk too
    os.fsync(folder)
    os.close(folder)
    return file


def _write(file: FileIO, data: bytes) -> None:
    """All of it, on disk when this returns: an unbuffered write may stop short of a full disk without a word."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    os.fsync(file.fileno())


def _repair(path: Path) -> set[int]:
    """Cuts what follows the last whole record. Returns the groups of the segment."""
    end = max((end for _, _, end in _records(path)), default=len(_MAGIC))
    size = path.stat().st_size
    if end < size:
        log.warning("%s: %d bytes of a record that was never finished are cut", path, size - end)
        os.truncate(path, end)
    return {group.index for group in _groups(path)}


def _groups(path: Path) -> Iterator[Group]:
    for kind, content, _ in _records(path):
        if kind == "episodes":
            yield _unpack(content)


def _records(path: Path) -> Iterator[tuple[str, Any, int]]:
    """(kind, content, offset of its end) of every record up to the first that is not whole."""
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise JournalError(f"{path} is not a journal of this version: move it away to go on without it")
    offset = len(_MAGIC)
    while offset + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, offset)
        body = data[offset + _HEADER.size : offset + _HEADER.size + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            return
        offset += _HEADER.size + length
        yield *msgpack.unpackb(body), offset


def _merge(known: Group, more: Group) -> Group:
    have = {episode.index for episode in known.episodes}
    return dataclasses.replace(known, episodes=known.episodes + tuple(e for e in more.episodes if e.index not in have))


def _pack(value: Any) -> Any:
    """Dataclasses as maps, arrays as [dtype, bytes]: what MessagePack knows."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value):
        return {field.name: _pack(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_pack(item) for item in value]
    return value


def _unpack(group: dict[str, Any]) -> Group:
    return Group(**group | {"episodes": tuple(map(_unpack_episode, group["episodes"]))})


def _unpack_episode(episode: dict[str, Any]) -> Episode:
    return Episode(
        **episode
        | {
            "trajectories": tuple(map(_unpack_trajectory, episode["trajectories"])),
            "step_rewards": tuple(episode["step_rewards"]),
            "messages": tuple(episode["messages"]),
        }
    )


def _unpack_trajectory(trajectory: dict[str, Any]) -> Trajectory:
    arrays = {f.name for f in dataclasses.fields(Trajectory) if f.type is np.ndarray}
    return Trajectory(**{k: np.frombuffer(v[1], v[0]).copy() if k in arrays else v for k, v in trajectory.items()})
