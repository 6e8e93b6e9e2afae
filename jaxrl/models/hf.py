"""Hugging Face checkpoints in and out: config.json, one safetensors file or several with an index.

Streamed both ways: a device receives its own shard of a parameter only, cut from the file, and the host holds one
parameter at a time when reading and one file's tensors when writing.
"""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxrl.models.architecture import Architecture
from jaxrl.models.names import ParameterName, parameter_names, tensors
from jaxrl.models.safetensors_files import DTYPES, INDEX, CheckpointFileError, TensorFiles, open_model_files
from jaxrl.models.stacking import at, put, read_parameter, tensor_value

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
MAX_SHARD_BYTES = 5_000_000_000


def load_architecture(folder: str | Path) -> Architecture:
    """From FOLDER/config.json. Raises CheckpointFileError if it is missing or no JSON object, UnsupportedModelError
    if the model is not implemented."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise CheckpointFileError(f"no such file: {file}")
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointFileError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointFileError(f"{file} is not a JSON object")
    return Architecture.from_hf(config)


def load_checkpoint(folder: str | Path, architecture: Architecture, shardings, param_dtype):
    """The parameters in FOLDER in the form of a scanned decoder: what goes under "params".

    shardings: a tree of Sharding like the result (`decoder.shardings(...)["params"]`); None: the default device.
    param_dtype: what the values are cast to, exactly if it is at least as wide as the file's dtype.
    Raises CheckpointFileError naming the tensor and the file for anything missing, extra, mis-shaped or unreadable.
    """
    folder = Path(folder)
    with open_model_files(folder) as files:
        expected = {tensor: name.shape for tensor, name, _ in tensors(architecture)}
        for tensor in [t for t in files.shapes if t.endswith("rotary_emb.inv_freq")]:
            del files.shapes[tensor]  # a buffer that old checkpoints store; computed from the config here
        if architecture.tie_embeddings and {"model.embed_tokens.weight", "lm_head.weight"} <= files.shapes.keys():
            _check_tied(files)
            del files.shapes["lm_head.weight"]
        files.check(expected)
        params: dict = {}
        for name in parameter_names(architecture):
            sharding = at(shardings, name.path) if shardings is not None else None
            put(params, name.path, read_parameter(files, name, architecture.num_layers, sharding, jnp.dtype(param_dtype)))
    return params


def _check_tied(files: TensorFiles) -> None:
    """A tied model may store its head all the same; it must then be the embedding."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    shape = files.shapes[embed]
    chunk = 4096  # compared piece by piece: these are the largest tensors of a small model
    pieces = [(slice(i, min(i + chunk, shape[0])), slice(None)) for i in range(0, shape[0], chunk)]
    same = shape == files.shapes[head] and all(np.array_equal(files.read(embed, i), files.read(head, i)) for i in pieces)
    if not same:
        raise CheckpointFileError(
            f"tensor {head} in {files.file(head)} differs from {embed}, but config.json ties them: set tie_word_embeddings to false"
        )


def save_checkpoint(
    folder: str | Path,
    params,
    architecture: Architecture,
    dtype,
    tokenizer_folder: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes params (in the form of a scanned decoder) to FOLDER, cast to dtype, with config.json, and the tokenizer's
    files copied from tokenizer_folder. A file holds at most max_shard_bytes, or one tensor.

    Needs every shard of the parameters in this process. Raises CheckpointFileError if FOLDER already holds a model.
    """
    folder, dtype = Path(folder), jnp.dtype(dtype)
    if present := sorted(folder.glob("*.safetensors*")):
        raise CheckpointFileError(f"{folder} already holds a model ({present[0].name}): choose another folder")
    if dtype not in DTYPES.values():
        raise CheckpointFileError(f"checkpoints are written as {', '.join(map(str, DTYPES.values()))}, not {dtype}")
    folder.mkdir(parents=True, exist_ok=True)
    shards = _plan(architecture, dtype.itemsize, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {tensor: file for tensor, _, _ in shard}
        values = {tensor: tensor_value(params, name, layer).astype(dtype) for tensor, name, layer in shard}
        save_file(values, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(_size(name, dtype.itemsize) for shard in shards for _, name, _ in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file in TOKENIZER_FILES if tokenizer_folder is not None else ():
        if (Path(tokenizer_folder) / file).is_file():
            shutil.copyfile(Path(tokenizer_folder) / file, folder / file)
    config = architecture.to_hf() | {"dtype": str(dtype)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _plan(architecture: Architecture, itemsize: int, max_bytes: int) -> list[list[tuple[str, ParameterName, int | None]]]:
    """The tensors of each file, filled in order."""
    shards: list[list] = [[]]
    filled = 0
    for entry in tensors(architecture):
        size = _size(entry[1], itemsize)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += size
    return shards


def _size(name: ParameterName, itemsize: int) -> int:
    return int(np.prod(name.shape)) * itemsize
