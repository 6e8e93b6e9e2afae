"""Tree attention: one semantic, several implementations, any mesh.

Key k is visible to query q iff ``k <= q < subtree_end[k]``. `naive` states it, `blockwise` computes it
in linear memory in plain JAX, `context` splits it over devices; this module chooses.
"""

import logging
from functools import lru_cache, partial

import jax
from jax import lax
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
    cpu = platform == "cpu"
    default = _CPU_BLOCK if cpu else _ACCELERATOR_BLOCK
    block_q, block_k = config.block_q or default, config.block_k or default
    log.info("tree attention: plain JAX, blocks of %d queries × %d keys, on %s", block_q, block_k, platform)
    kernel = partial(blockwise_attention, block_q=block_q, block_k=block_k)
    return _row_by_row(kernel) if cpu else kernel


# A CPU gains from skipping finely, down to where the loop itself costs; an accelerator runs the
# blocks one after another, so one block must fill it.
_CPU_BLOCK, _ACCELERATOR_BLOCK = 128, 512


def _row_by_row(kernel: Kernel) -> Kernel:
    """The kernel on one row after another. Rows taken together skip only the blocks that are empty in
    all of them, which costs a CPU more than the batching gains."""

    def run(*arrays, scale):
        out, lse = lax.map(lambda row: kernel(*(x[None] for x in row), scale=scale), arrays)
        return out[:, 0], lse[:, 0]

    return run
