"""Importance weights for what the old policy and the sampler make different: truncated, masked, by token or by sequence.

ρ = exp(old − μ), without gradient. TIS (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training", 2025; verl, TRL [c]) bounds it by min(ρ, C); MIS (verl, TRL [c]) zeroes it outside [low, high]. A sequence is an
episode: every term of all its trajectories. Masked tokens keep their place in the denominators.
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.old_policy import old_logp
from jaxrl.losses.steps import StepTerms

LOG_RHO, TERMS, LEAST = "correction/log_rho", "correction/terms", "correction/least"


def correction(a: Aligned, config: AlgorithmConfig) -> jax.Array:
    """w = min(ρ, cap), 0 where masked, without gradient; 1 when sampling is lossless and the old policy is that which
    sampled. At "sequence" level ρ is the product over the episode."""
    log_rho = a.coefficients[LOG_RHO] if config.correction_level == "sequence" else _log_rho(a, config)
    bounded = jnp.exp(jnp.minimum(log_rho, jnp.log(config.correction_cap)))
    return jnp.where(kept(a, config), bounded, 0)


def kept(a: Aligned, config: AlgorithmConfig) -> jax.Array:
    """bool [M]: whether `mask_low` ≤ ρ ≤ `mask_high`, ρ of the token, the product over its episode, or that product to the
    power 1/terms ("geometric"), and no ρ of the episode is below `veto`."""
    keep = jnp.ones_like(a.used)
    if config.mask_level != "none":
        log_rho = _log_rho(a, config) if config.mask_level == "token" else a.coefficients[LOG_RHO]
        if config.mask_level == "geometric":
            log_rho = log_rho / jnp.maximum(a.coefficients[TERMS], 1)
        # In logarithms, so that a product over a long episode does not overflow; low = 0 bounds nothing.
        keep &= (log_rho >= jnp.log(config.mask_low)) & (log_rho <= jnp.log(config.mask_high))
    if config.veto > 0:
        keep &= a.coefficients[LEAST] >= jnp.log(config.veto)
    return keep


def needs_coefficients(config: AlgorithmConfig) -> bool:
    return config.correction_level == "sequence" or config.mask_level in ("sequence", "geometric") or config.veto > 0


def correction_coefficients(step: StepTerms, config: AlgorithmConfig) -> dict[str, jax.Array]:
    """What `correction` needs of whole episodes."""
    log_rho = _log_rho(step.terms, config)
    return {
        LOG_RHO: step.episode_sum(log_rho),
        TERMS: step.episode_sum(jnp.ones_like(log_rho)),
        LEAST: step.episode_min(log_rho),
    }


def _log_rho(a: Aligned, config: AlgorithmConfig) -> jax.Array:
    return old_logp(a, config) - jax.lax.stop_gradient(a.behaviour_logp)
