"""The packing process: packs what it is sent until nobody sends any more. `packer.py` is the trainer's end.

What passes is pickled: both ends are of one program, over a socket that nobody else has.
"""

import os
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.config import Config, parse
from jaxrl.data import Group
from jaxrl.packing import PackingError, RowLimits
from jaxrl.pipeline.batch import make_batch

_COUNT = struct.Struct("<q")
_ALIGNMENT = 64  # bytes: what the fastest loads want


def main(descriptor: int) -> None:
    """Entry point. descriptor: of the socket to the trainer."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    connection = socket.socket(fileno=descriptor)
    try:
        tables, limits = receive(connection)
        config = parse(tables)
        while True:
            step, num_groups = receive(connection)
            _answer(connection, [receive(connection) for _ in range(num_groups)], config, limits, step)
    except (EOFError, ConnectionError):
        return


def _answer(connection: socket.socket, groups: Sequence[Group], config: Config, limits: RowLimits, step: int) -> None:
    try:
        batch = make_batch(groups, config, limits, step)
    except PackingError as error:
        return send(connection, ("refused", str(error)))
    except Exception:  # the trainer tells it
        return send(connection, ("broken", traceback.format_exc()))
    send(connection, ("packed", len(batch.rows), batch.metrics, batch.num_tokens))
    for rows in batch.rows:
        send(connection, rows)


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def send(connection: socket.socket, message: Any) -> None:
    """A header of lengths, the pickle, and the arrays beside it: these are copied into the socket only."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
    connection.sendall(_COUNT.pack(len(parts)) + np.array([part.nbytes for part in parts], np.int64).tobytes())
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> Any:
    """The next message; its arrays share one buffer. Raises EOFError if the other end is gone."""
    (num_parts,) = _COUNT.unpack(_exactly(connection, memoryview(bytearray(_COUNT.size))))
    lengths = np.frombuffer(_exactly(connection, memoryview(bytearray(num_parts * 8))), np.int64)
    starts = np.cumsum([0, *-(-lengths // _ALIGNMENT) * _ALIGNMENT]).tolist()
    data = memoryview(np.empty(starts[-1], np.uint8))
    body, *buffers = (_exactly(connection, data[start : start + n]) for start, n in zip(starts, lengths.tolist(), strict=False))
    return pickle.loads(body, buffers=buffers)


def _exactly(connection: socket.socket, view: memoryview) -> memoryview:
    """The view, filled."""
    rest = view
    while rest:
        count = connection.recv_into(rest)
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return view
