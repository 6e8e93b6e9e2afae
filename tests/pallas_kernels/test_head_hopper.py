"""The Hopper head as far as a machine without a GPU takes it: it lowers for both layouts of the matrix, and refuses by name.

Its values are checked where it runs: `python -m jaxrl.bench head` prints errors against float32 first.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.head_hopper import HeadTiles, Tiles, read_logprobs, refusal


def shapes(num_reads, width, vocab, vocab_major, dtype=jnp.bfloat16):
    matrix = (vocab, width) if vocab_major else (width, vocab)
    read = jax.ShapeDtypeStruct((num_reads,), jnp.float32)
    tensors = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((num_reads, width), matrix))
    return *tensors, jax.ShapeDtypeStruct((num_reads,), jnp.int32), read, read, read


def both_passes(tiles, vocab_major, states, head, target, temperature, d_logp, d_entropy):
    def run(states, head):
        return read_logprobs(states, head, target, temperature, vocab_major=vocab_major, tiles=tiles)

    results, pull = jax.vjp(run, states, head)
    return *results, *pull((d_logp, d_entropy))


@pytest.mark.parametrize(
    ("vocab_major", "dtype", "tiles"),
    [
        (True, jnp.bfloat16, HeadTiles(chunk=2048)),
        (False, jnp.float16, HeadTiles(Tiles(cluster=2), Tiles(cluster=2), chunk=1024)),
    ],
)
def test_both_passes_lower_for_cuda(vocab_major, dtype, tiles):
    arguments = shapes(1000, 200, 5003, vocab_major, dtype)
    traced = jax.jit(both_passes, static_argnums=(0, 1)).trace(tiles, vocab_major, *arguments)
    logp, entropy, d_states, d_head = traced.out_info
    assert (logp.shape, logp.dtype) == (entropy.shape, entropy.dtype) == ((1000,), jnp.float32)
    assert [(x.shape, x.dtype) for x in (d_states, d_head)] == [(x.shape, dtype) for x in arguments[:2]]
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2
    assert "tensor<1000x5003x" not in text and "tensor<1000x5056x" not in text  # no logits of all reads


def test_chunks_hold_the_vocabulary_evenly_and_within_their_bytes():
    for num_reads, vocab in ((100, 320), (8192, 151_936), (40_960, 151_936), (40_960, 262_144)):
        chunk = HeadTiles().chunk_of(num_reads, vocab)
        assert chunk == vocab or chunk % 256 == 0
        assert chunk * num_reads * 2 <= 2**29 * 1.05
        assert -(-vocab // chunk) * chunk - vocab < chunk


def test_what_has_no_kernel_is_named():
    assert refusal("bfloat16") is None and "float32" in refusal("float32")
    with pytest.raises(ValueError, match="float32"):
        jax.eval_shape(lambda *x: both_passes(HeadTiles(), False, *x), *shapes(8, 64, 128, False, jnp.float32))
    states, *rest = shapes(8, 64, 128, False)
    with pytest.raises(ValueError, match="one dtype"):
        jax.eval_shape(lambda *x: both_passes(HeadTiles(), False, *x), states.update(dtype=jnp.float16), *rest)
