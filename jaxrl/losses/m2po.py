"""M2PO ("Prosperity before Collapse", arXiv:2510.01161 [c]): bounds the second moment of the log-ratios, not each ratio.

The bounds [exp(−t), exp(t)] are as wide as keeps the mean of d² = (log r)², cut off at t², at τ, over the tokens
that a PPO clip could touch: A > 0 and r > 1, or A < 0 and r < 1. Left out: AReaL's variant, which drops the largest
d² instead.
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.old_policy import log_ratio
from jaxrl.losses.steps import StepTerms
from jaxrl.losses.sums import LossSums
from jaxrl.losses.surrogate import surrogate

TAU = 0.04  # the paper's budget, the same in all its experiments
BOUND = "m2po/bound"


def m2po(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """−Σ weight · w · min(r A, clip(r, exp(−t), exp(t)) A) + penalties. Returns (sum, metric sums)."""
    bound = a.coefficients[BOUND]
    return surrogate(a, jnp.exp(log_ratio(a, config)), jnp.exp(-bound), jnp.exp(bound), config)


def m2po_coefficients(step: StepTerms, config: AlgorithmConfig) -> dict[str, jax.Array]:
    """t, the same for every term: Σ min(d², t²) = τ n over the n touched tokens, and infinity if their Σ d² is less."""
    d = log_ratio(step.terms, config)
    touched = step.terms.used & (step.terms.advantage * d > 0)
    n = jnp.sum(touched)
    squares = jnp.sort(jnp.where(touched, d**2, jnp.inf))  # the touched ones first
    before = jnp.cumsum(jnp.where(jnp.isfinite(squares), squares, 0)) - jnp.where(jnp.isfinite(squares), squares, 0)
    above = n - jnp.arange(len(squares))  # tokens cut off if the bound lies at or below squares[k]
    # With k tokens below the bound, t² = (τ n − Σ of those) / (n − k): the first k whose t² does not pass the next square.
    bound = (TAU * n - before) / jnp.maximum(above, 1)
    fits = (above > 0) & (bound <= squares)
    square = jnp.where(fits.any(), bound[jnp.argmax(fits)], jnp.inf)
    return {BOUND: jnp.broadcast_to(jnp.sqrt(square), d.shape)}
