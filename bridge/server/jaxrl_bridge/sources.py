"""Where the bytes of a bucket lie: shared memory, a file, another process's GPU memory, or a broadcast.

A source hands out tensors by (name, offset) as views; whoever wants to keep one clones it. Handles and mappings are opened
once and kept: the client sends its buckets through the same few areas again and again.
"""

import ctypes
import mmap
import os
import re
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from jaxrl_bridge import nccl
from jaxrl_bridge.errors import BridgeError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SHM = re.compile(r"/dev/shm/jaxrl-[A-Za-z0-9_.-]+")


def num_bytes(spec: dict) -> int:
    """Bytes of a manifest's tensor."""
    return prod(spec["shape"]) * DTYPES[spec["dtype"]].itemsize


def check_path(path: str, transport: str) -> None:
    """Raises BridgeError (bad_request) unless a client may name this path as a source."""
    if transport == "shm":
        if not SHM.fullmatch(path) or ".." in path:
            raise BridgeError("bad_request", f"a shared-memory source must lie in /dev/shm and begin with jaxrl-, not {path!r}")
        return
    roots = [Path(root).resolve() for root in os.environ.get("JAXRL_BRIDGE_FILES", "").split(os.pathsep) if root]
    if not any(Path(path).resolve().is_relative_to(root) for root in roots):
        raise BridgeError(
            "bad_request", f"{path!r} is not under a folder of JAXRL_BRIDGE_FILES, the folders this server may read: {roots}"
        )


class Sources:
    """Everything this worker has open, by transport. `device` is where weights live."""

    def __init__(self, device: torch.device):
        self.device = device
        self.mapped: dict[tuple[str, int, int], torch.Tensor] = {}
        self.handles: dict[str, tuple[int, torch.Tensor]] = {}
        self.nccl: nccl.Member | None = None

    def tensors(self, transport: str, source: dict, specs: list[dict], bucket: list[dict]) -> list[torch.Tensor]:
        """One tensor per entry of `bucket`, in order; on the host or on `device`. Views of the source where it has them.

        Raises BridgeError: bad_request (a path or range that may not be read), mismatch (a file's tensor is not the spec's).
        """
        if transport == "shm":
            check_path(source["path"], "shm")
            return _views(self._map(source["path"], source["size"]), specs, bucket)
        if transport == "cuda_ipc":
            return _views(self._open(source["handle"], source["size"], source.get("device", 0)), specs, bucket)
        if transport == "file":
            check_path(source["path"], "file")
            return _from_file(source["path"], specs)
        if transport == "nccl":
            if self.nccl is None:
                raise BridgeError("bad_request", "no NCCL group was opened: begin must carry unique_id and world_size")
            return _views(self.nccl.receive(source["sizes"]), specs, bucket)
        raise BridgeError("bad_request", f"unknown transport {transport!r}")

    def join(self, unique_id: bytes, world_size: int, rank: int) -> None:
        """Joins the trainer's NCCL group, or stays in it; blocks until all `world_size` members have come, not for long."""
        if self.nccl is not None:
            if self.nccl.unique_id == unique_id and self.nccl.comm is not None:
                return
            self.nccl.close()
        seconds = float(os.environ.get("JAXRL_BRIDGE_PUBLISH_TIMEOUT", "60"))
        self.nccl = None
        self.nccl = nccl.Member(unique_id, world_size, rank, self.device, seconds)

    def forget_removed(self) -> None:
        """Lets go of segments whose names are gone: what the client has unlinked is freed with the last mapping."""
        for key in [key for key in self.mapped if not os.path.exists(key[0])]:
            del self.mapped[key]

    def close(self) -> None:
        self.mapped.clear()
        for address, _ in self.handles.values():
            _check(_cudart().cudaIpcCloseMemHandle(ctypes.c_void_p(address)), "cudaIpcCloseMemHandle")
        self.handles.clear()
        if self.nccl is not None:
            self.nccl.close()
            self.nccl = None

    def _map(self, path: str, size: int) -> torch.Tensor:
        """A segment as bytes. One that was replaced under the same name is mapped anew."""
        with open(path, "r+b") as file:  # torch wants a writable buffer; nothing here writes to it
            stat = os.fstat(file.fileno())
            if stat.st_size < size:
                raise BridgeError("bad_request", f"{path} holds {stat.st_size} bytes, the source says {size}")
            key = (path, stat.st_ino, stat.st_size)
            if key not in self.mapped:
                for old in [old for old in self.mapped if old[0] == path]:
                    del self.mapped[old]
                self.mapped[key] = torch.frombuffer(mmap.mmap(file.fileno(), stat.st_size), dtype=torch.uint8)
        return self.mapped[key][:size]

    def _open(self, handle: str, size: int, device: int) -> torch.Tensor:
        if handle not in self.handles:
            self.handles[handle] = _open_handle(handle, size, self.device)
        return self.handles[handle][1][:size]


