"""Joining attention results through their log-sum-exp: over parts of the keys, and with a sink.

    out = Σ_p exp(lse_p - lse) out_p,   lse = log Σ_p exp(lse_p)

is the attention over all parts, exactly. A sink is one more part, with a logit and no value.
"""

import jax
import jax.numpy as jnp


def merge(
    out: jax.Array,  # [R, T, H, D] in an accumulation dtype
    lse: jax.Array,  # [R, T, H]
    part: jax.Array,  # [R, T, H, D], any dtype
    part_lse: jax.Array,  # [R, T, H]
) -> tuple[jax.Array, jax.Array]:
    """The results over two disjoint sets of keys as one, in the dtype of the first. An empty set has
    output 0 and log-sum-exp -inf."""
    top = jnp.maximum(lse, part_lse)
    base = jnp.where(top == -jnp.inf, 0, top)  # -inf - (-inf) would be NaN
    weight, part_weight = jnp.exp(lse - base), jnp.exp(part_lse - base)
    total = weight + part_weight
    seen = total > 0
    total = jnp.where(seen, total, 1)
    share, part_share = weight / total, part_weight / total
    merged = share[..., None] * out + part_share[..., None] * part.astype(out.dtype)
    return merged, jnp.where(seen, base + jnp.log(total), -jnp.inf)


def apply_sink(out: jax.Array, lse: jax.Array, sink: jax.Array) -> jax.Array:
    """Adds a head's sink, a logit [H] without a value, to the softmax's denominator.

    `out` [R, T, H, D] and `lse` [R, T, H] are those over all keys: the sink counts once, however many
    parts they were merged from. exp(lse) / (exp(lse) + exp(sink)) is the sigmoid of the difference.
    """
    share = jax.nn.sigmoid(lse - sink.astype(lse.dtype))
    return (out.astype(lse.dtype) * share[..., None]).astype(out.dtype)
