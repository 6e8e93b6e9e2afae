"""PPO's clipped objective (arXiv:1707.06347, eq. 7) with advantages of any estimator, per token.

With `old_policy` = "proximal" it is decoupled PPO (see `old_policy.py`).
"""

import jax

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.sums import LossSums
from jaxrl.losses.surrogate import clipped_surrogate


def ppo_clip(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """The clipped surrogate. Nothing is assumed of the advantage: it may differ from token to token.
    Returns (sum, metric sums)."""
    return clipped_surrogate(a, config)
