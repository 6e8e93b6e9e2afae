"""The process above one that may leave others behind: it sees to it that nothing the child started outlives it.

    trainer ── stdin ──> supervisor ── fork ──> environment worker, or vLLM server ──> tools and workers, and theirs

It ends everything when the child ends, and when its stdin ends: the trainer hung up or was killed. On Linux it is the
subreaper of what is below it, so processes that detached themselves, into a session of their own too, become its children when
their parent dies and are found; elsewhere only the child's process group is. It forks before anything is imported, and stays
small.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36  # options of prctl(2)
TRACKER_SECONDS = 5.0
BY_SIGNAL = 128  # exit status of a child that died by a signal, less the signal's number: as of a shell


def main(arguments: dict[str, Any]) -> None:
    """Entry point above an environment worker. arguments: socket and pulse, file descriptors for the worker alone."""

    def become_worker():
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from jaxrl.rollout import worker  # seconds of imports, which the supervisor does without

        worker.main(arguments)

    supervise(become_worker, (arguments["socket"], arguments["pulse"]))


def run_command(arguments: dict[str, Any]) -> None:
    """Entry point above a program. arguments: command, a list; grace_seconds, which it gets to end by itself."""

    def become_program():
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        command = arguments["command"]
        os.execv(command[0], command)

    supervise(become_program, grace_seconds=arguments["grace_seconds"])


def supervise(become: Callable[[], None], for_child: Sequence[int] = (), grace_seconds: float = 0.0) -> NoReturn:
    """Forks; the child is what `become` makes of it. `for_child`: file descriptors that it alone keeps. Told to end by the end
    of stdin, it sends SIGTERM and SIGKILL after `grace_seconds`; by a byte, or without grace, SIGKILL at once."""
    _prctl(CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        _become(become, supervisor)
    with contextlib.suppress(PermissionError):  # it is another program by now, and did so itself
        os.setpgid(child, child)
    for descriptor in for_child:
        os.close(descriptor)
    threading.Thread(target=_end_with_stdin, args=(child, grace_seconds), daemon=True).start()
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid) != child:
        os.waitpid(ended, 0)  # a process that lost its parent
    if grace_seconds and sys.platform == "linux":
        _spare_trackers(child)
    _end_group(child)  # before it is reaped: until then its number is its own
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _end_children()
    os._exit(status if status >= 0 else BY_SIGNAL - status)


def _become(become: Callable[[], None], supervisor: int) -> NoReturn:
    try:
        _prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.setpgid(0, 0)  # here and above: whichever comes first
        if os.getppid() == supervisor:  # or it died before prctl
            become()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _end_with_stdin(child: int, grace_seconds: float) -> None:
    at_once = os.read(0, 1)
    if grace_seconds and not at_once:
        os.kill(child, signal.SIGTERM)
        time.sleep(grace_seconds)  # when the child ends, so does this process
    if grace_seconds:
        os.kill(child, signal.SIGKILL)
    else:
        _end_group(child)


def _spare_trackers(child: int) -> None:
    """Ends what the ended child left, but lets Python's resource trackers end by themselves: each removes the shared memory
    of its dead process first, which nobody else knows of."""
    deadline = time.monotonic() + TRACKER_SECONDS
    while time.monotonic() < deadline and (others := [pid for pid in _children() if pid != child]):
        for pid in others:
            if not _is_tracker(pid):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except FileNotFoundError:
        return False


def _end_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
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
