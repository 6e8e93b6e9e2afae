"""What an optimizer step turns into the next: parameters, optimizer state and the policy version."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A pytree. With adapters they are `trainable` and the base is `frozen`, without gradient or
    optimizer state; otherwise `frozen` is empty."""

    step: jax.Array  # int32 []: optimizer updates made so far, which is the policy version
    trainable: Any
    frozen: Any
    opt_state: Any


def variables_of(trainable: Any, frozen: Any) -> dict[str, Any]:
    """The decoder's variables: {"params": base}, and {"lora": adapters} if it has any."""
    return {"params": frozen, "lora": trainable} if frozen else {"params": trainable}
