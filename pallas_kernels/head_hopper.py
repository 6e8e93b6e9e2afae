"""The head over reads on NVIDIA Hopper GPUs: log-prob and entropy of chosen tokens, the logits never all in memory.

Forward is one kernel: tiles of logits stay in registers, and each thread block hands on an online softmax over its
part of the vocabulary. Backward goes over chunks of the vocabulary. One kernel computes a chunk's logits again and
leaves the gradient of its logits, [U, chunk] in 16 bits; what is left are two plain matrix products. That is four
products in all; all are of 16-bit numbers and accumulate in float32, in a fixed order.

    z = states @ head / temperature;  logp = z[target] - lse;  entropy = lse - sum(p · z)
    d logp / d z_j = [j = target] - p_j;  d entropy / d z_j = -p_j (log p_j + entropy)

Letters: U reads, N reads in whole blocks, E model width, V vocabulary, P parts of it.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.head_hopper_kernels import MULTIPLE, READS_MULTIPLE, Tiles, logits_gradient, softmax_parts
from pallas_kernels.tree_attention_hopper_tiles import LOG2E

DTYPES = ("bfloat16", "float16")
_CHUNK_BYTES = 512 * 2**20  # of the gradient of the logits that exists at a time


@dataclasses.dataclass(frozen=True)
class HeadTiles:
    """Of the two kernels; and columns of the vocabulary in a chunk of the backward pass, None: what 512 MiB hold."""

    forward: Tiles = Tiles()
    backward: Tiles = Tiles()
    chunk: int | None = None

    def chunk_of(self, num_reads: int, vocab: int) -> int:
        """Columns of a chunk: whole tiles, or all."""
        chunk = self.chunk or _CHUNK_BYTES // (2 * num_reads)
        # As even as they come, for every chunk costs the same.
        num_chunks = -(-vocab // max(chunk, self.backward.vocab))
        return min(vocab, -(-vocab // (num_chunks * self.backward.vocab)) * self.backward.vocab)


def refusal(dtype: jnp.dtype) -> str | None:
    """Why there is no kernel for a head of this dtype; None if there is one."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"the Hopper head takes {' and '.join(DTYPES)}, not {jnp.dtype(dtype).name}"
    return None


def read_logprobs(
    states: jax.Array,  # [U, E]
    head: jax.Array,  # [E, V], or [V, E] if vocab_major
    target: jax.Array,  # [U] int32 token ids; -1: ignored
    temperature: jax.Array,  # [U], > 0 where the target is not ignored
    *,
    vocab_major: bool = False,
    tiles: HeadTiles = HeadTiles(),
) -> tuple[jax.Array, jax.Array]:
    """(log-prob of the target, entropy) in nats, both [U] float32, at ``softmax(states @ head / temperature)``.

    Differentiable in states and head, not in temperature. Ignored reads give 0 and no gradient, whatever their state holds.
    `vocab_major` takes a tied embedding as it is. Raises ValueError for what has no kernel.
    """
    if states.dtype != head.dtype:
        raise ValueError(f"states are {states.dtype}, the head {head.dtype}: the Hopper head takes one dtype for both")
    if (problem := refusal(states.dtype)) is not None:
        raise ValueError(problem)
    ignored = target < 0
    states = jnp.where(ignored[:, None], 0, states)
    vocab = head.shape[0 if vocab_major else 1]
    scale = LOG2E / jnp.where(ignored, 1, lax.stop_gradient(temperature)).astype(jnp.float32)
    # A copy, of arrays of unusual sizes alone; and its transpose cuts the gradients.
    states = jnp.pad(states, ((0, -states.shape[0] % READS_MULTIPLE), (0, -states.shape[1] % MULTIPLE)))
    head = jnp.pad(head, [(0, -size % MULTIPLE) for size in head.shape])
    results = _head(
        states, head, _padded(target, -1, READS_MULTIPLE), _padded(scale, 1, READS_MULTIPLE), vocab, vocab_major, tiles
    )
    return tuple(x[: target.shape[0]] for x in results)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _head(states, head, target, scale, vocab, vocab_major, tiles):
    return _forward(states, head, target, scale, vocab, vocab_major, tiles)[0]


def _forward(states, head, target, scale, vocab, vocab_major, tiles):
    padded = partial(_padded, multiple=tiles.forward.reads)
    settings = {"vocab": vocab, "vocab_major": vocab_major, "tiles": tiles.forward}
    parts = softmax_parts(states, head, padded(target, -1), padded(scale, 1), **settings)
    highest, total, mean, chosen = (x[:, : target.shape[0]] for x in parts)
    top = highest.max(0)
    shift = highest - top
    share = jnp.exp2(shift)
    mean = ((mean + total * shift) * share).sum(0)
    total = (total * share).sum(0)
    log_total = jnp.log2(total)
    used = target >= 0
    logp = jnp.where(used, (chosen.sum(0) - top - log_total) / LOG2E, 0)
    entropy = jnp.where(used, (log_total - mean / total) / LOG2E, 0)
    return (logp, entropy), (states, head, target, scale, entropy, top + log_total)


def _backward(vocab, vocab_major, tiles, saved, cotangents):
    states, head, target, scale, entropy, lse = saved
    used = target >= 0
    d_logp, d_entropy = (jnp.where(used, x, 0) for x in cotangents)
    cooling = scale / LOG2E
    coefficients = (scale, lse, cooling * d_logp, cooling * (d_logp + d_entropy * entropy), cooling * d_entropy / LOG2E)
    padded = partial(_padded, multiple=tiles.backward.reads)
    coefficients = jnp.stack([padded(x, 0) for x in coefficients])
    axis = 0 if vocab_major else 1
    chunk = tiles.chunk_of(states.shape[0], head.shape[axis])
    num_chunks = -(-head.shape[axis] // chunk)
    settings = {"vocab": vocab, "vocab_major": vocab_major, "tiles": tiles.backward}

    def one_chunk(i, carry):
        d_states, d_head = carry
        # From the last to the first. The last one ends with the vocabulary and so begins within the one before, which has
        # their common columns for its own and writes them after it.
        first = (num_chunks - 1 - i) * chunk
        begin = jnp.minimum(first, head.shape[axis] - chunk)
        here = padded(jnp.where(target >= first, target, -1), -1)
        d_logits = logits_gradient(states, head, here, coefficients, begin, first, chunk, **settings)
        columns = lax.dynamic_slice_in_dim(head, begin, chunk, axis)
        d_states += _product(d_logits, columns, (1, axis), jnp.float32)
        factors = (d_logits, states) if vocab_major else (states, d_logits)
        d_columns = _product(*factors, (0, 0), head.dtype)
        return d_states, lax.dynamic_update_slice_in_dim(d_head, d_columns, begin, axis)

    carry = (jnp.zeros(states.shape, jnp.float32), jnp.zeros(head.shape, head.dtype))
    d_states, d_head = lax.fori_loop(0, num_chunks, one_chunk, carry)
    return d_states.astype(states.dtype), d_head, np.zeros(target.shape, jax.dtypes.float0), jnp.zeros_like(scale)


_head.defvjp(_forward, _backward)


def _product(a, b, contract, dtype):
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=dtype)


def _padded(x: jax.Array, value: int, multiple: int) -> jax.Array:
    return jnp.pad(x, (0, -x.shape[0] % multiple), constant_values=value)
