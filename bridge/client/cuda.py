"""The few calls of the CUDA runtime that JAX does not offer: memory another process can open, page-locking, raw copies.

`cuda.bindings` comes with the extra `gpu`; nothing here needs torch.
"""

from functools import cache
from typing import Any

import jax
import numpy as np

from jaxrl.rollout.protocol import SamplerError


def is_on_gpu(x: jax.Array) -> bool:
    return next(iter(x.devices())).platform == "gpu"


@cache
def runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise SamplerError(
            "weights on a GPU need cuda-bindings, of the CUDA that JAX uses: pip install cuda-bindings"
        ) from error
    return runtime


def call(function: str, *arguments: Any) -> Any:
    """What the runtime's function gives beside its status. Raises SamplerError naming the function and the error."""
    status, *results = getattr(runtime(), function)(*arguments)
    if status != runtime().cudaError_t.cudaSuccess:
        raise SamplerError(f"{function}: {runtime().cudaGetErrorString(status)[1].decode()}")
    return results[0] if results else None


def select(x: jax.Array) -> None:
    """Makes x's device this thread's."""
    select_device(next(iter(x.devices())))


def select_device(device: jax.Device) -> None:
    """Its index is JAX's local one: both number the visible devices."""
    call("cudaSetDevice", device.local_hardware_id)


def new_stream() -> int:
    """A stream of this thread's device that waits for no other; it lasts as long as the process."""
    return int(call("cudaStreamCreateWithFlags", runtime().cudaStreamNonBlocking))


def is_done(stream: int) -> bool:
    """Whether all that was queued there is through."""
    (status,) = runtime().cudaStreamQuery(stream)
    if status == runtime().cudaError_t.cudaErrorNotReady:
        return False
    if status != runtime().cudaError_t.cudaSuccess:
        raise SamplerError(f"cudaStreamQuery: {runtime().cudaGetErrorString(status)[1].decode()}")
    return True


def find(uuid: str) -> int | None:
    """The index of the visible GPU with these hexadecimal digits."""
    for index in range(call("cudaGetDeviceCount")):
        if bytes(call("cudaGetDeviceProperties", index).uuid.bytes)[:16].hex() == uuid:
            return index
    return None


def are_peers(reader: int, owner: int) -> bool:
    """Whether one GPU can read the other's memory."""
    return bool(call("cudaDeviceCanAccessPeer", reader, owner))


def page_lock(x: np.ndarray) -> None:
    call("cudaHostRegister", x.ctypes.data, x.nbytes, runtime().cudaHostRegisterDefault)


def page_unlock(x: np.ndarray) -> None:
    call("cudaHostUnregister", x.ctypes.data)


def copy_to_host(target: np.ndarray, source: jax.Array) -> None:
    """Queues the copy; `wait` ends it. `source` must be kept until then."""
    _copy(target.ctypes.data, source, runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost)


def copy_on_device(target: int, source: jax.Array) -> None:
    """To an address of device memory; queued, like copy_to_host."""
    _copy(target, source, runtime().cudaMemcpyKind.cudaMemcpyDeviceToDevice)


def wait() -> None:
    call("cudaStreamSynchronize", 0)


def _copy(target: int, source: jax.Array, kind: Any) -> None:
    source.block_until_ready()  # JAX computes on streams of its own
    select(source)
    call("cudaMemcpyAsync", target, source.unsafe_buffer_pointer(), source.nbytes, kind, 0)
