"""This worker as a listener in the trainer's NCCL group, through the library that torch has loaded.

vLLM's own wrapper joins and waits without an end; here every wait has one, and a peer that is gone fails the step it is
needed in, not the worker.
"""

import ctypes
import os
import time
from functools import lru_cache

import torch

from jaxrl_bridge.errors import BridgeError

SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
UINT8 = 1  # ncclDataType_t: bytes are moved as they are
ROOT = 0  # the trainer's rank
POLL_SECONDS = 2e-4


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
    """As NCCL counts: 22907 is 2.29.7. The trainer's must be the same."""
    number = ctypes.c_int()
    _check("ncclGetVersion", _library().ncclGetVersion(ctypes.byref(number)))
    return number.value


class Member:
    """Joins within `seconds`, which is also how long `receive` waits. A failure leaves the group: BridgeError, of the kind
    timeout if the trainer did not come."""

    def __init__(self, unique_id: bytes, world_size: int, rank: int, device: torch.device, seconds: float):
        if len(unique_id) != ctypes.sizeof(_UniqueId):
            raise BridgeError("bad_request", f"unique_id has {ctypes.sizeof(_UniqueId)} bytes, not {len(unique_id)}")
        if not 0 < rank < world_size:
            raise BridgeError("bad_request", f"world_size = {world_size} leaves no place for this worker, rank {rank}")
        self.unique_id, self.device, self.seconds = unique_id, device, seconds
        self.comm: ctypes.c_void_p | None = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)
        name = _UniqueId.from_buffer_copy(unique_id)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            joining = _library().ncclCommInitRankConfig(ctypes.byref(self.comm), world_size, name, rank, ctypes.byref(config))
            _check("ncclCommInitRankConfig", joining)
            self._until(self._ready, "the trainer (rank 0) did not join its NCCL group")
        except BridgeError:
            self.close()
            raise

    def receive(self, sizes: list[int]) -> torch.Tensor:
        """The bytes of the next broadcasts, of so many bytes each, one behind the other; fresh memory on the device."""
        if self.comm is None:
            raise BridgeError("bad_request", "the NCCL group was left after a failure: a publish must begin with a new one")
        area = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        offset = 0
        try:
            for size in sizes:
                address = area.data_ptr() + offset
                handle = stream.cuda_stream if stream is not None else None
                _check("ncclBroadcast", _library().ncclBroadcast(address, address, size, UINT8, ROOT, self.comm, handle))
                self._until(self._ready, "the trainer (rank 0) did not send a broadcast")
                offset += size
            self._until(
                lambda: self._ready() and (stream is None or stream.query()), "the trainer (rank 0) did not send a bucket"
            )
        except BridgeError:
            self.close()
            raise
        return area

    def close(self) -> None:
        """Leaves, whatever is under way; ncclCommDestroy would wait for peers that may be gone."""
        comm, self.comm = self.comm, None
        if comm is not None and comm.value is not None:
            _library().ncclCommAbort(comm)

    def _ready(self) -> bool:
        state = ctypes.c_int()
        _check("ncclCommGetAsyncError", _library().ncclCommGetAsyncError(self.comm, ctypes.byref(state)))
        _check("NCCL", state.value)
        return state.value == SUCCESS

    def _until(self, done, failure: str) -> None:
        deadline = time.monotonic() + self.seconds
        while not done():
            if time.monotonic() > deadline:
                raise BridgeError("timeout", f"{failure} within {self.seconds:g} s")
            time.sleep(POLL_SECONDS)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2")  # vLLM's own way to name another
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.ncclCommInitRankConfig.argtypes = [pointer, number, _UniqueId, number, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer]
    library.ncclCommGetAsyncError.argtypes = [pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [number], ctypes.c_char_p
    return library


def _check(call: str, code: int) -> None:
    if code not in (SUCCESS, IN_PROGRESS):
        raise BridgeError("internal", f"{call}: {_library().ncclGetErrorString(code).decode()}")
