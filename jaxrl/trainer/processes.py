"""One program on several hosts: process 0 decides, every process obeys, and none outlives another in silence.

    process 0                                   every other process
    peers.send(Record(TRAIN, step, n), rows)      record, rows = peers.receive(template)
    the same computation                          the same computation

Records go through the key-value store of jax.distributed, so whoever waits for one keeps no device busy; rows, which
are large, follow as a collective. Every process also writes one line about itself there, once in POLL_SECONDS: a beat,
a signal it got, an error it ended with. Process 0 reads the lines of all, the others that of process 0. With one process
nothing is sent and nothing runs.
"""

import atexit
import enum
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

import jax
import numpy as np
from jax._src import distributed  # the key-value store has no public name
from jax._src.clusters import ClusterEnv  # nor has the question whether there is a cluster, asked without joining it
from jax.experimental import multihost_utils

from jaxrl.data import PackedRows

POLL_SECONDS = 1.0
# A process that has not written for so long is taken for dead. The thread that writes needs the interpreter for microseconds
# only; a host that swaps or is suspended can take many seconds for that.
SILENT_SECONDS = 60.0
# jax.distributed aborts a process, with a stack trace of its own, when another has been silent for half of this: it comes
# second, for what the watch here cannot see.
HEARTBEAT_SECONDS = 240
GRACE_SECONDS = 30.0  # to clean up after another process is gone; a computation or save that waits for it never ends
LEAVE_SECONDS = 10.0  # for the others to read why this process ends
SHUTDOWN_SECONDS = 60  # between the end of the first process and that of the last

_PREFIX = "jaxrl"
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


class ProcessError(Exception):
    """The processes of a run cannot find each other, or one of them is gone."""


def initialize(environ: Mapping[str, str] = os.environ) -> None:
    """Joins the other processes of the run, before the first use of a device. Does nothing where there is one process.

    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID say how many there are; without
    them jax recognises TPU slices, SLURM, Open MPI and indexed Kubernetes jobs; under SLURM and Open MPI it gives a process
    one device, unless JAX_LOCAL_DEVICE_IDS names more. Raises ProcessError naming the variable; jax aborts a process that
    does not find process 0 within five minutes.
    """
    times = {"heartbeat_timeout_seconds": HEARTBEAT_SECONDS, "shutdown_timeout_seconds": SHUTDOWN_SECONDS}
    given = _given(environ)
    if given is None:
        if _is_cluster(environ):
            jax.distributed.initialize(**times)
    elif given[1] > 1:
        address, count, process = given
        jax.distributed.initialize(address, count, process, cluster_detection_method="deactivate", **times)


