"""The tensors of a folder of safetensors files: what is there, checked before anything is read, and slices of it."""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
INDEX = "model.safetensors.index.json"


class CheckpointFileError(Exception):
    """A model or adapter folder that cannot be read, or not be written. The message names the tensor and the file."""


class TensorFiles:
    """Open safetensors files. Use as a context manager; `shapes` maps each tensor's name to its shape."""

    def __init__(self, files: Iterable[Path]):
        self._stack = ExitStack()
        self._of: dict[str, tuple[Path, object]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            self._add(file)

    def _add(self, file: Path) -> None:
        if not file.is_file():
            raise CheckpointFileError(f"no such file: {file}")
        try:
            opened = self._stack.enter_context(safe_open(file, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise CheckpointFileError(f"{file} is not a readable safetensors file (truncated or corrupt?): {error}") from None
        for name in opened.keys():
            if name in self._of:
                raise CheckpointFileError(f"tensor {name} is in both {self._of[name][0]} and {file}")
            part = opened.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise CheckpointFileError(f"tensor {name} in {file} is {part.get_dtype()}: {', '.join(DTYPES)} are implemented")
            self._of[name] = (file, part)
            self.shapes[name] = tuple(part.get_shape())

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def file(self, name: str) -> Path:
        return self._of[name][0]

    def dtype(self, name: str) -> np.dtype:
        return DTYPES[self._of[name][1].get_dtype()]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor; the rest of it is never brought into memory."""
        return self._of[name][1][index]

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raises CheckpointFileError naming the tensors that are missing, extra or of another shape."""
        where = ", ".join(sorted({file.name for file, _ in self._of.values()}))
        if missing := [name for name in expected if name not in self.shapes]:
            raise CheckpointFileError(f"{_some(missing)} missing from {where}")
        if extra := sorted(set(self.shapes) - set(expected)):
            raise CheckpointFileError(f"{_some(extra)} in {self.file(extra[0])} is no part of this model")
        for name, shape in expected.items():
            if self.shapes[name] != shape:
                raise CheckpointFileError(
                    f"tensor {name} in {self.file(name)} has shape {list(self.shapes[name])}, the model's config says {list(shape)}"
                )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor {', '.join(names[:3])}{more}"


def open_model_files(folder: Path) -> TensorFiles:
    """The files of a checkpoint: those its index names, else the single model.safetensors.

    Raises CheckpointFileError if a file is missing or corrupt, or index and files disagree.
    """
    if not (folder / INDEX).is_file():
        if not (folder / "model.safetensors").is_file():
            raise CheckpointFileError(
                f"{folder} has neither {INDEX} nor model.safetensors: only safetensors checkpoints are read"
            )
        return TensorFiles([folder / "model.safetensors"])
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointFileError(f"{folder / INDEX} is not an index of safetensors files: {error!r}") from None
    files = TensorFiles(folder / name for name in sorted(set(weight_map.values())))
    for name, file in weight_map.items():
        if name not in files.shapes:
            raise CheckpointFileError(f"tensor {name} is missing from {folder / file}, where {INDEX} says it is")
    return files
