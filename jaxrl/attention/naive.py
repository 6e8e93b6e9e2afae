"""Tree attention with a dense mask: the reference every other implementation is tested against.

Quadratic memory; float32 or float64 throughout.
"""

import jax
import jax.numpy as jnp


def visible(
    q_offset: jax.Array,  # [R, Tq]
    k_offset: jax.Array,  # [R, Tk]
    subtree_end: jax.Array,  # [R, Tk]
    q_position: jax.Array | None = None,  # [R, Tq]
    k_position: jax.Array | None = None,  # [R, Tk]
    window: int | None = None,
) -> jax.Array:
    """bool [R, Tq, Tk]: ``k <= q < subtree_end[k]`` and, with a window, ``position[q] - position[k] < window``."""
    q = q_offset[:, :, None]
    mask = (k_offset[:, None, :] <= q) & (q < subtree_end[:, None, :])
    if window is None:
        return mask
    return mask & (q_position[:, :, None] - k_position[:, None, :] < window)


def naive_attention(
    q: jax.Array,  # [R, Tq, H, D]
    k: jax.Array,  # [R, Tk, Hkv, D]
    v: jax.Array,  # [R, Tk, Hkv, D]
    q_offset: jax.Array,  # [R, Tq] int32
    k_offset: jax.Array,  # [R, Tk] int32
    subtree_end: jax.Array,  # [R, Tk] int32, exclusive
    q_position: jax.Array | None = None,  # [R, Tq] int32
    k_position: jax.Array | None = None,  # [R, Tk] int32
    *,
    scale: float,
    window: int | None = None,
    sink: jax.Array | None = None,  # [H], one more logit per head in the denominator
) -> tuple[jax.Array, jax.Array]:
    """Returns (output [R, Tq, H, D], log-sum-exp of the scaled scores, the sink among them, [R, Tq, H]).
    A query that sees no key gets output 0 and, without a sink, log-sum-exp -inf."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    mask = visible(q_offset, k_offset, subtree_end, q_position, k_position, window)[:, None]
    scores = jnp.where(mask, scale * jnp.einsum("rqhd,rkhd->rhqk", q, k), -jnp.inf)
    seen = mask.any(-1, keepdims=True)
    if sink is not None:
        logits = jnp.broadcast_to(sink[None, :, None, None], scores.shape[:-1] + (1,))
        scores, seen = jnp.concatenate([scores, logits], -1), jnp.ones_like(seen)
    lse = jax.nn.logsumexp(jnp.where(seen, scores, 0), axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores[..., : k.shape[1]] - lse), 0)
    lse = jnp.where(seen, lse, -jnp.inf)
    return jnp.einsum("rhqk,rkhd->rqhd", weights, v), lse[..., 0].swapaxes(1, 2)