def _given(environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Coordinator, number of processes and own number, as the environment names them; None if it does not."""
    if not any(environ.get(name) for name in _VARIABLES):
        return None
    if environ.get("JAX_NUM_PROCESSES") == "1":
        return "", 1, 0
    for name in _VARIABLES:
        if not environ.get(name):
            raise ProcessError(f"{name} is not set: a run of several processes needs {', '.join(_VARIABLES)} on each of them")
    address, *numbers = (environ[name] for name in _VARIABLES)
    for name, value in zip(_VARIABLES[1:], numbers, strict=True):
        if not value.isdecimal():
            raise ProcessError(f"{name} is {value!r}: it is a number")
    count, process = map(int, numbers)
    if process >= count:
        raise ProcessError(f"JAX_PROCESS_ID is {process}, but JAX_NUM_PROCESSES is {count}: processes count from 0")
    if not address.rpartition(":")[2].isdecimal() or ":" not in address:
        raise ProcessError(f"JAX_COORDINATOR_ADDRESS is {address!r}: it is host:port of process 0")
    return address, count, process


def _is_cluster(environ: Mapping[str, str]) -> bool:
    """Whether jax recognises a cluster that started more than this process."""
    is_pod = "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" not in environ
    for cluster in ClusterEnv._cluster_types:
        if cluster.opt_in_only_method or (cluster.__name__ == "K8sCluster" and is_pod):
            continue
        if cluster.is_env_present():
            return cluster.get_process_count() > 1
    return False


class Action(enum.StrEnum):
    START = "start"
    TRAIN = "train"
    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"
    STOP = "stop"


@dataclass(frozen=True)
class Record:
    """What every process does next."""

    action: Action
    step: int  # the optimizer step it belongs to; START: the one to restore, or -1
    num_batches: int = 0  # TRAIN: row batches that follow
    examined: int = -1  # TRAIN: the batch whose log-probs are computed before the step, or -1
    metric: float | None = None  # CHECKPOINT: what tells the best one
    detail: str = ""  # START: process 0's config. STOP: why the run ends


@dataclass(frozen=True)
class Status:
    """What a process says about itself."""

    beat: int = 0
    signal: str | None = None  # it was asked to stop
    failure: str | None = None  # it ends with this error
    left: bool = False  # it uses no device any more


class Peers:
    """This process's link to the others, to be used in a `with` statement: an error that leaves it reaches them.

    `tell` is called on process 0, from a thread of this object, with what happened on another process: the name of a signal
    it got, or a ProcessError. Everywhere else the failure of process 0 ends the process at once.
    """

    def __init__(self, tell: Callable[[str | ProcessError], None] = lambda news: None):
        self.index, self.count = jax.process_index(), jax.process_count()
        self._tell = tell
        self._number = 0  # of records
        self._beat = 0
        self._signal: str | None = None
        self._failure: str | None = None
        self._left = False
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def __enter__(self) -> Self:
        if self.count > 1:
            self._thread.start()
        return self

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        if self.count == 1:
            return
        if error is not None:
            self._failure = f"{type(error).__name__}: {error}"
        self._left = True
        self._write()
        if error is not None:
            self._wait_for_others()
            atexit.register(exit_now, 1)  # runs before what jax does at exit, which would wait for processes that are gone
        self._closed.set()
        self._thread.join()

    # Records

    def send(self, record: Record, batches: Sequence[PackedRows] = ()) -> None:
        """Process 0: the record, then its batches. Raises ValueError if their number is not the record's."""
        if len(batches) != record.num_batches:
            raise ValueError(f"the record announces {record.num_batches} batches of rows, {len(batches)} were given")
        if self.count == 1:
            return
        self._number += 1
        _store().key_value_set(f"{_PREFIX}/record/{self._number}", json.dumps(asdict(record)))
        if self._number > 2:  # whoever takes part in a record has read the one before
            _store().key_value_delete(f"{_PREFIX}/record/{self._number - 2}")
        for rows in batches:
            _broadcast(rows)

    def receive(self, template: PackedRows) -> tuple[Record, list[PackedRows]]:
        """Every other process: what process 0 sends next; waits for it. `template` has the shapes of the run's rows:
        `packing.rows.empty_batch`."""
        self._number += 1
        text = None
        while text is None:  # in between the interpreter handles signals
            try:
                text = _store().blocking_key_value_get(f"{_PREFIX}/record/{self._number}", int(POLL_SECONDS * 1000))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        fields = json.loads(text)
        record = Record(**fields | {"action": Action(fields["action"])})
        return record, [_broadcast(template) for _ in range(record.num_batches)]

    # What a process says about itself

    def signalled(self, name: str) -> None:
        """This process was asked to stop. May be called from a signal handler."""
        self._signal = name  # the watch writes it

    def _wait_for_others(self) -> None:
        """Process 0: until the others have read why it ends and left, or LEAVE_SECONDS."""
        until = time.monotonic() + LEAVE_SECONDS
        while self.index == 0 and time.monotonic() < until and not all(s.left for i, s in self._read().items() if i):
            time.sleep(POLL_SECONDS / 4)

    def _write(self) -> None:
        with self._writing:
            self._beat += 1
            status = Status(self._beat, self._signal, self._failure, self._left)
            _store().key_value_set(f"{_PREFIX}/process/{self.index}", json.dumps(asdict(status)), allow_overwrite=True)

    def _read(self) -> dict[int, Status]:
        lines = _store().key_value_dir_get(f"{_PREFIX}/process/")
        return {int(key.rpartition("/")[2]): Status(**json.loads(text)) for key, text in lines}

    def _watch(self) -> None:
        """Writes this process's line and reads those of the others, until one of them is gone."""
        others = range(1, self.count) if self.index == 0 else [0]
        beats = dict.fromkeys(others, (0, time.monotonic()))
        signals: set[int] = set()
        while not self._closed.wait(POLL_SECONDS):
            self._write()
            status = self._read()
            now = time.monotonic()
            for i in others:
                one = status.get(i, Status())
                if one.beat != beats[i][0]:
                    beats[i] = one.beat, now
                if one.failure is not None:
                    return self._lost(f"process {i} ended with an error: {one.failure}")
                if now - beats[i][1] > SILENT_SECONDS and not one.left:
                    return self._lost(
                        f"process {i} has been silent for {SILENT_SECONDS:g} s: it was killed, or its host is gone"
                    )
                if one.signal is not None and i not in signals:
                    signals.add(i)
                    self._tell(f"{one.signal} on process {i}")

    def _lost(self, problem: str) -> None:
        if self.index == 0:
            self._tell(ProcessError(problem))
            if self._closed.wait(GRACE_SECONDS):
                return
        else:
            self._left = True
            self._write()
        print(f"error: {problem}", file=sys.stderr)
        exit_now(1)


def exit_now(status: int) -> None:
    """Ends the process without what waits for the others at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _store():
    return distributed.global_state.client


def _broadcast(tree):
    """Process 0's arrays on every process, as numpy."""
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))
