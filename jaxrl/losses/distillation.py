"""On-policy distillation (arXiv:2306.13649; AsyncOPD [c]): the student's own samples, the teacher's log-probs of them.

Candidates are token ids with the teacher's log-prob, K or N of them at every trainable token (`teacher_ids`, `teacher_logp`);
the current policy's are computed beside it. Rewards and advantages play no part.
"""

import jax
import jax.numpy as jnp

from jaxrl.config import AlgorithmConfig
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.corrections import correction
from jaxrl.losses.penalties import penalties
from jaxrl.losses.sums import LossSums, ratio_sums


def distill_forward(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """Σ weight · Σ_k p_T(k) (log p_T(k) − log π(k)) + penalties, over the teacher's top K, whose tail is not renormalised.
    Returns (sum, metric sums)."""
    share = jnp.where(a.is_candidate, jnp.exp(a.teacher_logp), 0)
    divergence = jnp.sum(share * (a.teacher_logp - a.candidate_logp), axis=-1)
    return jnp.sum(a.weight * divergence) + penalties(a, config), ratio_sums(a, jnp.zeros_like(a.used), config)


def distill_reverse(a: Aligned, config: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """−Σ weight · 1/N Σ_n w_n · sg(log p_T(n) − log π(n)) · log π(n) + penalties: N samples of the policy at every position,
    the emitted token first; the variance falls as 1/N. The advantage is that of the current policy, for one cached when the
    token was sampled goes stale. w is the correction old/μ for the emitted token, 1 for the others, which no sampler
    truncated. Returns (sum, metric sums)."""
    advantage = jax.lax.stop_gradient(jnp.where(a.is_candidate, a.teacher_logp - a.candidate_logp, 0))
    is_emitted = jnp.arange(a.candidate_logp.shape[-1]) == 0
    factor = jnp.where(is_emitted, correction(a, config)[:, None], 1)
    objective = jnp.sum(factor * advantage * a.candidate_logp, axis=-1) / jnp.maximum(jnp.sum(a.is_candidate, axis=-1), 1)
    return -jnp.sum(a.weight * objective) + penalties(a, config), ratio_sums(a, jnp.zeros_like(a.used), config)
