"""What is added to a policy-gradient loss: the entropy bonus, and a KL penalty towards a reference policy."""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned


def penalties(a: Aligned, config: AlgorithmConfig) -> jax.Array:
    """Scalar to add to a loss: Σ kl_weight · k(π, reference) − entropy_weight · Σ weight · entropy, the entropy that of the
    distributions the terms were read from. `kl_weight` is the rows' own if they give it, else `algorithm.kl_weight` ·
    weight."""
    entropy = -config.entropy_weight * jnp.sum(a.weight * a.entropy)
    if config.kl_weight == 0:
        return entropy
    weight = config.kl_weight * a.weight if a.kl_weight is None else a.kl_weight
    return entropy + jnp.sum(weight * kl_estimate(a, config.kl_estimator))


def kl_estimate(a: Aligned, estimator: str) -> jax.Array:
    """Per-token estimate of KL(π‖reference) from the sampled token, d = π − reference (Schulman, "Approximating KL
    Divergence", 2020):

    - "k1": d. Its own gradient is zero on average, so it is given k2's, d ∇π: what −d in the reward would give;
    - "k2": d²/2;
    - "k3": exp(−d) − 1 + d, GRPO's (arXiv:2402.03300, eq. 4).

    Left out: an importance weight for tokens sampled off the policy.
    """
    d = a.logp - a.reference_logp
    if estimator == "k1":
        held = jax.lax.stop_gradient(d)
        return held + held * (a.logp - jax.lax.stop_gradient(a.logp))
    return d**2 / 2 if estimator == "k2" else jnp.expm1(-d) + d
