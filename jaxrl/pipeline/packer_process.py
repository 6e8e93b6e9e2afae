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

from jaxrl.config import Config, parse
from jaxrl.data import Group
from jaxrl.packing import PackingError, RowLimits
from jaxrl.pipeline.batch import make_batch

_LENGTH = struct.Struct("<Q")


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
    body = pickle.dumps(message, protocol=5)
    connection.sendall(_LENGTH.pack(len(body)))
    connection.sendall(body)


def receive(connection: socket.socket) -> Any:
    """The next message. Raises EOFError if the other end is gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return data
