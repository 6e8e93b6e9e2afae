"""From packed rows to log-probs of reads, and to the loss of each row.

Letters: R rows, T tokens, U reads, M loss terms, E model width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.attention import tree_attention
from jaxrl.config import AlgorithmConfig, AttentionConfig
from jaxrl.losses.aligned import LossSums
from jaxrl.mesh import row_shards
from jaxrl.models.decoder import Decoder, head_matrix
from jaxrl.models.head import read_logprobs
from jaxrl.trainer.placement import PlacedRows

# Reads of one device whose logits exist at a time: enough to fill a matmul, and at 150,000 tokens of
# vocabulary 0.3 GB in float32.
_HEAD_READS = 512

Variables = dict[str, Any]


def row_logprobs(
    variables: Variables, rows: PlacedRows, decoder: Decoder, attention: AttentionConfig, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """(log-prob, entropy) of every read, [R, U] in nats at the read's temperature; 0 for unused reads."""
    architecture = decoder.architecture

    def attend(q, k, v, cache):
        scale = architecture.attention_scale
        return tree_attention(q, k, v, rows.offset, rows.subtree_end, scale=scale, config=attention, mesh=mesh), cache

    hidden_RTE, _ = decoder.apply(variables, rows.tokens, rows.positions, attend)
    reads = rows.reads
    states_RUE = jnp.take_along_axis(hidden_RTE, jnp.maximum(reads.state, 0)[..., None], axis=1)
    # Gathered over fsdp once here, not once per chunk of reads.
    head_EV = jax.lax.with_sharding_constraint(
        head_matrix(variables["params"], architecture).astype(decoder.dtype), NamedSharding(mesh, PartitionSpec(None, "tensor"))
    )
    rows_per_device = reads.state.shape[0] // row_shards(mesh)
    chunk = max(1, _HEAD_READS // rows_per_device)
    return read_logprobs(states_RUE, head_EV, reads.target, reads.temperature, chunk, mesh=mesh)


def row_losses(
    logp_RU: jax.Array, entropy_RU: jax.Array, rows: PlacedRows, loss: Callable, algorithm: AlgorithmConfig
) -> tuple[jax.Array, LossSums]:
    """The loss and the metric sums of each row, [R]. A read that several trajectories share is
    gathered once for each."""

    def one_row(logp_U, entropy_U, terms_M):
        read = jnp.maximum(terms_M.read, 0)
        return loss(logp_U[read], entropy_U[read], terms_M, algorithm)

    return jax.vmap(one_row)(logp_RU, entropy_RU, rows.terms)
