"""One parameter from its tensors and back: transposed, stacked over layers, cut to the shard a device holds."""

import functools

import jax
import numpy as np

from jaxrl.models.names import ParameterName
from jaxrl.models.safetensors_files import TensorFiles


def read_parameter(files: TensorFiles, name: ParameterName, num_layers: int, sharding, dtype: np.dtype) -> jax.Array:
    """Reads for each device its shard only. sharding None: the whole parameter on the default device."""
    shape = name.shape[::-1] if name.transpose else name.shape
    shape = (num_layers, *shape) if name.stacked else shape

    def tensor_slice(tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        part = files.read(tensor, index[::-1] if name.transpose else index)
        return part.T if name.transpose else part

    @functools.cache  # devices that hold the same shard share one read and one copy on the host
    def shard(index: tuple[slice, ...]) -> np.ndarray:
        index = tuple(slice(*one.indices(size)[:2]) for one, size in zip(index, shape, strict=True))
        if not name.stacked:
            return np.ascontiguousarray(tensor_slice(name.tensor, index), dtype)
        out = np.empty([one.stop - one.start for one in index], dtype)
        for row, i in enumerate(range(index[0].start, index[0].stop)):
            out[row] = tensor_slice(name.tensor.format(layer=i), index[1:])
        return out

    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.make_array_from_callback(shape, sharding, shard)


def tensor_value(params, name: ParameterName, layer: int | None) -> np.ndarray:
    """The Hugging Face tensor of a parameter (of one layer of it), on the host."""
    value = at(params, name.path)
    value = np.asarray(value if layer is None else value[layer])
    return np.ascontiguousarray(value.T if name.transpose else value)


def at(tree, path: tuple[str, ...]):
    """The value at a path of nested dicts."""
    for key in path:
        tree = tree[key]
    return tree


def put(tree: dict, path: tuple[str, ...], value) -> None:
    """Sets the value at a path of nested dicts, making them as needed."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
