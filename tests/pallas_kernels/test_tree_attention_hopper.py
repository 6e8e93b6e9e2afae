"""The Hopper kernels as far as a machine without a GPU takes them: they lower, layouts and all, and refuse by name.

Their values are checked where they run: `python -m jaxrl.bench tree-attention` prints errors against float32 first.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.tree_attention_hopper import backward, forward, refusal


def shapes(rows, num_tokens, heads, kv_heads, head_dim, dtype=jnp.bfloat16):
    def tensor(num_heads):
        return jax.ShapeDtypeStruct((rows, num_tokens, num_heads, head_dim), dtype)

    offset = jax.ShapeDtypeStruct((rows, num_tokens), jnp.int32)
    return tensor(heads), tensor(kv_heads), tensor(kv_heads), offset, offset, tensor(heads)


def both_passes(q, k, v, offset, end, d_out, window=None):
    tokens = (offset, offset, end, None, None)
    out, lse = forward(q, k, v, *tokens, scale=0.1, window=window)
    return out, lse, backward(q, k, v, *tokens, out, lse, d_out, jnp.zeros_like(lse), scale=0.1, window=window)


@pytest.mark.parametrize(("num_tokens", "head_dim", "dtype"), [(300, 128, jnp.bfloat16), (512, 64, jnp.float16)])
def test_both_passes_lower_for_cuda(num_tokens, head_dim, dtype):
    arguments = shapes(2, num_tokens, 8, 2, head_dim, dtype)
    traced = jax.jit(both_passes).trace(*arguments)
    out, lse, gradients = traced.out_info
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (arguments[0].shape, dtype, (2, num_tokens, 8), jnp.float32)
    assert [g.shape for g in gradients] == [x.shape for x in arguments[:3]]
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") >= 3


def test_what_has_no_kernel_is_named():
    assert refusal(128, "bfloat16") is None
    assert "96" in refusal(96, "bfloat16") and "float32" in refusal(128, "float32")
    with pytest.raises(ValueError, match="float32"):
        jax.eval_shape(both_passes, *shapes(1, 128, 2, 2, 64, jnp.float32))
    with pytest.raises(ValueError, match="window"):
        jax.eval_shape(lambda *x: both_passes(*x, window=8), *shapes(1, 128, 2, 2, 64))
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        jax.eval_shape(both_passes, *shapes(1, 128, 3, 2, 64))
