"""The head over reads on TPU: log-prob and entropy of chosen tokens, the logits never all in memory.

Forward is one kernel: a tile of logits is a matrix product over blocks of the model width, and an
online softmax takes it in as soon as it is whole. Backward goes over chunks of the vocabulary. One
kernel computes a chunk's logits again and leaves the gradient of its logits, [N, chunk]; what is left
are two plain matrix products, for which XLA is the better compiler. That is three products in all,
where kernels that keep even a chunk of logits out of memory need four.

    z = states @ head / temperature;  logp = z[target] - lse;  entropy = lse - sum(p · z)
    d logp / d z_j = [j = target] - p_j;  d entropy / d z_j = -p_j (z_j - lse + entropy)

Letters: N reads, E model width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_tiles_tpu import LANES, column, matmul, widen

_FAR_BELOW = -1e30  # a logit that is none; finite, for 0 times it is wanted
DTYPES = ("bfloat16", "float32")
_VMEM = 40 * 2**20  # bytes: of the 64 MB and more that v5e, v5p and v6e have


@dataclass(frozen=True)
class HeadTiling:
    """Sizes of the blocks, multiples of 128 but for `width`, which divides the model width."""

    reads: int
    vocab: int
    width: int
    chunk: int  # of the vocabulary in the backward pass, whole blocks
    interpret: object = False  # a pltpu.InterpretParams runs the kernels on a CPU


def default_tiling(num_reads: int, width: int, dtype: jnp.dtype) -> HeadTiling:
    """A tile of 1024 × 1024 logits takes 512 operations a byte of bfloat16 operands: what TPUs balance at.
    float32 operands are twice as large, and their products six times the work."""
    side = 2048 // jnp.dtype(dtype).itemsize
    steps = [x for x in range(LANES, side + 1, LANES) if width % x == 0]
    return HeadTiling(min(side, pl.cdiv(num_reads, LANES) * LANES), side, max(steps, default=width), 8192)


def refusal(dtype: jnp.dtype) -> str | None:
    """Why there is no kernel for a head of this dtype; None if there is one."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"the TPU head takes {' and '.join(DTYPES)}, not {jnp.dtype(dtype).name}"
    return None


