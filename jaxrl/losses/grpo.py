"""GRPO (DeepSeekMath, arXiv:2402.03300): advantages relative to the group, under PPO's clip.

The family's choices are data, not code: clip_high > clip_low is DAPO's (arXiv:2503.14476); `normaliser` = "sequences" is
GRPO's mean of sequence means, "tokens" DAPO's mean over the step, "constant" without `scale_by_std` is Dr. GRPO
(arXiv:2503.20783); `baseline` = "leave_one_out" is RLOO (arXiv:2402.14740). `recipes.py` names them.
"""

import jax

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.sums import LossSums
from jaxrl.losses.surrogate import clipped_surrogate


def grpo(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """The clipped surrogate with A = (R − mean)/(std + ε) of the group, one value for every token of a trajectory
    (`advantages.group_advantages`). Returns (sum, metric sums)."""
    return clipped_surrogate(a, config)
