"""Rotary position embedding (arXiv 2104.09864) with the llama3 and yarn (arXiv 2309.00071) frequency scalings.

Hugging Face's layout: the two halves of a head form the pairs, dimension i with i + D/2.
"""

import math

import jax.numpy as jnp
import numpy as np

from jaxrl.models.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position of each pair, [D/2] float64, and the factor that multiplies cos and sin."""
    # float32 base frequencies, as published checkpoints were trained with; the difference grows with the position.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (1.0 / np.power(np.float32(rope.theta), exponents)).astype(np.float64)
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim), _yarn_attention_factor(rope)
    return base, 1.0


def _llama3(rope: Rope, base: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, a linear blend in rotations per context between."""
    rotations = rope.original_context * base / (2 * math.pi)
    kept = np.clip((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return kept * base + (1 - kept) * base / rope.factor


def _yarn(rope: Rope, base: np.ndarray, head_dim: int) -> np.ndarray:
    """As llama3, but the blend is linear in the dimension, between those that make beta_fast and beta_slow rotations."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretched = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return stretched * base / rope.factor + (1 - stretched) * base


def _yarn_attention_factor(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def rotation(positions_BT, rope: Rope, head_dim: int, dtype) -> tuple:
    """cos and sin of every position, each [B, T, 1, D/2], in at least float32: a bfloat16 angle is useless beyond
    256 positions."""
    wide = jnp.promote_types(dtype, jnp.float32)
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions_BT[..., None, None].astype(wide) * jnp.asarray(frequencies, wide)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x_BTHD, cos, sin):
    """The vectors of each head turned by their position's angles; computed in the dtype of cos, returned in x's."""
    first, second = jnp.split(x_BTHD.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHD.dtype)
