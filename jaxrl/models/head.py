"""The head over reads: log-prob and entropy of chosen tokens, without the logits of all of them.

Reads are taken in chunks; the backward pass computes a chunk's logits again instead of keeping them.
Chunk j takes the reads j, j + n, j + 2n, … of n chunks: a strided cut leaves a sharding of the reads
over devices intact, where consecutive chunks would move them.

Letters: R rows, U reads of a row, c reads of a chunk, n chunks, E model width, V vocabulary.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl.config import ConfigError
from jaxrl.mesh import ROW_AXES, row_shards


def read_logprobs(
    states: jax.Array,  # [N, E] or [R, U, E]
    head: jax.Array,  # [E, V]
    target: jax.Array,  # [N] or [R, U] int32 token ids; -1: ignored
    temperature: jax.Array,  # [N] or [R, U], > 0 where the target is not ignored
    chunk: int,
    *,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(log-prob of the target, entropy of the distribution) in nats, both of target's shape, at
    ``softmax(states @ head / temperature)``.

    Accumulates in float32 (float64 for float64 states). Differentiable in states and head through
    both results, not in temperature. Ignored reads give 0 and no gradient, whatever their state
    holds. At most R · chunk · V logits exist at a time.

    Works under GSPMD as it is. With `mesh`, reads [R, U] are cut by hand over its row and context axes
    (`chunk`, then, counts the reads of one row on one device), which leaves GSPMD the vocabulary alone
    and adds up the head's gradient over devices once instead of once per chunk. Raises ConfigError if
    the reads cannot be split evenly.
    """
    if mesh is not None and row_shards(mesh) * mesh.shape["context"] > 1:
        return _on_mesh(states, head, target, temperature, chunk, mesh)
    if states.ndim == 2:
        logp, entropy = read_logprobs(states[None], head, target[None], temperature[None], chunk)
        return logp[0], entropy[0]
    num_reads = target.shape[1]
    chunk = min(chunk, num_reads)
    num_chunks = math.ceil(num_reads / chunk)
    # As even as they come: 1030 reads in chunks of at most 512 are three of 344, not two and a rest.
    chunk = math.ceil(num_reads / num_chunks)
    padding = chunk * num_chunks - num_reads

    def cut(x, fill):  # [R, U, ...] -> [n, R, c, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], chunk, num_chunks, *x.shape[2:]), 2, 0)

    def join(x):  # [n, R, c] -> [R, U]
        return jnp.moveaxis(x, 0, 2).reshape(x.shape[1], chunk * num_chunks)[:, :num_reads]

    ignored = target < 0
    states = jnp.where(ignored[..., None], 0, states)
    temperature = jnp.where(ignored, 1, temperature)
    logp, entropy = _chunks(cut(states, 0), head, cut(target, -1), cut(lax.stop_gradient(temperature), 1))
    return join(logp), join(entropy)


def check_split(num_reads: int, mesh: Mesh) -> None:
    """Raises ConfigError if the reads of a row cannot be split evenly over the devices that share the row."""
    if num_reads % (context := mesh.shape["context"]):
        raise ConfigError(
            "packing.reads", f"{num_reads} reads cannot be split over mesh.context = {context}: make it a multiple"
        )


def _on_mesh(states, head, target, temperature, chunk, mesh):
    check_split(target.shape[1], mesh)
    reads = PartitionSpec(ROW_AXES, "context")
    return jax.shard_map(
        partial(read_logprobs, chunk=chunk),
        mesh=mesh,
        in_specs=(reads, PartitionSpec(), reads, reads),
        out_specs=reads,
        axis_names={*ROW_AXES, "context"},
        check_vma=False,  # the loops start from constants, which the check would refuse
    )(states, head, target, temperature)


@jax.custom_vjp
def _chunks(states, head, target, temperature):
    return _forward(states, head, target, temperature)[0]


def _forward(states_nRcE, head, target_nRc, temperature_nRc):
    def one_chunk(_, xs):
        states_RcE, target_Rc, temperature_Rc = xs
        logits = _logits(states_RcE, head, temperature_Rc)
        top = logits.max(-1)
        shifted = logits - top[..., None]
        weights = jnp.exp(shifted)
        total = weights.sum(-1)
        log_total = jnp.log(total)
        logp = jnp.where(_is_target(logits, target_Rc), shifted, 0).sum(-1) - log_total
        entropy = log_total - (weights * shifted).sum(-1) / total
        used = target_Rc >= 0
        return None, (jnp.where(used, logp, 0), jnp.where(used, entropy, 0), top + log_total)

    _, (logp, entropy, lse) = lax.scan(one_chunk, None, (states_nRcE, target_nRc, temperature_nRc))
    return (logp, entropy), (states_nRcE, head, target_nRc, temperature_nRc, entropy, lse)


def _backward(saved, cotangents):
    states_nRcE, head, target_nRc, temperature_nRc, entropy_nRc, lse_nRc = saved
    dtype = jnp.promote_types(states_nRcE.dtype, jnp.float32)

    def one_chunk(d_head, xs):
        states_RcE, target_Rc, temperature_Rc, entropy_Rc, lse_Rc, d_logp_Rc, d_entropy_Rc = xs
        used = target_Rc >= 0
        d_logp_Rc, d_entropy_Rc = jnp.where(used, d_logp_Rc, 0), jnp.where(used, d_entropy_Rc, 0)
        logits = _logits(states_RcE, head, temperature_Rc)
        log_probs = logits - lse_Rc[..., None]
        # d logp / d z_j = [j = target] - p_j ;  d entropy / d z_j = -p_j (log p_j + entropy)
        slope = d_logp_Rc[..., None] + d_entropy_Rc[..., None] * (log_probs + entropy_Rc[..., None])
        d_logits = jnp.where(_is_target(logits, target_Rc), d_logp_Rc[..., None], 0) - jnp.exp(log_probs) * slope
        d_logits = (d_logits / temperature_Rc[..., None]).astype(states_RcE.dtype)
        d_states = jnp.einsum("RcV,EV->RcE", d_logits, head, preferred_element_type=dtype)
        d_head += jnp.einsum("RcE,RcV->EV", states_RcE, d_logits, preferred_element_type=dtype)
        return d_head, d_states.astype(states_RcE.dtype)

    xs = (states_nRcE, target_nRc, temperature_nRc, entropy_nRc, lse_nRc, *cotangents)
    d_head, d_states = lax.scan(one_chunk, jnp.zeros(head.shape, dtype), xs)
    return d_states, d_head.astype(head.dtype), np.zeros(target_nRc.shape, jax.dtypes.float0), jnp.zeros_like(temperature_nRc)


_chunks.defvjp(_forward, _backward)


def _logits(states_RcE, head, temperature_Rc):
    dtype = jnp.promote_types(states_RcE.dtype, jnp.float32)
    logits = jnp.einsum("RcE,EV->RcV", states_RcE, head, preferred_element_type=dtype)
    return logits / temperature_Rc[..., None].astype(dtype)


def _is_target(logits, target_Rc):
    """[R, c, V] bool. A comparison, not a gather: it stays local when the vocabulary is sharded."""
    return lax.broadcasted_iota(jnp.int32, logits.shape, 2) == target_Rc[..., None]
