"""The few calls of NCCL that a broadcast needs, through ctypes: a group that is joined and used without ever blocking, so that
whoever waits for a peer can stop waiting.

The extra `gpu` brings the library; nothing here needs torch.
"""

import ctypes
import importlib.util
import threading
from functools import cache
from pathlib import Path

from jaxrl.rollout.protocol import SamplerError

LIBRARY = "libnccl.so.2"
SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
UINT8 = 1  # ncclDataType_t: bytes are moved as they are
ROOT = 0  # the trainer's rank


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.14, the first that can be joined without blocking; later ones fill in what they have beside."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


def version() -> int:
    """As NCCL counts: 22907 is 2.29.7. Members of a group must have the same. Raises SamplerError without NCCL."""
    number = ctypes.c_int()
    _check("ncclGetVersion", library().ncclGetVersion(ctypes.byref(number)))
    return number.value


def new_unique_id() -> bytes:
    """What names a group to its members; it can be joined once."""
    unique_id = _UniqueId()
    _check("ncclGetUniqueId", library().ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(unique_id)


class Group:
    """This process as member `rank` of a group on its thread's CUDA device. It is joined when `ready` says so, and so are
    broadcasts queued one by one. May be used by several threads. Methods raise SamplerError, also after `abort`."""

    def __init__(self, unique_id: bytes, num_members: int, rank: int):
        self._lock = threading.Lock()
        self._comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)
        name = _UniqueId.from_buffer_copy(unique_id)
        joining = library().ncclCommInitRankConfig(ctypes.byref(self._comm), num_members, name, rank, ctypes.byref(config))
        _check("ncclCommInitRankConfig", joining)

    def ready(self) -> bool:
        """Whether the last call has gone through."""
        state = ctypes.c_int()
        with self._lock:
            _check("ncclCommGetAsyncError", library().ncclCommGetAsyncError(self._joined(), ctypes.byref(state)))
        _check("NCCL", state.value)
        return state.value == SUCCESS

    def broadcast(self, address: int, num_bytes: int, stream: int) -> None:
        """Queues the root's bytes for all members, from and to `address`."""
        with self._lock:
            call = library().ncclBroadcast(address, address, num_bytes, UINT8, ROOT, self._joined(), stream)
        _check("ncclBroadcast", call)

    def abort(self) -> None:
        """Leaves, whatever is under way; ncclCommDestroy would wait for peers that may be gone."""
        with self._lock:
            comm, self._comm = self._comm, None
            if comm is not None:
                library().ncclCommAbort(comm)

    def _joined(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise SamplerError("the NCCL group was left")
        return self._comm


@cache
def library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_path())
    except OSError as error:
        raise SamplerError(f'weights by NCCL need {LIBRARY}: pip install "jaxrl[gpu]" ({error})') from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.ncclCommInitRankConfig.argtypes = [pointer, number, _UniqueId, number, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer]
    library.ncclCommGetAsyncError.argtypes = [pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [number], ctypes.c_char_p
    return library


def _path() -> str:
    """Of the wheel that JAX itself uses, else of the system."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [Path(folder) / "nccl" / "lib" / LIBRARY for folder in folders or ()]
    return next((str(path) for path in paths if path.exists()), LIBRARY)


def _check(call: str, code: int) -> None:
    if code not in (SUCCESS, IN_PROGRESS):
        raise SamplerError(f"{call}: {library().ncclGetErrorString(code).decode()}")
