"""Process 0 decides, every process obeys: one record per iteration, and the rows that go with it.

    process 0                                   every other process
    flags = exchange_flags(own)                 follow(obey, own_flags, template)
    send(Record(TRAIN, step, n), batches)         -> obey(record, batches), until STOP

Both sides call the same collectives in the same order, so all devices run the same program. A signal
or a number that is not finite, noticed on any process, is in the flags that process 0 sees before it
decides the next record. With one process nothing is sent.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl.data import PackedRows


class Action(enum.IntEnum):
    TRAIN = 0
    PUBLISH = 1
    CHECKPOINT = 2
    STOP = 3


class Flag(enum.IntFlag):
    """What a process has to report."""

    NONE = 0
    SIGNAL = 1  # it was asked to stop: save and end
    NONFINITE = 2  # its step gave a NaN or an infinity


@dataclass(frozen=True)
class Record:
    """What every process does next."""

    action: Action
    step: int  # the optimizer step it belongs to
    num_batches: int = 0  # row batches that follow, TRAIN only


def exchange_flags(own: Flag) -> Flag:
    """The flags of all processes together. Called by every process at the start of an iteration; waits
    for the slowest, so the others wait here while process 0 collects rollouts."""
    everyone = multihost_utils.process_allgather(np.int32(own))
    return Flag(int(np.bitwise_or.reduce(np.atleast_1d(everyone))))


def send(record: Record, batches: Sequence[PackedRows] = ()) -> None:
    """Process 0: the record, then its batches. Raises ValueError if their number is not the record's."""
    if len(batches) != record.num_batches:
        raise ValueError(f"the record announces {record.num_batches} batches of rows, {len(batches)} were given")
    _broadcast(np.array([record.action, record.step, record.num_batches], np.int32))
    for rows in batches:
        _broadcast(rows)


def receive(template: PackedRows) -> tuple[Record, list[PackedRows]]:
    """Every other process: what process 0 sent. `template` has the shapes of the run's rows: `packing.rows.empty_batch`."""
    action, step, num_batches = (int(x) for x in _broadcast(np.zeros(3, np.int32)))
    return Record(Action(action), step, num_batches), [_broadcast(template) for _ in range(num_batches)]


def follow(obey: Callable[[Record, list[PackedRows]], None], own_flags: Callable[[], Flag], template: PackedRows) -> None:
    """The loop of every process but 0: obeys records, STOP included, and returns after STOP."""
    while True:
        exchange_flags(own_flags())
        record, batches = receive(template)
        obey(record, batches)
        if record.action is Action.STOP:
            return


def _broadcast(tree):
    """Process 0's arrays on every process, as numpy."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))
