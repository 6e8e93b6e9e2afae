"""Tree attention with a dense mask: the reference every other implementation is tested against.

Quadratic memory; float32 or float64 throughout.
"""

import jax
import jax.numpy as jnp


def visible(q_offset: jax.Array, k_offset: jax.Array, subtree_end: jax.Array) -> jax.Array:
    """[R, Tq] and [R, Tk] -> bool [R, Tq, Tk]: ``k <= q < subtree_end[k]``."""
    q = q_offset[:, :, None]
    return (k_offset[:, None, :] <= q) & (q < subtree_end[:, None, :])


def naive_attention(
    q: jax.Array,  # [R, Tq, H, D]
    k: jax.Array,  # [R, Tk, Hkv, D]
    v: jax.Array,  # [R, Tk, Hkv, D]
    q_offset: jax.Array,  # [R, Tq] int32
    k_offset: jax.Array,  # [R, Tk] int32
    subtree_end: jax.Array,  # [R, Tk] int32, exclusive
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns (output [R, Tq, H, D], log-sum-exp of the scaled scores [R, Tq, H]). A query that sees
    no key gets output 0 and log-sum-exp -inf."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    mask = visible(q_offset, k_offset, subtree_end)[:, None]
    scores = jnp.where(mask, scale * jnp.einsum("rqhd,rkhd->rhqk", q, k), -jnp.inf)
    seen = mask.any(-1, keepdims=True)
    lse = jax.nn.logsumexp(jnp.where(seen, scores, 0), axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - lse), 0)
    lse = jnp.where(seen, lse, -jnp.inf)
    return jnp.einsum("rhqk,rkhd->rqhd", weights, v), lse[..., 0].swapaxes(1, 2)