def read_logprobs(
    states: jax.Array,  # [N, E]
    head: jax.Array,  # [E, V], or [V, E] if vocab_major
    target: jax.Array,  # [N] int32 token ids; -1: ignored
    temperature: jax.Array,  # [N], > 0 where the target is not ignored
    *,
    vocab_major: bool = False,
    tiling: HeadTiling | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(log-prob of the target, entropy) in nats, both [N] float32, at ``softmax(states @ head / temperature)``.

    states and head are both bfloat16 or both float32; products accumulate in float32. Differentiable in
    both, not in temperature. Ignored reads give 0 and no gradient, whatever their state holds.
    """
    if states.dtype != head.dtype:
        raise ValueError(f"states are {states.dtype}, the head {head.dtype}: the TPU head takes one dtype for both")
    if (problem := refusal(states.dtype)) is not None:
        raise ValueError(problem)
    if vocab_major:
        head = head.T
    num_reads, width = states.shape
    tiling = tiling or default_tiling(num_reads, width, states.dtype)
    ignored = target < 0
    states = jnp.where(ignored[:, None], 0, states)
    temperature = jnp.where(ignored, 1, lax.stop_gradient(temperature)).astype(jnp.float32)
    padding = (0, -num_reads % tiling.reads)
    states = jnp.pad(states, [padding, (0, 0)])
    target, temperature = (
        jnp.pad(x, padding, constant_values=fill).reshape(-1, 1, tiling.reads) for x, fill in ((target, -1), (temperature, 1))
    )
    logp, entropy = _head(states, head, target, temperature, tiling)
    return logp.reshape(-1)[:num_reads], entropy.reshape(-1)[:num_reads]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _head(states, head, target, temperature, tiling):
    return _forward(states, head, target, temperature, tiling)[0]


def _forward(states, head, target, temperature, tiling):
    """Per-read arrays are [N / block, 1, block] here: rows that a kernel turns into columns."""

    def body(acc_ref, first, last, block, target_ref, temperature_ref, *refs):
        logp_ref, entropy_ref, lse_ref, top_ref, total_ref, mean_ref, chosen_ref, columns_ref, targets_ref = refs

        @pl.when(first)
        def _():
            top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
            for ref in (total_ref, mean_ref, chosen_ref):
                ref[...] = jnp.zeros_like(ref)
            columns_ref[...] = 1 / column(temperature_ref[...])
            targets_ref[...] = column(target_ref[...])

        index = block * tiling.vocab + lax.broadcasted_iota(jnp.int32, acc_ref.shape, 1)
        logits = acc_ref[...] * widen(columns_ref[...], tiling.vocab)
        if head.shape[1] % tiling.vocab:
            logits = jnp.where(index < head.shape[1], logits, _FAR_BELOW)
        top = jnp.maximum(top_ref[...], logits.max(-1, keepdims=True))
        decay = jnp.exp(top_ref[...] - top)
        weights = jnp.exp(logits - widen(top, tiling.vocab))
        top_ref[...] = top
        total_ref[...] = total_ref[...] * decay + weights.sum(-1, keepdims=True)
        mean_ref[...] = mean_ref[...] * decay + (weights * logits).sum(-1, keepdims=True)
        is_target = index == widen(targets_ref[...], tiling.vocab)
        chosen_ref[...] += jnp.where(is_target, logits, 0).sum(-1, keepdims=True)

        @pl.when(last)
        def _():
            lse = top_ref[...] + jnp.log(total_ref[...])
            used = targets_ref[...] >= 0
            logp_ref[...] = jnp.where(used, chosen_ref[...] - lse, 0).T[:1]
            entropy_ref[...] = jnp.where(used, lse - mean_ref[...] / total_ref[...], 0).T[:1]
            lse_ref[...] = lse.T[:1]

    per_read = jax.ShapeDtypeStruct(temperature.shape, jnp.float32)
    row = pl.BlockSpec((None, 1, tiling.reads), lambda n, v, e, _: (n, 0, 0))
    kept = pltpu.VMEM((tiling.reads, LANES), jnp.float32)
    logp, entropy, lse = _logits_kernel(
        body,
        states,
        head,
        [target, temperature],
        0,
        head.shape[1],
        [row] * 3,
        [per_read] * 3,
        [*[kept] * 5, pltpu.VMEM((tiling.reads, LANES), jnp.int32)],
        tiling,
        "head_forward",
    )
    return (logp, entropy), (states, head, target, temperature, entropy, lse)


def _backward(tiling, saved, cotangents):
    states, head, target, temperature, entropy, lse = saved
    used = target >= 0
    d_logp, d_entropy = (jnp.where(used, x, 0) for x in cotangents)
    cooling = 1 / temperature
    coefficients = [cooling, lse, cooling * d_logp, cooling * (d_logp + d_entropy * entropy), cooling * d_entropy]
    vocab, chunk = head.shape[1], min(tiling.chunk, pl.cdiv(head.shape[1], tiling.vocab) * tiling.vocab)

    def one_chunk(carry, start, size):
        d_states, d_head = carry
        d_logits = _logits_gradient(states, head, target, coefficients, start, size, tiling)
        columns = lax.dynamic_slice_in_dim(head, start, size, axis=1)
        d_states += _product(d_logits, columns, (1, 1))
        return d_states, lax.dynamic_update_slice_in_dim(
            d_head, _product(states, d_logits, (0, 0)).astype(head.dtype), start, 1
        )

    carry = (jnp.zeros(states.shape, jnp.float32), jnp.zeros(head.shape, head.dtype))
    whole, rest = divmod(vocab, chunk)
    if whole:
        carry, _ = lax.scan(lambda c, i: (one_chunk(c, i * chunk, chunk), None), carry, jnp.arange(whole, dtype=jnp.int32))
    if rest:
        carry = one_chunk(carry, jnp.int32(whole * chunk), rest)
    d_states, d_head = carry
    return d_states.astype(states.dtype), d_head, np.zeros(target.shape, jax.dtypes.float0), jnp.zeros_like(temperature)


_head.defvjp(_forward, _backward)


def _logits_gradient(states, head, target, coefficients, start, size, tiling):
    """d loss / d (states @ head)[:, start : start + size] in the dtype of states. `start` is on a block's edge."""

    def body(acc_ref, first, last, block, *refs):
        *read_refs, out_ref = refs
        target, cooling, lse, at_target, at_all, per_log_prob = (widen(column(x[...]), tiling.vocab) for x in read_refs)
        index = block * tiling.vocab + lax.broadcasted_iota(jnp.int32, acc_ref.shape, 1)
        log_probs = acc_ref[...] * cooling - lse
        d_logits = jnp.where(index == target, at_target, 0) - jnp.exp(log_probs) * (at_all + per_log_prob * log_probs)
        out_ref[...] = d_logits.astype(out_ref.dtype)

    (d_logits,) = _logits_kernel(
        body,
        states,
        head,
        [target, *coefficients],
        start,
        size,
        [pl.BlockSpec((tiling.reads, tiling.vocab), lambda n, v, e, _: (n, v))],
        [jax.ShapeDtypeStruct((states.shape[0], size), states.dtype)],
        [],
        tiling,
        "head_logits_gradient",
    )
    return d_logits


def _logits_kernel(
    body: Callable,  # (logits before the temperature, first, last, vocabulary block, *refs): one whole tile
    states: jax.Array,
    head: jax.Array,
    per_read: list[jax.Array],
    start: jax.Array | int,  # first column
    size: int,  # columns
    out_specs: list[pl.BlockSpec],
    out_shapes: list[jax.ShapeDtypeStruct],
    scratch: list[pltpu.MemorySpace],
    tiling: HeadTiling,
    name: str,
) -> list[jax.Array]:
    """Runs `body` on every tile of logits. `first` and `last` mark those of a block of reads. A last tile that
    reaches past the vocabulary holds arbitrary numbers there; what is written there goes nowhere."""
    num_blocks, num_steps = pl.cdiv(size, tiling.vocab), states.shape[1] // tiling.width

    def kernel(start_ref, states_ref, head_ref, *refs):
        *refs, acc_ref = refs
        block, step = pl.program_id(1), pl.program_id(2)
        product = matmul(states_ref[...], head_ref[...])

        @pl.when(step == 0)
        def _():
            acc_ref[...] = product

        @pl.when(step > 0)
        def _():
            acc_ref[...] += product

        @pl.when(step == num_steps - 1)
        def _():
            body(acc_ref, block == 0, block == num_blocks - 1, start_ref[0] + block, *refs)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(states.shape[0] // tiling.reads, num_blocks, num_steps),
            in_specs=[
                pl.BlockSpec((tiling.reads, tiling.width), lambda n, v, e, _: (n, e)),
                pl.BlockSpec((tiling.width, tiling.vocab), lambda n, v, e, start: (e, start[0] + v)),
                *[pl.BlockSpec((None, 1, tiling.reads), lambda n, v, e, _: (n, 0, 0))] * len(per_read),
            ],
            out_specs=out_specs,
            scratch_shapes=[*scratch, pltpu.VMEM((tiling.reads, tiling.vocab), jnp.float32)],
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        interpret=tiling.interpret,
        name=name,
    )(jnp.reshape(start // tiling.vocab, 1).astype(jnp.int32), states, head, *per_read)


def _product(a, b, contract):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32, precision=precision)
