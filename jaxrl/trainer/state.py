"""What an optimizer step turns into the next: parameters, optimizer state and the policy version."""

from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A pytree. With adapters they are `trainable` and the base is `frozen`, without gradient or
    optimizer state; otherwise `frozen` is empty. A loss that needs a reference policy has it in `reference`, a
    copy of the parameters at step 0, or with adapters in the base."""

    step: jax.Array  # int32 []: optimizer updates made so far, which is the policy version
    trainable: Any
    frozen: Any
    opt_state: Any
    reference: Any = field(default_factory=dict)  # the reference policy's parameters; empty: none is needed, or it is the base


def variables_of(trainable: Any, frozen: Any) -> dict[str, Any]:
    """The decoder's variables: {"params": base}, and {"lora": adapters} if it has any."""
    return {"params": frozen, "lora": trainable} if frozen else {"params": trainable}
