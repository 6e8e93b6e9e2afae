"""Tree attention: one semantic, several implementations, any mesh.

Key k is visible to query q iff ``k <= q < subtree_end[k]``. `naive` states it, `blockwise` computes it
in linear memory in plain JAX, `context` splits it over devices; this module chooses.
"""

import logging
from functools import lru_cache, partial

import jax
from jax.sharding import Mesh

from jaxrl.attention.blockwise import blockwise_attention
from jaxrl.attention.context import Kernel, attend_row, sharded_attention
from jaxrl.config import AttentionConfig

__all__ = ["tree_attention"]

log = logging.getLogger(__name__)


def tree_attention(
    q: jax.Array,  # [R, T, H, D]
    k: jax.Array,  # [R, T, Hkv, D]
    v: jax.Array,  # [R, T, Hkv, D]
    subtree_end: jax.Array,  # [R, T] int32, exclusive; padding k + 1
    *,
    scale: float,
    config: AttentionConfig,
    mesh: Mesh | None,
) -> jax.Array:
    """Attention over packed rows, [R, T, H, D] in q's dtype. Query head i reads KV head i // (H / Hkv).

    With more than one device in `mesh`, rows are split over data × fsdp, tokens over context and heads
    over tensor. Raises ConfigError, naming the key, if they cannot be split evenly.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    kernel = partial(_pick(config, platform), scale=scale)
    if mesh is None or mesh.size == 1:
        return attend_row(q, k, v, subtree_end, kernel, 0)
    return sharded_attention(q, k, v, subtree_end, kernel, mesh)


@lru_cache  # once per choice: it is logged when made
def _pick(config: AttentionConfig, platform: str) -> Kernel:
    """The implementation for these settings on this platform, all but the scale bound."""
    default = _DEFAULT_BLOCK[platform == "cpu"]
    block_q, block_k = config.block_q or default, config.block_k or default
    log.info("tree attention: plain JAX, blocks of %d queries × %d keys, on %s", block_q, block_k, platform)
    return partial(blockwise_attention, block_q=block_q, block_k=block_k)


# Block size by "is it a CPU": an accelerator runs the blocks one after another, so they must fill it.
_DEFAULT_BLOCK = {True: 128, False: 512}
