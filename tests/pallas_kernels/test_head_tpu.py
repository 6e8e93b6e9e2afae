"""The TPU head under the TPU interpreter against the plain one: log-prob, entropy, both gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from tpu_topology import kernels_for

from jaxrl.models import head as plain
from pallas_kernels.head_tpu import HeadTiling, default_tiling, read_logprobs

READS, WIDTH, VOCAB = 200, 256, 300  # neither reads nor vocabulary fill their blocks


def run(function, states, head, cotangents):
    @jax.jit
    def both(states, head):
        results, vjp = jax.vjp(function, states, head)
        return *results, *vjp(cotangents)

    return both(states, head)


@pytest.mark.parametrize(
    "dtype, bound, params",
    [
        (jnp.float32, 1e-5, pltpu.InterpretParams(detect_races=True)),
        # 8 bits in the operands of every product, the gradient of the logits among them.
        (jnp.bfloat16, 1e-2, pltpu.InterpretParams()),
    ],
)
def test_results_and_gradients_are_those_of_the_plain_head(dtype, bound, params, capfd):
    rng = np.random.default_rng(0)
    states = rng.normal(size=(READS, WIDTH))
    states[:2] *= 20  # so sure of one token that others have no weight in float32
    head = jnp.asarray(rng.normal(size=(WIDTH, VOCAB)) / 16, dtype)
    target = rng.integers(0, VOCAB, READS).astype(np.int32)
    target[[3, 77]], target[5], target[6] = -1, 0, VOCAB - 1
    temperature = rng.uniform(0.5, 2, READS).astype(np.float32)
    temperature[3] = 0
    cotangents = tuple(jnp.asarray(rng.normal(size=READS), jnp.float32) for _ in range(2))
    states = jnp.asarray(states, dtype)

    def reference(states, head):
        return plain.read_logprobs(states, head, target, temperature, 64)

    def kernel(states, head):
        tiling = HeadTiling(reads=128, vocab=128, width=128, chunk=256, interpret=params)
        return read_logprobs(states, head, target, temperature, tiling=tiling)

    with jax.enable_x64(True):
        exact = (x.astype(jnp.float64) for x in (states, head))
        expected = run(reference, *exact, tuple(x.astype(jnp.float64) for x in cotangents))
    with kernels_for("TPU v5"):
        results = run(kernel, states.at[jnp.array([3, 77])].set(jnp.nan), head, cotangents)
    for name, a, b in zip(("logp", "entropy", "d_states", "d_head"), results, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b)
        assert np.linalg.norm(a - b) < bound * np.linalg.norm(b), name
    assert all(float(x[3]) == float(x[77]) == 0 for x in results[:2]) and np.all(np.asarray(results[2])[[3, 77]] == 0)
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_default_blocks_divide_what_they_have_to():
    for width in (576, 896, 1024, 2560, 3584, 4096, 5120):
        tiling = default_tiling(100, width, jnp.bfloat16)
        assert tiling.reads == 128 and width % tiling.width == 0 and tiling.chunk % tiling.vocab == 0


def test_a_head_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match="states are bfloat16, the head float32"):
        read_logprobs(jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((128, 256)), jnp.zeros(8, jnp.int32), jnp.ones(8))
