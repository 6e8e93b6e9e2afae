"""The sampler's device programs: prefill a chunk, decode some steps, copy pages, prepare weights.

Each has one shape for the whole life of the engine. Decode always computes every slot and prefill always the same number
of page-sized tiles, because a matmul of another shape gives the same row other bits; with the shapes fixed, what a row
gets depends on its own tokens alone. Shape letters: B slots, N tiles, S tokens per page, P pages per row, K steps.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import LoraConfig, SamplerConfig
from jaxrl.engine.attention import paged_attention
from jaxrl.engine.cpu_attention import load_kernel
from jaxrl.engine.pages import TRASH_PAGE
from jaxrl.engine.sampling import Controls, Drawn, draw
from jaxrl.models.architecture import Architecture
from jaxrl.models.decoder import Decoder, head_matrix, unstack_layers
from jaxrl.models.peft import merge_lora

MAX_STEPS = 16  # decode steps of one dispatch, at most
STOP_IDS = 8  # stop tokens a slot watches on the device; the host watches them all
# Tokens per block of the attention's loop. A CPU gains from stopping at the longest row and from blocks that stay in its
# cache; an accelerator from few, large operations.
BLOCK_TOKENS = {"cpu": 64}
ACCELERATOR_BLOCK_TOKENS = 2048


class Slots(NamedTuple):
    """What decode is told about each slot."""

    tables: jax.Array  # [B, P] int32
    token: jax.Array  # [B] int32, the last token, whose keys are not in the cache yet
    position: jax.Array  # [B] int32, its position
    remaining: jax.Array  # [B] int32, tokens still to be sampled; 0: the slot is idle
    stop_ids: jax.Array  # [B, STOP_IDS] int32, filled up with -1
    controls: Controls


class Steps(NamedTuple):
    """What a dispatch sampled. A slot's entries after its end are arbitrary."""

    count: int
    token: np.ndarray  # [count, B] int32
    policy_logp: np.ndarray  # [count, B] float32
    behaviour_logp: np.ndarray  # [count, B] float32


class Tiles(NamedTuple):
    """Page-sized runs of prompts to prefill. A tile without work writes to TRASH_PAGE."""

    tokens: jax.Array  # [N, S] int32
    start: jax.Array  # [N] int32, position of the first token
    page: jax.Array  # [N] int32, where its keys and values go
    tables: jax.Array  # [N, P] int32


