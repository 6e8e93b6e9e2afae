"""A tiny random model, and the full forward its sampler is held against."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.architecture import Architecture
from jaxrl.models.decoder import Decoder, head_matrix, init_variables

VOCAB = 200  # no multiple of the sampler's vocabulary blocks
ARCHITECTURE = Architecture.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    }
)
LENGTH = 128


def random_variables(seed: int):
    return init_variables(Decoder(ARCHITECTURE), jax.random.key(seed), None)


def causal_attention(q, k, v, cache):
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * ARCHITECTURE.attention_scale
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1), v), cache


@jax.jit
def full_logits(variables, tokens):
    """[LENGTH] token ids, padded with anything -> [LENGTH, V]."""
    positions = jnp.arange(LENGTH)[None]
    hidden, _ = Decoder(ARCHITECTURE).apply(variables, tokens[None], positions, causal_attention)
    return hidden[0] @ head_matrix(variables["params"], ARCHITECTURE)


def logits_of(variables, ids) -> np.ndarray:
    """Logits after each of `ids`, [len(ids), V]."""
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(ids)] = ids
    return np.asarray(full_logits(variables, padded))[: len(ids)]


def logps_of(variables, prompt, ids, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of `ids` after `prompt` by a full forward."""
    logits = logits_of(variables, [*prompt, *ids]).astype(np.float64) / temperature
    logps = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return logps[np.arange(len(prompt) - 1, len(prompt) + len(ids) - 1), np.asarray(ids)]
