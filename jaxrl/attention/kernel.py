"""What an implementation of tree attention is: a forward and a backward function over one device's arrays.

    forward(q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, *, scale, window)
        -> (out, lse)
    backward(q, k, v, q_offset, k_offset, subtree_end, q_position, k_position, out, lse, d_out, d_lse, *, scale, window)
        -> (dq, dk, dv)

    q [R, Tq, H, D] · k, v [R, Tk, Hkv, D] · q_offset, q_position [R, Tq] · k_offset, subtree_end, k_position [R, Tk] int32
    out [R, Tq, H, D] in q's dtype · lse [R, Tq, H] log-sum-exp of the scaled scores, float32 or float64

Key j is visible to query i iff ``k_offset[j] <= q_offset[i] < subtree_end[j]`` and, with a window,
``q_position[i] - k_position[j] < window``; positions may be None without one. The tokens of either side may be any
selection of a row in any order. A query with a negative offset and a key with ``subtree_end <= k_offset``
are invalid: what they hold, NaN included, reaches nothing. A query that sees no key gets out 0 and lse -inf.

`backward` takes `out` and `lse` from outside, so that the keys it is given may be a part of those the
queries saw: with the results over all keys it yields exactly this part's share of dq, and dk and dv of
its keys (FlashAttention-2, Dao 2023: weights = exp(score - lse), d_score = weights * (d_weight - d_out·out + d_lse)).
Its results may be unrounded; whoever sums them does so in float32 at least.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Kernel(NamedTuple):
    """See the module. What is tuned (block sizes) is bound already."""

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    compiler_options: tuple[tuple[str, str], ...] = ()  # of XLA, for every program that contains it


def differentiable(kernel: Kernel, *, scale: float, window: int | None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`kernel.forward` with `kernel.backward` as its gradient in q, k and v, through both results."""

    @jax.custom_vjp
    def attend(q, k, v, *tokens):
        return kernel.forward(q, k, v, *tokens, scale=scale, window=window)

    def forward(q, k, v, *tokens):
        out, lse = attend(q, k, v, *tokens)
        return (out, lse), (q, k, v, tokens, out, lse)

    def backward(saved, cotangents):
        q, k, v, tokens, out, lse = saved
        gradients = kernel.backward(q, k, v, *tokens, out, lse, *cotangents, scale=scale, window=window)
        return *(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True)), *[None] * len(tokens)

    attend.defvjp(forward, backward)
    return attend


def accumulation_dtype(x: jax.Array) -> jnp.dtype:
    """float32, or float64 for float64."""
    return jnp.promote_types(x.dtype, jnp.float32)
