"""The TPU kernels compiled for each generation at full size: they fit its memories, and their programs hold no more."""

import jax
import jax.numpy as jnp
import pytest
from tpu_topology import compile_on_one_chip, needs_libtpu

from pallas_kernels import head_tpu, tree_attention_tpu

pytestmark = needs_libtpu


def forward_and_backward(num_tokens, heads, kv_heads, size, dtype, window, generation):
    def both(q, k, v, offset, end, position, d_out, d_lse):
        tokens = (offset, offset, end, position, position)
        settings = {"scale": size**-0.5, "window": window}
        out, lse = tree_attention_tpu.forward(q, k, v, *tokens, **settings)
        return tree_attention_tpu.backward(q, k, v, *tokens, out, lse, d_out, d_lse, **settings)

    q, kv = (jax.ShapeDtypeStruct((1, num_tokens, n, size), dtype) for n in (heads, kv_heads))
    integers = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
    d_lse = jax.ShapeDtypeStruct((1, num_tokens, heads), jnp.float32)
    return compile_on_one_chip(both, q, kv, kv, *[integers] * 3, q, d_lse, generation=generation)


@pytest.mark.parametrize(
    "generation, num_tokens, heads, kv_heads, size, dtype, window",
    [
        ("v5e", 131_072, 8, 1, 128, jnp.bfloat16, None),
        ("v5p", 131_072, 8, 1, 256, jnp.float32, None),  # the largest tiles in bytes
        ("v6e", 131_072, 14, 2, 96, jnp.bfloat16, 1000),  # a group and a head size that are no powers of two
    ],
)
def test_tree_attention(generation, num_tokens, heads, kv_heads, size, dtype, window):
    compiled = forward_and_backward(num_tokens, heads, kv_heads, size, dtype, window, generation)
    one_tensor = max(num_tokens, 8192) * heads * max(size, 128) * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * one_tensor, "q, out, d_out, dq in tiles, and what is small"


@pytest.mark.parametrize(
    "generation, vocab, width",
    [("v5e", 151_936, 4096), ("v5p", 16_384, 1024), ("v6e", 16_384, 1024)],  # tiles, and so kernels, of one size
)
def test_the_head_of_a_large_model(generation, vocab, width):
    reads = 8192
    states, head = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((reads, width), (width, vocab)))
    per_read = [jax.ShapeDtypeStruct((reads,), x) for x in (jnp.int32, jnp.float32, jnp.float32, jnp.float32)]

    def both(states, head, target, temperature, d_logp, d_entropy):
        results, vjp = jax.vjp(lambda s, h: head_tpu.read_logprobs(s, h, target, temperature), states, head)
        return results, vjp((d_logp, d_entropy))

    compiled = compile_on_one_chip(both, states, head, *per_read, generation=generation)
    one_chunk, sums = reads * 8192 * 2, reads * width * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * one_chunk + 2 * sums, "no more logits than a chunk's"
