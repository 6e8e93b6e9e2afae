"""SAT, staleness-adaptive trust region [t]: PPO's bounds, narrowed for tokens whose log-ratio is an outlier of the step.

d = sg(π − old) (the paper's denominator is μ, with lossless sampling the same as π₀; clips never act on
π/μ here). With q the 0.90-quantile of |d| over the step, c = 1 if |d| ≤ q, else q²/(q² + (|d| − q)²) ([r]: the paper's kernel
is not published). Never looser than PPO.
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.old_policy import log_ratio
from jaxrl.losses.steps import StepTerms
from jaxrl.losses.sums import LossSums
from jaxrl.losses.surrogate import surrogate

QUANTILE = 0.90  # the paper's
SCALE = "sat/scale"


def sat(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """The clipped surrogate with bounds 1 + clip_high · c where d > 0 and 1 − clip_low · c where d < 0. Returns (sum,
    metric sums)."""
    d, q = log_ratio(a, config), a.coefficients[SCALE]
    held = jax.lax.stop_gradient(d)
    beyond = jnp.maximum(jnp.abs(held) - q, 0)
    narrow = jnp.where(beyond > 0, q**2 / jnp.maximum(q**2 + beyond**2, jnp.finfo(q.dtype).tiny), 1)
    low = 1 - config.clip_low * jnp.where(held < 0, narrow, 1)
    high = 1 + config.clip_high * jnp.where(held > 0, narrow, 1)
    return surrogate(a, jnp.exp(d), low, high, config)


def sat_coefficients(step: StepTerms, config: AlgorithmConfig) -> dict[str, jax.Array]:
    """q, the same for every term: interpolated between the two order statistics around it."""
    size = jnp.abs(log_ratio(step.terms, config))
    ordered = jnp.sort(jnp.where(step.terms.used, size, jnp.inf))
    place = QUANTILE * jnp.maximum(jnp.sum(step.terms.used) - 1, 0).astype(size.dtype)
    below = jnp.floor(place).astype(jnp.int32)
    first, second = ordered[below], ordered[jnp.minimum(below + 1, len(ordered) - 1)]
    share = place - below
    q = first + jnp.where(share > 0, share * (second - first), 0)
    return {SCALE: jnp.broadcast_to(jnp.where(jnp.isfinite(q), q, 0), size.shape)}
