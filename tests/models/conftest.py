"""What the model tests share: the golden files, and attention as a dense causal mask."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.decoder import head_matrix

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def goldens() -> Path:
    return TESTS / "data" / "models"


@pytest.fixture(scope="session")
def stories() -> Path:
    return TESTS / "data" / "stories260K"


@pytest.fixture(scope="session")
def ids(goldens) -> np.ndarray:
    return np.load(goldens / "ids.npy")


@pytest.fixture(scope="session")
def causal():
    """attend for plain sequences; it hands the cache on, with the keys if it is a dict."""

    def make(architecture):
        def attend(q, k, v, cache):
            cache = {"k": k} if isinstance(cache, dict) else cache
            k, v = (jnp.repeat(x, architecture.num_heads // architecture.num_kv_heads, axis=2) for x in (k, v))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * architecture.attention_scale
            seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v), cache

        return attend

    return make


@pytest.fixture(scope="session")
def logits_of(causal):
    """Logits [B, T, V] of whole sequences."""

    @jax.jit(static_argnums=0)
    def compute(decoder, variables, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = decoder.apply(variables, tokens, positions, causal(decoder.architecture))
        return hidden @ head_matrix(variables["params"], decoder.architecture)

    return compute
