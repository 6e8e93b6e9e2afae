"""What every loss starts from: the loss terms beside what the models say of their reads, unused slots selected away.

Symbols, per term: π current log-prob, π₀ policy log-prob (`policy_logp`: the weights that sampled the token), μ behaviour
log-prob (the probability of emission), p proximal log-prob (the weights at the start of the optimizer step), A advantage.
A loss is a sum: every denominator of the optimizer step is already in `weight`, that of tokens which a mask silences
too. Letters: U reads, M terms, K candidates of a read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.data import LossTerms, Reads


class ReadLogprobs(NamedTuple):
    """What models say of the reads of a row, in nats at the read's temperature; 0 for unused reads."""

    logp: jax.Array  # [U] of the target, current policy
    entropy: jax.Array  # [U]
    reference: jax.Array | None = None  # [U] of the target, reference policy; None: not computed
    candidates: jax.Array | None = None  # [U, K] of `reads.teacher_ids`, current policy; None: not computed


class Aligned(NamedTuple):
    """Arrays [M] of one dtype, zero in unused slots whatever those held. What a run does not have is None."""

    used: jax.Array  # bool
    logp: jax.Array  # π
    entropy: jax.Array
    policy_logp: jax.Array  # π₀
    behaviour_logp: jax.Array  # μ
    advantage: jax.Array
    weight: jax.Array
    lag: jax.Array  # policy versions between the token's and the current one
    reference_logp: jax.Array | None = None
    proximal_logp: jax.Array | None = None  # p, if the rows give it
    kl_weight: jax.Array | None = None  # if the rows give it
    candidate_logp: jax.Array | None = None  # [M, K] π of the teacher's candidates; NaN-free where there is none
    teacher_logp: jax.Array | None = None  # [M, K]
    is_candidate: jax.Array | None = None  # [M, K] bool
    coefficients: dict[str, jax.Array] = {}  # of the pass without gradient: see `steps.StepTerms`


def align(
    reads: ReadLogprobs,
    tables: Reads,
    terms: LossTerms,
    step: jax.Array | int = 0,
    coefficients: dict[str, jax.Array] | None = None,
) -> Aligned:
    """The terms of one row, each with the values of its read. Unused slots (read -1) are zeroed before anything is
    computed with them, so that a NaN in one reaches neither a sum nor a gradient (0 · NaN would). `step`: the current
    policy version. `coefficients`: arrays [M]. Everything is computed in logp's dtype."""
    used, read, dtype = terms.read >= 0, jnp.maximum(terms.read, 0), reads.logp.dtype

    def of_term(x):
        return jnp.where(used.reshape(-1, *(1,) * (x.ndim - 1)), x, 0).astype(dtype)

    def given(x):  # an optional column of terms: width 0 if not given
        return of_term(x) if x.shape[0] else None

    reference = reads.reference if reads.reference is not None else tables.reference_logp
    has_candidates = reads.candidates is not None
    return Aligned(
        used=used,
        logp=of_term(reads.logp[read]),
        entropy=of_term(reads.entropy[read]),
        policy_logp=of_term(terms.policy_logp),
        behaviour_logp=of_term(terms.behaviour_logp),
        advantage=of_term(terms.advantage),
        weight=of_term(terms.weight),
        lag=of_term(jnp.maximum(step - terms.version, 0)),
        reference_logp=of_term(reference[read]) if reference.shape[0] else None,
        proximal_logp=of_term(tables.proximal_logp[read]) if tables.proximal_logp.shape[0] else None,
        kl_weight=given(terms.kl_weight),
        candidate_logp=of_term(reads.candidates[read]) if has_candidates else None,
        teacher_logp=of_term(tables.teacher_logp[read]) if has_candidates else None,
        is_candidate=used[:, None] & (tables.teacher_ids[read] >= 0) if has_candidates else None,
        coefficients={name: of_term(x) for name, x in (coefficients or {}).items()},
    )