class Programs:
    """Compiled functions for one architecture and one set of limits. `pools` is a list of (keys, values) per layer, each
    [pages, key heads, S, head size]; it is donated and returned."""

    def __init__(self, architecture: Architecture, config: SamplerConfig, num_pages: int, lora: LoraConfig | None, device):
        self.architecture = architecture
        self.device = device
        self.dtype = jnp.dtype(config.dtype)
        self.page_size = config.page_size
        self.num_pages = num_pages
        block_tokens = BLOCK_TOKENS.get(device.platform, ACCELERATOR_BLOCK_TOKENS)
        needed = -(-config.max_length // config.page_size)
        self.block_pages = min(needed, max(1, block_tokens // config.page_size))
        self.table_width = -(-needed // self.block_pages) * self.block_pages
        self.num_tiles = max(1, config.prefill_chunk // config.page_size)
        self._model = Decoder(architecture, dtype=self.dtype, param_dtype=self.dtype, scan_layers=False)
        self._decode_kernel = None
        if device.platform == "cpu" and self.dtype == jnp.float32:
            self._decode_kernel = load_kernel(architecture.num_heads // architecture.num_kv_heads, architecture.head_dim)
        self.prepare_weights = jax.jit(partial(self._prepare, lora=lora))
        self.decode = jax.jit(self._decode, donate_argnums=1)
        self.prefill = jax.jit(self._prefill, donate_argnums=1)
        self.copy_pages = jax.jit(_copy_pages, donate_argnums=0)

    def _prepare(self, variables, *, lora: LoraConfig | None):
        """The sampler's own copy: adapters merged into the base (in the parameters' dtype), layers unstacked, cast."""
        params = merge_lora(variables, lora)
        weights = unstack_layers({"params": params}) if "layers" in params else {"params": params}
        return jax.tree.map(lambda leaf: jnp.array(leaf, self.dtype, copy=True), weights)

    def make_pools(self) -> list[tuple[jax.Array, jax.Array]]:
        a = self.architecture
        shape = (self.num_pages, a.num_kv_heads, self.page_size, a.head_dim)
        zeros = jax.jit(lambda: jnp.zeros(shape, self.dtype), out_shardings=jax.sharding.SingleDeviceSharding(self.device))
        return [(zeros(), zeros()) for _ in range(a.num_layers)]

    def _decode(self, weights, pools, slots: Slots, num_steps, refill) -> tuple[list, jax.Array]:
        """Up to num_steps tokens for every slot with some remaining. With `refill` it ends at the first finished slot.
        What it sampled is packed into one array, so that the host waits for one transfer; `unpack_steps` reads it."""
        num_slots = slots.token.shape[0]
        row = jnp.arange(num_slots)
        started = jnp.sum(slots.remaining > 0)

        def goes_on(state):
            running = jnp.sum(state[4] > 0)
            return (state[0] < num_steps) & (running > 0) & ~(refill & (running < started))

        def step(state):
            i, pools, token, position, remaining, out = state
            is_running = remaining > 0
            page = jnp.where(is_running, slots.tables[row, position // self.page_size], TRASH_PAGE)
            offset = position % self.page_size

            def write(pool, new):
                return pool.at[page, :, offset].set(new[:, 0], mode="promise_in_bounds")

            last = jnp.max(jnp.where(is_running, position, 0))
            hidden, pools = self._hidden(weights, pools, token[:, None], position[:, None], write, slots.tables, last)
            # In the loop, so that a tied embedding's transpose becomes part of the matmul instead of a copy before it.
            head = head_matrix(weights["params"], self.architecture)
            logits = jnp.matmul(hidden[:, 0], head, preferred_element_type=jnp.float32)
            drawn = draw(logits, position + 1, slots.controls)
            out = out.at[:, i].set(jnp.stack([drawn.token, *(_bits(logp) for logp in drawn[1:])]))
            is_stop = jnp.any(drawn.token[:, None] == slots.stop_ids, axis=-1)
            remaining = jnp.where(is_running & ~is_stop, remaining - 1, 0)
            token = jnp.where(is_running, drawn.token, token)
            return i + 1, pools, token, position + is_running, remaining, out

        out = jnp.zeros((len(Drawn._fields), MAX_STEPS, num_slots), jnp.int32)
        state = (jnp.int32(0), pools, slots.token, slots.position, slots.remaining, out)
        count, pools, _, _, _, out = jax.lax.while_loop(goes_on, step, state)
        return pools, jnp.append(out.ravel(), count)

    def _prefill(self, weights, pools, tiles: Tiles) -> list:
        """Computes the tiles' keys and values. A tile may follow another of the same call: each layer writes all of them
        before it attends."""
        position = tiles.start[:, None] + jnp.arange(self.page_size, dtype=jnp.int32)

        def write(pool, new):
            return pool.at[tiles.page].set(jnp.swapaxes(new, 1, 2), mode="promise_in_bounds")

        _, pools = self._hidden(weights, pools, tiles.tokens, position, write, tiles.tables, jnp.max(position))
        return pools

    def _hidden(self, weights, pools, tokens, position, write, tables, last_position):
        num_blocks = last_position // (self.block_pages * self.page_size) + 1

        scale = self.architecture.attention_scale

        def attend(q, k, v, pool):
            k_pages, v_pages = write(pool[0], k), write(pool[1], v)
            if self._decode_kernel is not None and q.shape[1] == 1:
                out = self._decode_kernel(q[:, 0], k_pages, v_pages, tables, position[:, 0], scale)[:, None]
            else:
                out = paged_attention(
                    q, k_pages, v_pages, tables, position, num_blocks, scale=scale, block_pages=self.block_pages
                )
            return out, (k_pages, v_pages)

        return self._model.apply(weights, tokens, position, attend, pools)


def unpack_steps(packed: np.ndarray) -> Steps:
    count = int(packed[-1])
    token, policy, behaviour = packed[:-1].reshape(len(Drawn._fields), MAX_STEPS, -1)[:, :count]
    return Steps(count, token, policy.view(np.float32), behaviour.view(np.float32))


def _bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _copy_pages(pools, source, target):
    """Copies page source[i] to page target[i] in every layer."""
    return jax.tree.map(lambda pool: pool.at[target].set(pool[source]), pools)
