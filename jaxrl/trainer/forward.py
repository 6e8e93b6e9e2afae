"""From packed rows to log-probs of reads, to the terms beside them, and to the loss of each row.

Letters: R rows, T tokens, U reads, M loss terms, K candidates of a read, E model width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.attention import tree_attention
from jaxrl.config import AlgorithmConfig, AttentionConfig
from jaxrl.data import Reads
from jaxrl.losses import Loss
from jaxrl.losses.aligned import Aligned, ReadLogprobs, align
from jaxrl.losses.sums import LossSums
from jaxrl.mesh import row_shards
from jaxrl.models.decoder import Decoder, stored_head
from jaxrl.models.head import read_logprobs
from jaxrl.models.head_kernel import choose_head, kernel_logprobs
from jaxrl.trainer.placement import PlacedRows

# Reads of one device whose logits exist at a time: enough to fill a matmul, and at 150,000 tokens of
# vocabulary 0.3 GB in float32.
_HEAD_READS = 512

Variables = dict[str, Any]


def row_logprobs(
    variables: Variables, rows: PlacedRows, decoder: Decoder, attention: AttentionConfig, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """(log-prob, entropy) of every read, [R, U] in nats at the read's temperature; 0 for unused reads."""
    reads = read_rows(variables, rows, decoder, attention, mesh)
    return reads.logp, reads.entropy


def read_rows(
    variables: Variables,
    rows: PlacedRows,
    decoder: Decoder,
    attention: AttentionConfig,
    mesh: Mesh,
    *,
    candidates: bool = False,
) -> ReadLogprobs:
    """The policy's log-prob and entropy of every read, arrays [R, U] in nats at the read's temperature, 0 for unused reads;
    and with `candidates` its log-probs of `reads.teacher_ids`, [R, U, K]."""
    architecture = decoder.architecture

    def attend(q, k, v, cache):
        scale = architecture.attention_scale
        return tree_attention(q, k, v, rows.offset, rows.subtree_end, scale=scale, config=attention, mesh=mesh), cache

    hidden_RTE, _ = decoder.apply(variables, rows.tokens, rows.positions, attend)
    reads = rows.reads
    states_RUE = jnp.take_along_axis(hidden_RTE, jnp.maximum(reads.state, 0)[..., None], axis=1)
    # Gathered over fsdp once here, not once per chunk of reads.
    head, vocab_major = stored_head(variables["params"], architecture)
    whole = PartitionSpec("tensor", None) if vocab_major else PartitionSpec(None, "tensor")
    head = jax.lax.with_sharding_constraint(head.astype(decoder.dtype), NamedSharding(mesh, whole))
    head_EV = head.T if vocab_major else head
    kernel = choose_head(attention.impl, mesh, jnp.dtype(decoder.dtype).name)
    if kernel is not None:
        arrays = (states_RUE, head, reads.target, reads.temperature)
        logp, entropy = kernel_logprobs(kernel, *arrays, vocab_major=vocab_major, mesh=mesh)
    else:
        rows_per_device = reads.state.shape[0] // row_shards(mesh)
        chunk = max(1, _HEAD_READS // rows_per_device)
        logp, entropy = read_logprobs(states_RUE, head_EV, reads.target, reads.temperature, chunk, mesh=mesh)
    of_candidates = _candidate_logprobs(states_RUE, head_EV, logp, reads) if candidates else None
    return ReadLogprobs(logp, entropy, candidates=of_candidates)


def _candidate_logprobs(states_RUE: jax.Array, head_EV: jax.Array, logp_RU: jax.Array, reads: Reads) -> jax.Array:
    """[R, U, K], from the target's log-prob: log π(k) = log π(target) + (logit of k − logit of the target) / temperature. So the
    normaliser over the vocabulary is computed once, by the head. 0 in unused reads, arbitrary where there is no candidate."""
    used = reads.target >= 0
    states = jnp.where(used[..., None], states_RUE, 0)
    columns_VE = head_EV.T
    own = columns_VE[jnp.maximum(reads.target, 0)]

    @jax.checkpoint  # the columns are gathered again: kept, they would be K times the states
    def one(ids_RU):
        difference = columns_VE[jnp.maximum(ids_RU, 0)].astype(logp_RU.dtype) - own.astype(logp_RU.dtype)
        return jnp.sum(states.astype(logp_RU.dtype) * difference, axis=-1)

    _, logits = jax.lax.scan(lambda carry, ids: (carry, one(ids)), None, jnp.moveaxis(reads.teacher_ids, -1, 0))
    temperature = jnp.where(used, reads.temperature, 1).astype(logp_RU.dtype)
    return jnp.where(used[..., None], logp_RU[..., None] + jnp.moveaxis(logits, 0, -1) / temperature[..., None], 0)


def row_terms(
    reads: ReadLogprobs, rows: PlacedRows, step: Any = 0, coefficients: dict[str, jax.Array] | None = None
) -> Aligned:
    """The loss terms of rows beside what is said of their reads, [R, M]. A read that several trajectories share is gathered
    once for each. `coefficients`: arrays [R, M]; `step`: the current policy version."""

    def one_row(reads, tables, terms, coefficients):
        return align(reads, tables, terms, step, coefficients)

    return jax.vmap(one_row)(reads, rows.reads, rows.terms, coefficients or {})


def row_losses(terms: Aligned, loss: Loss, algorithm: AlgorithmConfig) -> tuple[jax.Array, LossSums]:
    """The loss and the metric sums of each row, [R]."""
    return jax.vmap(lambda a: loss.value(a, algorithm))(terms)
