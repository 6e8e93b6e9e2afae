"""What every loss starts from and reports: the loss terms with unused slots selected away, and sums.

Symbols, per term: π current log-prob, π₀ policy log-prob (`policy_logp`: the weights that sampled the
token), μ behaviour log-prob (the probability of emission), A advantage. A loss is a sum: every
denominator of the optimizer step is already in `weight`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.data import LossTerms
from jaxrl.metrics.names import PARITY

LossSums = dict[str, jax.Array]  # sums over terms; a key that ends in `_max` is a maximum


class Aligned(NamedTuple):
    """Float arrays of the terms' shape; zero in unused slots, whatever those held."""

    used: jax.Array  # bool
    logp: jax.Array  # π
    entropy: jax.Array
    policy_logp: jax.Array  # π₀
    behaviour_logp: jax.Array  # μ
    advantage: jax.Array
    weight: jax.Array


def select(logp: jax.Array, entropy: jax.Array, terms: LossTerms) -> Aligned:
    """Zeroes unused slots (read -1) before anything is computed with them, so that a NaN in one
    reaches neither a sum nor a gradient (0 · NaN would). Arrays of one shape, that of `terms`;
    everything is computed in logp's dtype."""
    used = terms.read >= 0
    floats = (logp, entropy, terms.policy_logp, terms.behaviour_logp, terms.advantage, terms.weight)
    return Aligned(used, *(jnp.where(used, x, 0).astype(logp.dtype) for x in floats))


def correction(a: Aligned, config: AlgorithmConfig) -> jax.Array:
    """min(exp(π₀ − μ), cap), without gradient: the truncated importance weight that corrects for
    truncated or lossy sampling; 1 when sampling is lossless. It never meets a clip: clips act on π − π₀."""
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(a.policy_logp - a.behaviour_logp), config.correction_cap))


def entropy_bonus(a: Aligned, config: AlgorithmConfig) -> jax.Array:
    """Scalar to subtract from a loss: the weighted entropy of the distributions the terms were read from."""
    return config.entropy_weight * jnp.sum(a.weight * a.entropy)


def ratio_sums(a: Aligned, clipped: jax.Array, config: AlgorithmConfig) -> LossSums:
    """Sums over the used terms, without gradient.

    `parity/` is |π − π₀|: trainer against sampler where the version is the current one, policy drift
    included elsewhere. `kl` is the k3 estimate of KL(π₀‖π), r − 1 − log r (Schulman, "Approximating KL
    Divergence", 2020). `importance` is π/μ, for the effective sample size (PipelineRL, arXiv:2509.19128).
    """
    a = jax.tree.map(jax.lax.stop_gradient, a)
    log_ratio = a.logp - a.policy_logp
    importance = jnp.where(a.used, jnp.exp(a.logp - a.behaviour_logp), 0)
    return {
        "terms": jnp.sum(a.used),
        "clip_fraction": jnp.sum(clipped & a.used),
        "ratio": jnp.sum(jnp.where(a.used, jnp.exp(log_ratio), 0)),
        "correction": jnp.sum(jnp.where(a.used, correction(a, config), 0)),
        PARITY: jnp.sum(jnp.abs(log_ratio)),
        "parity/logp_max": jnp.max(jnp.abs(log_ratio), initial=0.0),
        "kl": jnp.sum(jnp.expm1(log_ratio) - log_ratio),
        "entropy": jnp.sum(a.entropy),
        "importance": jnp.sum(importance),
        "importance_squared": jnp.sum(importance**2),
    }


def add_sums(a: LossSums, b: LossSums) -> LossSums:
    """The sums of two sets of terms together."""
    return {key: jnp.maximum(a[key], b[key]) if key.endswith("_max") else a[key] + b[key] for key in a}


def reduce_sums(sums: LossSums) -> LossSums:
    """Sums of [R] rows to scalars."""
    return {key: jnp.max(x) if key.endswith("_max") else jnp.sum(x) for key, x in sums.items()}


def means(sums: LossSums) -> LossSums:
    """The step's metrics from its sums: means over terms, maxima, the count, and
    `effective_sample_size` = (Σ ρ)² / (n Σ ρ²) with ρ = π/μ, in (0, 1]."""
    n = jnp.maximum(sums["terms"], 1)
    out = {key: x if key == "terms" or key.endswith("_max") else x / n for key, x in sums.items()}
    if "importance_squared" in out:
        out["effective_sample_size"] = out["importance"] ** 2 / jnp.maximum(out.pop("importance_squared"), 1e-30)
    return out
