"""The decoder's parameters as a vLLM server takes them: Hugging Face tensors of one dtype, with checksums, unit by unit.

A unit is what one compiled program yields: all tensors of a layer, or one tensor outside the layers. The layers of a scanned
decoder share one program, which takes the layer's number as data. A unit is a flat array of 32-bit words on the device, so
a transport moves bytes without knowing tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.models.architecture import Architecture
from jaxrl.models.names import ParameterName, parameter_names
from jaxrl.models.stacking import at

ALIGN = 16  # bytes: where a tensor may begin in a unit, a bucket or a file
SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str  # of numpy

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def as_json(self) -> dict[str, Any]:
        """Its entry in a manifest."""
        return {"name": self.name, "shape": list(self.shape), "dtype": SAFETENSORS_NAMES[self.dtype]}


@dataclass(frozen=True)
class Unit:
    """words [num_bytes / 4] uint32, little-endian; tensor i lies at `offsets[i]` bytes. checksums [len(specs)] uint32."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    words: jax.Array
    checksums: jax.Array

    @property
    def num_bytes(self) -> int:
        return 4 * self.words.shape[0]


class Weights:
    """What a publish sends. params: what the decoder has under "params", scanned; on devices, sharded or not, or numpy.
    dtype: the server's."""

    def __init__(self, params: Any, architecture: Architecture, dtype: str):
        if dtype not in SAFETENSORS_NAMES:
            raise ValueError(f"servers take weights as {', '.join(SAFETENSORS_NAMES)}, not {dtype}")
        self.params, self.num_layers, self.dtype = params, architecture.num_layers, dtype
        names = parameter_names(architecture)
        self._stacked = tuple(name for name in names if name.stacked)
        self._single = tuple(name for name in names if not name.stacked)

    def manifest(self) -> dict[str, Any]:
        layers = [self._specs(self._stacked, layer) for layer in range(self.num_layers)]
        single = [self._specs((name,)) for name in self._single]
        return {"tensors": [spec.as_json() for specs in (*single, *layers) for spec in specs]}

    def units(self) -> Iterator[Unit]:
        """Everything in the manifest's order; nothing waits for the device."""
        for name in self._single:
            words, checksums = _pack((name,), self.dtype, [at(self.params, name.path)])
            yield self._unit(self._specs((name,)), words, checksums)
        leaves = [at(self.params, name.path) for name in self._stacked]
        for layer in range(self.num_layers):
            if isinstance(leaves[0], np.ndarray):  # the device gets one layer at a time
                words, checksums = _pack(self._stacked, self.dtype, [x[layer] for x in leaves])
            else:
                words, checksums = _pack_layer(self._stacked, self.dtype, leaves, layer)
            yield self._unit(self._specs(self._stacked, layer), words, checksums)

    @property
    def num_bytes(self) -> int:
        layers = self.num_layers * _size(self._specs(self._stacked, 0))
        return layers + sum(_size(self._specs((name,))) for name in self._single)

    @property
    def largest_unit(self) -> int:
        """Bytes."""
        return max(_size(specs) for specs in (self._specs(self._stacked, 0), *(self._specs((n,)) for n in self._single)))

    def _specs(self, names: Sequence[ParameterName], layer: int = 0) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name.tensor.format(layer=layer), name.shape, self.dtype) for name in names)

    def _unit(self, specs: tuple[TensorSpec, ...], words: jax.Array, checksums: jax.Array) -> Unit:
        sizes = [_aligned(spec.num_bytes) for spec in specs]
        offsets = tuple(sum(sizes[:i]) for i in range(len(sizes)))
        if len(words.devices()) > 1:
            words = jax.device_put(words, words.addressable_shards[0].device)
        return Unit(specs, offsets, words, checksums)


def checksum(data: bytes) -> int:
    """Of a tensor's bytes: Σ (2i + 1)·w[i] mod 2^32 over little-endian 32-bit words, zeros behind the last byte."""
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint64)
    return int((words * (2 * np.arange(len(words), dtype=np.uint64) + 1) & 0xFFFFFFFF).sum() & 0xFFFFFFFF)


@partial(jax.jit, static_argnums=(0, 1))
def _pack_layer(
    names: tuple[ParameterName, ...], dtype: str, leaves: list[jax.Array], layer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _pack(names, dtype, [lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in leaves])


@partial(jax.jit, static_argnums=(0, 1))
def _pack(names: tuple[ParameterName, ...], dtype: str, values: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(words, checksums) of a unit."""
    parts = [_words((x.T if name.transpose else x).astype(dtype)) for name, x in zip(names, values, strict=True)]
    sums = [jnp.sum((2 * lax.iota(jnp.uint32, len(x)) + 1) * x, dtype=jnp.uint32) for x in parts]
    return jnp.concatenate(parts), jnp.stack(sums)


def _words(x: jax.Array) -> jax.Array:
    x = x.reshape(-1)
    x = jnp.pad(x, (0, -x.size % (ALIGN // x.dtype.itemsize)))
    return lax.bitcast_convert_type(
        x.reshape(-1, 4 // x.dtype.itemsize).squeeze(-1) if x.dtype.itemsize == 4 else x.reshape(-1, 2), jnp.uint32
    )


def _size(specs: Sequence[TensorSpec]) -> int:
    return sum(_aligned(spec.num_bytes) for spec in specs)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
