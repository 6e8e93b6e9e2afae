"""Finished episodes, on disk before anything else happens to them, and what the others have sampled so far.

A folder of append-only segments. A record is its length, its CRC-32 and a MessagePack array whose first
item is the record's kind; it counts once it is whole. Every append is fsynced. A segment is deleted once a
checkpoint stands for all its groups, parts of episodes that have finished aside: the journal holds little more than what
was sampled since.

Kinds: "episodes", the finished episodes of a group; "partial", more tokens of an episode that runs. A reader leaves out
kinds it does not know.
"""

import dataclasses
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from jaxrl.data import Episode, Group, Trajectory
from jaxrl.rollout.chat import CallKey
from jaxrl.rollout.partial import CallRecord, Increment, calls_of
from jaxrl.rollout.protocol import SampledTokens

log = logging.getLogger(__name__)

_MAGIC = b"jaxrl journal 1\n"
_HEADER = struct.Struct("<II")  # length of the body, CRC-32 of the body
_SUFFIX = ".journal"


class JournalError(Exception):
    """The journal cannot be written or read; the message names the file and the fix."""


@dataclass(frozen=True)
class Partial:
    """What an episode that runs has sampled since it was last recorded."""

    group: int
    episode: int
    increments: tuple[Increment, ...]


@dataclass
class _Segment:
    """The (group, episode) pairs with a record in it."""

    finished: set[tuple[int, int]] = field(default_factory=set)
    partial: set[tuple[int, int]] = field(default_factory=set)

    def add(self, record: Group | Partial) -> None:
        if isinstance(record, Partial):
            self.partial.add((record.group, record.episode))
        else:
            self.finished.update((record.index, episode.index) for episode in record.episodes)


class Journal:
    """Use `open_journal`. Methods may be called from any thread."""

    def __init__(self, folder: Path, segments: dict[int, _Segment], number: int):
        self._folder = folder
        self._segments = segments  # by number; the last is the open one
        self._number = number
        self._lock = threading.Lock()
        self._file = _create(self._path(number))
        self._segments[number] = _Segment()

    def append(self, *groups: Group, partials: Sequence[Partial] = ()) -> None:
        """Records finished episodes: those of whole groups, or single ones as they finish, in several
        calls; and what running ones have sampled. One fsync a call, some milliseconds: on disk when it
        returns. Raises JournalError if the disk refuses, and then the journal is as before the call."""
        records = [*groups, *partials]
        if not records:
            return
        kinds = ["partial" if isinstance(record, Partial) else "episodes" for record in records]
        bodies = [msgpack.packb([kind, _pack(record)]) for kind, record in zip(kinds, records, strict=True)]
        data = b"".join(_HEADER.pack(len(body), zlib.crc32(body)) + body for body in bodies)
        with self._lock:
            end = self._file.seek(0, os.SEEK_END)
            try:
                _write(self._file, data)
            except OSError as error:
                self._file.truncate(end)  # half a record would hide those after it
                problem = f"cannot write to {self._folder}: {error.strerror}; free space there or fix its permissions"
                raise JournalError(problem) from error
            for record in records:
                self._segments[self._number].add(record)

    def replay(self, wanted: Callable[[int], bool] = lambda index: True) -> Iterator[Group]:
        """The recorded groups whose index is wanted, by index, with their episodes by index; an episode
        recorded twice comes once, as it was first. A group may lack episodes that never finished."""
        found: dict[int, Group] = {}
        for number in sorted(self._segments):
            for group in _read(self._path(number), "episodes"):
                if wanted(group.index):
                    known = found.get(group.index)
                    found[group.index] = group if known is None else _merge(known, group)
        for index in sorted(found):
            episodes = tuple(sorted(found[index].episodes, key=lambda e: e.index))
            yield dataclasses.replace(found[index], episodes=episodes)

    def partials(self, wanted: Callable[[int], bool] = lambda index: True) -> dict[int, dict[int, dict[CallKey, CallRecord]]]:
        """By group that is wanted and episode: the calls of those that have sampled something and not finished."""
        finished = self._finished()
        found: dict[int, dict[int, list[Increment]]] = {}
        for number in sorted(self._segments):
            for part in _read(self._path(number), "partial"):
                if wanted(part.group) and (part.group, part.episode) not in finished:
                    found.setdefault(part.group, {}).setdefault(part.episode, []).extend(part.increments)
        return {
            group: {episode: calls_of(increments) for episode, increments in episodes.items()}
            for group, episodes in found.items()
        }

    def _finished(self) -> set[tuple[int, int]]:
        return set().union(*(segment.finished for segment in self._segments.values()))

    def forget(self, is_done: Callable[[int], bool]) -> None:
        """Call when a checkpoint is complete: `is_done(index)` tells whether it stands for the group (trained
        on, or dropped). Segments with nothing else, but for earlier parts of episodes that have finished, are
        deleted, and a new one is begun."""
        with self._lock:
            open_segment, finished = self._segments[self._number], self._finished()
            if open_segment.finished or open_segment.partial:
                self._file.close()
                self._number += 1
                self._file = _create(self._path(self._number))
                self._segments[self._number] = _Segment()
            for number, segment in list(self._segments.items()):
                needed = segment.finished | (segment.partial - finished)
                if number != self._number and all(is_done(group) for group, _ in needed):
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


def _repair(path: Path) -> _Segment:
    """Cuts what follows the last whole record. Returns what the segment has."""
    segment, end = _Segment(), len(_MAGIC)
    for kind, content, end in _records(path):  # noqa: B007
        if kind in _KINDS:
            segment.add(_KINDS[kind](content))
    size = path.stat().st_size
    if end < size:
        log.warning("%s: %d bytes of a record that was never finished are cut", path, size - end)
        os.truncate(path, end)
    return segment


def _read(path: Path, wanted: str) -> Iterator[Any]:
    """The records of one kind."""
    for kind, content, _ in _records(path):
        if kind == wanted:
            yield _KINDS[kind](content)


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


def _unpack_group(group: dict[str, Any]) -> Group:
    return Group(**group | {"episodes": tuple(map(_unpack_episode, group["episodes"]))})


def _unpack_partial(partial: dict[str, Any]) -> Partial:
    return Partial(**partial | {"increments": tuple(map(_unpack_increment, partial["increments"]))})


def _unpack_increment(increment: dict[str, Any]) -> Increment:
    path, number = increment["key"]
    tokens = SampledTokens(**{name: _unpack_array(column) for name, column in increment["tokens"].items()})
    return Increment(**increment | {"key": (tuple(path), number), "tokens": tokens})


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
    return Trajectory(**{k: _unpack_array(v) if k in arrays else v for k, v in trajectory.items()})


def _unpack_array(packed: list) -> np.ndarray:
    dtype, data = packed
    return np.frombuffer(data, dtype).copy()


_KINDS: dict[str, Callable[[dict[str, Any]], Group | Partial]] = {"episodes": _unpack_group, "partial": _unpack_partial}
