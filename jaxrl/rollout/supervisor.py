"""The process above an environment worker: it sees to it that nothing the worker started outlives it.

    trainer ── stdin ──> supervisor ── fork ──> worker ──> tools, and theirs

It ends everything when the worker ends, and when its stdin ends: the trainer hung up or was killed. On Linux it is the
subreaper of what is below it, so tools that detached themselves, into a session of their own too, become its children when
their parent dies and are found; elsewhere only the worker's process group is. It forks before anything is imported, and stays
small.
"""

import ctypes
import os
import signal
import sys
import threading
import traceback
from typing import Any

PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36  # options of prctl(2)
BY_SIGNAL = 128  # exit status of a worker that died by a signal, less the signal's number: as of a shell


def main(arguments: dict[str, Any]) -> None:
    """Entry point. arguments: socket and pulse, file descriptors for the worker alone."""
    _prctl(CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        _become_worker(arguments, supervisor)
    os.setpgid(worker, worker)
    for descriptor in (arguments["socket"], arguments["pulse"]):
        os.close(descriptor)
    threading.Thread(target=_end_with_stdin, args=(worker,), daemon=True).start()
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid) != worker:
        os.waitpid(ended, 0)  # a tool that lost its parent
    _end_group(worker)  # before it is reaped: until then its number is its own
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    _end_children()
    os._exit(status if status >= 0 else BY_SIGNAL - status)


def _become_worker(arguments: dict[str, Any], supervisor: int) -> None:
    """Never returns: what follows in `main` is the supervisor's."""
    try:
        _prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.setpgid(0, 0)  # here and above: whichever comes first
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if os.getppid() == supervisor:  # or it died before prctl
            from jaxrl.rollout import worker  # seconds of imports, which the supervisor does without

            worker.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _end_with_stdin(worker: int) -> None:
    while os.read(0, 1):
        pass
    _end_group(worker)


def _end_group(worker: int) -> None:
    try:
        os.killpg(worker, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing of it is left


def _end_children() -> None:
    """Until there are none: the children of one that dies come up here."""
    while sys.platform == "linux":
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    me, found = os.getpid(), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if parent == me:
            found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
