"""Drawing tokens from logits: temperature, truncation, and the two log-probs of what was drawn.

Truncation keeps the tokens whose logit reaches a threshold (so ties at the threshold stay together), applied in the
order top-k, top-p over what top-k left, min-p. Thresholds are found by bisection over the bit patterns of floats, which
is exact and needs no sort of the vocabulary. The draw inverts the cumulative distribution in two levels (a block of the
vocabulary, a token of the block) with two uniforms, so a token costs two random numbers instead of one per vocabulary
entry. Every row's result depends on that row alone. Shapes: B rows, V vocabulary, C blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128  # vocabulary entries per block of the draw


class Controls(NamedTuple):
    """How each row draws, all [B]."""

    temperature: jax.Array  # float32; 0: greedy, with log-probs at temperature 1
    top_p: jax.Array  # float32; 1: off
    top_k: jax.Array  # int32; 0: off
    min_p: jax.Array  # float32; 0: off
    seed: jax.Array  # uint32


class Drawn(NamedTuple):
    """What was drawn, all [B]; log-probs are natural, float32."""

    token: jax.Array  # int32
    policy_logp: jax.Array  # at the temperature, before truncation
    behaviour_logp: jax.Array  # after truncation; 0 for greedy rows, which emit their token with probability 1


def draw(logits: jax.Array, position: jax.Array, controls: Controls) -> Drawn:
    """One token per row from logits [B, V] float32. Row b's randomness is fold_in(key(seed[b]), position[b])."""
    greedy = controls.temperature == 0
    temperature = jnp.where(greedy, 1.0, controls.temperature)

    def scaled(x):  # where it is used, so that [B, V] scaled logits are not stored
        return x / temperature.reshape(-1, *[1] * (x.ndim - 1))

    logits_BCN = _blocks(logits)
    peak = scaled(jnp.max(logits, axis=-1))
    mass_BC = jnp.sum(jnp.exp(scaled(logits_BCN) - peak[:, None, None]), axis=-1)

    truncated = ~greedy & ((controls.top_p < 1) | (controls.top_k > 0) | (controls.min_p > 0))

    def truncate():
        threshold = jnp.where(truncated, _threshold(scaled(logits), peak, controls), -jnp.inf)
        return threshold, jnp.sum(_kept_weight(scaled(logits_BCN), peak, threshold), axis=-1)

    threshold, kept_BC = jax.lax.cond(jnp.any(truncated), truncate, lambda: (jnp.full_like(peak, -jnp.inf), mass_BC))

    uniform = jax.vmap(_uniforms)(controls.seed, position)
    block = _first_beyond(kept_BC, uniform[:, 0])
    x_BN = scaled(jnp.take_along_axis(logits_BCN, block[:, None, None], axis=1)[:, 0])
    token = block * BLOCK + _first_beyond(_kept_weight(x_BN, peak, threshold), uniform[:, 1])
    best = jax.lax.cond(jnp.any(greedy), lambda: _argmax(logits), lambda: token)
    token = jnp.where(greedy, best, token)

    centred = scaled(jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]) - peak
    policy = centred - jnp.log(jnp.sum(mass_BC, axis=-1))
    behaviour = jnp.where(greedy, 0.0, jnp.where(truncated, centred - jnp.log(jnp.sum(kept_BC, axis=-1)), policy))
    return Drawn(token, policy, behaviour)


def _uniforms(seed, position):
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (2,))


def _blocks(x_BV):
    short = -x_BV.shape[-1] % BLOCK
    if short:
        x_BV = jnp.pad(x_BV, ((0, 0), (0, short)), constant_values=-jnp.inf)
    return x_BV.reshape(x_BV.shape[0], -1, BLOCK)


def _kept_weight(x, peak, threshold):
    """exp(x - peak) of what reaches the row's threshold, 0 elsewhere; x [B, ...]."""
    peak, threshold = (row.reshape(-1, *[1] * (x.ndim - 1)) for row in (peak, threshold))
    return jnp.where(x >= threshold, jnp.exp(x - peak), 0.0)


def _first_beyond(weight_BN, uniform):
    """Index drawn with probability weight / sum from a uniform in [0, 1). Never one of weight 0, whatever rounding does to
    the cumulative sums: past the last positive weight, that one is taken."""
    cumulative = jnp.cumsum(weight_BN, axis=-1)
    positive = weight_BN > 0
    beyond = (cumulative > uniform[:, None] * cumulative[:, -1:]) & positive
    index = jnp.arange(weight_BN.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    return jnp.min(jnp.where(beyond, index, last[:, None]), axis=-1)


def _argmax(x_BV):
    """First index of the largest value. jnp.argmax is several times slower than this on a CPU."""
    index = jnp.arange(x_BV.shape[-1], dtype=jnp.int32)
    is_peak = x_BV == jnp.max(x_BV, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_peak, index, x_BV.shape[-1] - 1), axis=-1)


def _threshold(x_BV, peak, controls: Controls):
    """The smallest kept value of x, [B]."""
    vocab_size = x_BV.shape[-1]
    top_k = jnp.where(controls.top_k > 0, jnp.minimum(controls.top_k, vocab_size), vocab_size)
    at_k = _largest_value(lambda t: jnp.sum(x_BV >= t[:, None], axis=-1) >= top_k, peak)

    def mass(t):
        return jnp.sum(jnp.where(x_BV >= jnp.maximum(t, at_k)[:, None], jnp.exp(x_BV - peak[:, None]), 0.0), axis=-1)

    target = controls.top_p * mass(at_k)
    at_p = jnp.where(controls.top_p < 1, _largest_value(lambda t: mass(t) >= target, peak), -jnp.inf)
    at_min = jnp.where(controls.min_p > 0, peak + jnp.log(controls.min_p), -jnp.inf)
    return jnp.maximum(jnp.maximum(at_k, at_p), at_min)


def _largest_value(holds, peak):
    """The largest float32 t <= peak with holds(t), for a condition that holds up to some value and not beyond it; [B].

    Floats are bisected as integers in the same order (sign-magnitude bits, negatives flipped).
    """
    low = _ordered_bits(jnp.full_like(peak, -jnp.inf))  # holds
    high = _ordered_bits(peak)  # the answer is in [low, high]

    def halve(_, bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
        ok = holds(_from_ordered_bits(middle))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return _from_ordered_bits(low)


def _ordered_bits(x):
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _from_ordered_bits(bits):
    return jax.lax.bitcast_convert_type(bits ^ ((bits >> 31) & 0x7FFFFFFF), jnp.float32)
