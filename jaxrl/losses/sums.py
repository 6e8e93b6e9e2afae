"""What a loss reports beside its value: sums over terms, which add up over rows, microbatches and devices."""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.corrections import correction, kept
from jaxrl.metrics.names import PARITY

LossSums = dict[str, jax.Array]  # sums over terms; a key that ends in `_max` is a maximum


def ratio_sums(a: Aligned, clipped: jax.Array, config: AlgorithmConfig) -> LossSums:
    """Sums over the used terms, without gradient.

    `parity/` is |π − π₀|: trainer against sampler where the version is the current one, policy drift
    included elsewhere. `kl` is the k3 estimate of KL(π₀‖π), r − 1 − log r (Schulman, "Approximating KL
    Divergence", 2020); `kl_reference` that of KL(π‖reference), if there is a reference. `kept` counts the terms that no
    mask silenced; all of them stay in the denominators. `importance` is π/μ, for the effective sample size (PipelineRL,
    arXiv:2509.19128).
    """
    a = jax.tree.map(jax.lax.stop_gradient, a)
    log_ratio = a.logp - a.policy_logp
    importance = jnp.where(a.used, jnp.exp(a.logp - a.behaviour_logp), 0)
    sums = {
        "terms": jnp.sum(a.used),
        "kept": jnp.sum(a.used & kept(a, config)),
        "clip_fraction": jnp.sum(clipped & a.used),
        "ratio": jnp.sum(jnp.where(a.used, jnp.exp(log_ratio), 0)),
        "correction": jnp.sum(jnp.where(a.used, correction(a, config), 0)),
        PARITY: jnp.sum(jnp.abs(log_ratio)),
        "parity/logp_max": jnp.max(jnp.abs(log_ratio), initial=0.0),
        "kl": jnp.sum(jnp.expm1(log_ratio) - log_ratio),
        "entropy": jnp.sum(a.entropy),
        "importance": jnp.sum(importance),
        "importance_squared": jnp.sum(importance**2),
        "lag": jnp.sum(a.lag),
    }
    if a.reference_logp is not None:
        to_reference = a.reference_logp - a.logp
        sums["kl_reference"] = jnp.sum(jnp.expm1(to_reference) - to_reference)
    return sums


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
