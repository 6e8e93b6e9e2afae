"""PPO's clipped objective (arXiv:1707.06347, eq. 7) with advantages of any estimator, per token."""

import jax

from jaxrl.config import AlgorithmConfig
from jaxrl.data import LossTerms
from jaxrl.losses.aligned import LossSums
from jaxrl.losses.surrogate import clipped_surrogate


def ppo_clip(logp: jax.Array, entropy: jax.Array, terms: LossTerms, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """The clipped surrogate; the old policy is the one that sampled the token. Nothing is assumed of
    `terms.advantage`: it may differ from token to token. Arrays of one shape; returns (sum, metric sums)."""
    return clipped_surrogate(logp, entropy, terms, config)
