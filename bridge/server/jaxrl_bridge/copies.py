"""What vLLM does to load weights, recorded once and repeated as copies alone.

vLLM's loaders look every tensor's place up in Python, on every publish, while generation stands still. What comes of it is always the same: parts of the incoming tensors are copied to parts of the parameters. Those copies are
recorded while vLLM loads, and later publishes repeat them in one call.
"""

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass(frozen=True)
class _Copy:
    """Part of incoming tensor number `source`, `offset` elements into it, to `target`, a view of a parameter."""

    source: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    target: torch.Tensor


@dataclass(frozen=True)
class Copies:
    """All that loading these tensors does. `loaded`: what `load_weights` returned; `addresses`: of the parameters then."""

    copies: tuple[_Copy, ...]
    loaded: set[str] | None
    addresses: tuple[int, ...]

    def fit(self, model: torch.nn.Module) -> bool:
        """Whether the parameters still are where the copies go."""
        return self.addresses == _addresses(model)

    def repeat(self, tensors: list[torch.Tensor]) -> None:
        """Loads tensors of the same names, shapes and dtypes, in the same order."""
        sources = [
            tensors[copy.source].as_strided(copy.shape, copy.stride, tensors[copy.source].storage_offset() + copy.offset)
            for copy in self.copies
        ]
        torch._foreach_copy_([copy.target for copy in self.copies], sources)


class Recorder(TorchDispatchMode):
    """Records, as a context around `load_weights`, what becomes of contiguous `tensors`."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self._ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
        self._tensors = tensors
        self._copies: list[_Copy] = []
        self._only_copies = True

    def copies(self, model: torch.nn.Module, loaded: set[str] | None) -> Copies | None:
        """None if anything but views and copies was made of the tensors: then only vLLM can load them."""
        return Copies(tuple(self._copies), loaded, _addresses(model)) if self._only_copies else None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten.copy_.default and (source := self._find(args[1])) is not None:
            target, part = args[:2]
            tensor = self._tensors[source]
            if target.dtype != part.dtype or tensor.dtype != part.dtype or target.shape != part.shape:
                self._only_copies = False  # a conversion, or a broadcast
            offset = (part.data_ptr() - tensor.data_ptr()) // part.element_size()
            self._copies.append(_Copy(source, offset, part.shape, part.stride(), target.detach()))
        elif not function.is_view:
            inputs = (x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor))
            self._only_copies &= all(self._find(x) is None for x in inputs)
        return function(*args, **kwargs)

    def _find(self, x: torch.Tensor) -> int | None:
        if x.numel() == 0 or x.device != self._tensors[0].device:
            return None
        address = x.data_ptr()
        return next((i for i, (begin, end) in enumerate(self._ranges) if begin <= address < end), None)


def _addresses(model: torch.nn.Module) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())