def _views(area: torch.Tensor, specs: list[dict], bucket: list[dict]) -> list[torch.Tensor]:
    views = []
    for spec, entry in zip(specs, bucket, strict=True):
        offset, size = entry["offset"], num_bytes(spec)
        if offset % 16 or offset < 0 or offset + size > area.numel():
            raise BridgeError(
                "bad_request",
                f"{spec['name']}: {size} bytes at offset {offset} do not fit the bucket of {area.numel()} bytes (multiples of 16)",
            )
        views.append(area[offset : offset + size].view(DTYPES[spec["dtype"]]).view(spec["shape"]))
    return views


def _from_file(path: str, specs: list[dict]) -> list[torch.Tensor]:
    tensors = []
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for spec in specs:
            if spec["name"] not in names:
                raise BridgeError("mismatch", f"{spec['name']} is not in {path}")
            tensor = file.get_tensor(spec["name"])
            if list(tensor.shape) != list(spec["shape"]) or tensor.dtype != DTYPES[spec["dtype"]]:
                raise BridgeError(
                    "mismatch",
                    f"{spec['name']} is {tensor.dtype} {list(tensor.shape)} in {path}, the manifest says {spec['dtype']} {spec['shape']}",
                )
            tensors.append(tensor)
    return tensors


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * 64)]


class _Attributes(ctypes.Structure):
    """cudaPointerAttributes, with the room that CUDA 13 takes behind it."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("addresses", ctypes.c_void_p * 2),
        ("reserved", ctypes.c_long * 8),
    ]


class _DeviceBytes:
    """Device memory that torch did not allocate, in the form torch reads (the CUDA array interface)."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _open_handle(handle: str, size: int, device: torch.device) -> tuple[int, torch.Tensor]:
    """Maps another process's cudaMalloc'ed memory into this one: its address here and its bytes as a tensor."""
    raw = bytes.fromhex(handle)
    if len(raw) != 64:
        raise BridgeError("bad_request", f"a CUDA IPC handle has 64 bytes, this one {len(raw)}")
    torch.cuda.set_device(device)
    address = ctypes.c_void_p()
    structure = _Handle.from_buffer_copy(raw)
    _check(_cudart().cudaIpcOpenMemHandle(ctypes.byref(address), structure, ctypes.c_uint(1)), "cudaIpcOpenMemHandle")
    attributes = _Attributes()
    _check(_cudart().cudaPointerGetAttributes(ctypes.byref(attributes), address), "cudaPointerGetAttributes")
    # Of a peer GPU it may be on that one: torch would copy it to another device once, and loading does so each time.
    area = torch.as_tensor(_DeviceBytes(address.value, size), device=f"cuda:{attributes.device}")
    if area.data_ptr() != address.value:
        raise BridgeError("internal", "torch copied another process's memory instead of reading it")
    return address.value, area


def _cudart():
    """The CUDA runtime that torch has already loaded; a second copy would not know torch's context."""
    with open("/proc/self/maps") as maps:
        paths = [line.split()[-1] for line in maps if "libcudart" in line]
    if not paths:
        raise BridgeError("internal", "torch has loaded no CUDA runtime")
    library = ctypes.CDLL(paths[0])
    library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
    library.cudaPointerGetAttributes.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _check(code: int, call: str) -> None:
    if code:
        raise BridgeError("internal", f"{call}: {_cudart().cudaGetErrorString(code).decode()}")
