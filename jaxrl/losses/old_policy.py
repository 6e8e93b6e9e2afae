"""The policy that a ratio compares the current one with: the one that sampled the token, or the proximal one.

Decoupled PPO (Hilton et al., arXiv:2110.00641; for language models AReaL, arXiv:2505.24298 [c]) clips π/p and corrects with
p/μ: a stale token is weighted, not clipped away. With one optimizer step per batch p is π detached: the
clip never fires. CoPRIS (arXiv:2511.05589 [c]): a partial rollout's tokens each keep the log-prob that the trainer computed
for their own stage; together they are π₀.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import AlgorithmConfig
from jaxrl.data import Trajectory
from jaxrl.losses.aligned import Aligned


def old_logp(a: Aligned, config: AlgorithmConfig) -> jax.Array:
    """Log-prob under the old policy, without gradient, by `algorithm.old_policy`:

    - "sampling": π₀;
    - "proximal": p, of the rows if they give it, else π (exact for one optimizer step per batch);
    - "interpolated": log p ≈ log μ + a(log π − log μ), a = (lag − 1)/lag, and μ at lag 0: A-3PO
      (arXiv:2512.06547 [r]: a after the versions of the three policies, p being one behind π).
    """
    if config.old_policy == "sampling":
        return jax.lax.stop_gradient(a.policy_logp)
    if config.old_policy == "interpolated":
        share = jnp.maximum(a.lag - 1, 0) / jnp.maximum(a.lag, 1)
        return jax.lax.stop_gradient(a.behaviour_logp + share * (a.logp - a.behaviour_logp))
    return jax.lax.stop_gradient(a.logp if a.proximal_logp is None else a.proximal_logp)


def log_ratio(a: Aligned, config: AlgorithmConfig) -> jax.Array:
    """log r = π − old: what clips act on. The correction old/μ never meets a clip."""
    return a.logp - old_logp(a, config)


def with_stages(trajectory: Trajectory, stages: Sequence[tuple[int, np.ndarray]]) -> Trajectory:
    """The trajectory with π₀ as the trainer computed it, stage by stage (CoPRIS). stages: (policy version, log-probs [L])
    each; a token takes the values of its own version. Raises ValueError naming a version that is missing."""
    policy = trajectory.policy_logp.copy()
    missing = set(trajectory.version[trajectory.trainable].tolist()) - {version for version, _ in stages}
    if missing:
        raise ValueError(f"no log-probs of policy version {min(missing)}, which sampled some of the tokens")
    for version, logp in stages:
        of_stage = trajectory.trainable & (trajectory.version == version)
        policy[of_stage] = logp[of_stage]
    return replace(trajectory, policy_logp=policy)
