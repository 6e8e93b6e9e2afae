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

    `parity/` is of d = log π₀ − log π where the version is the current one, and so of trainer against sampler: |d|, what KL
    costs by its k1 and k3 estimates, terms beyond a difference; `current` counts those terms. `drift` is |d| elsewhere. `kl` is the k3 estimate of KL(π₀‖π), r − 1 − log r (Schulman, "Approximating KL
    Divergence", 2020); `kl_reference` that of KL(π‖reference), if there is a reference. `kept` counts the terms that no
    mask silenced; all of them stay in the denominators. `importance` is π/μ, for the effective sample size (PipelineRL,
    arXiv:2509.19128).
    """
    a = jax.tree.map(jax.lax.stop_gradient, a)
    log_ratio = a.logp - a.policy_logp
    is_current = a.used & (a.lag == 0)
    d, drift = jnp.where(is_current, -log_ratio, 0), jnp.where(is_current, 0, jnp.abs(log_ratio))
    importance = jnp.where(a.used, jnp.exp(a.logp - a.behaviour_logp), 0)
    sums = {
        "terms": jnp.sum(a.used),
        "kept": jnp.sum(a.used & kept(a, config)),
        "clip_fraction": jnp.sum(clipped & a.used),
        "ratio": jnp.sum(jnp.where(a.used, jnp.exp(log_ratio), 0)),
        "correction": jnp.sum(jnp.where(a.used, correction(a, config), 0)),
        "current": jnp.sum(is_current),
        PARITY: jnp.sum(jnp.abs(d)),
        "parity/logp_max": jnp.max(jnp.abs(d), initial=0.0),
        "parity/kl_k1": jnp.sum(d),
        "parity/kl_k3": jnp.sum(jnp.expm1(-d) + d),
        "parity/beyond_0.05": jnp.sum(jnp.abs(d) > 0.05),
        "parity/beyond_0.5": jnp.sum(jnp.abs(d) > 0.5),
        "drift": jnp.sum(drift),
        "drift_max": jnp.max(drift, initial=0.0),
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
    """The step's metrics from its sums: means over terms (of `parity/` over those of the current version, of `drift` over the
    others), maxima, the counts, and `effective_sample_size` = (Σ ρ)² / (n Σ ρ²) with ρ = π/μ, in (0, 1]."""

    def count(key):
        if key.startswith("parity/"):
            return sums["current"]
        return sums["terms"] - sums["current"] if key == "drift" else sums["terms"]

    counted = ("terms", "current")
    out = {key: x if key in counted or key.endswith("_max") else x / jnp.maximum(count(key), 1) for key, x in sums.items()}
    if "importance_squared" in out:
        out["effective_sample_size"] = out["importance"] ** 2 / jnp.maximum(out.pop("importance_squared"), 1e-30)
    return out
