"""Tree attention: one semantic, several implementations, any mesh.

Key k is visible to query q iff ``k <= q < subtree_end[k]``. `kernel` states what an implementation is,
`naive` is the reference, `blockwise` computes it in linear memory in plain JAX; `plan` spreads the tokens of a row
over devices, `transport` and `context` run a kernel over them, `choice` picks both.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.attention.choice import choose_kernel, choose_transport, compiler_options, device_of
from jaxrl.attention.context import sharded_attention
from jaxrl.attention.kernel import differentiable
from jaxrl.attention.merge import apply_sink
from jaxrl.config import AttentionConfig

__all__ = ["compiler_options", "device_of", "tree_attention"]


def tree_attention(
    q: jax.Array,  # [R, T, H, D]
    k: jax.Array,  # [R, T, Hkv, D]
    v: jax.Array,  # [R, T, Hkv, D]
    offset: jax.Array,  # [R, T] int32: where in its row a token was packed; -1 on padding
    subtree_end: jax.Array,  # [R, T] int32, exclusive; anything on padding
    *,
    scale: float,
    config: AttentionConfig,
    mesh: Mesh | None,
    positions: jax.Array | None = None,  # [R, T] int32 from the root; needed with a window
    window: int | None = None,  # a query sees the last `window` tokens of its path, itself among them
    sink: jax.Array | None = None,  # [H], a logit per head that joins the softmax and has no value
) -> jax.Array:
    """Attention over packed rows, [R, T, H, D] in q's dtype. Query head i reads KV head i // (H / Hkv).

    Tokens may lie anywhere in their row as long as offset, subtree_end and positions lie with them.
    Padding has output 0 and, whatever it holds, NaN included, reaches no other token.
    With more than one device in `mesh`, rows are split over data × fsdp, tokens over context and heads
    over tensor. Raises ConfigError, naming the key, if they cannot be split evenly.
    """
    if window is None:
        positions = None
    elif positions is None:
        raise ValueError("a window is counted in logical positions: give `positions`")
    platform, capability = device_of(mesh)
    kernel = choose_kernel(config, platform, capability, q.shape[-1], q.dtype.name, window is not None)
    is_token = offset >= 0
    subtree_end = jnp.where(is_token, subtree_end, -1)
    if mesh is None or mesh.size == 1:
        attend = differentiable(kernel, scale=scale, window=window)
        out, lse = attend(q, k, v, offset, offset, subtree_end, positions, positions)
    else:
        transport = choose_transport(config, platform)
        out, lse = sharded_attention(
            q, k, v, offset, subtree_end, positions, kernel, transport, mesh, scale=scale, window=window
        )
    if sink is None:
        return out
    # Selected once more, for the gradient: a cotangent of padding would reach the sink.
    return jnp.where(is_token[..., None, None], apply_sink(out, lse, sink), 0)
