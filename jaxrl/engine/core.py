"""The engine: continuous batching over fixed slots, one synchronous step at a time.

No threads and no asyncio here: `sampler.py` calls `step` in a loop from the one thread that owns the device. A request
waits in order of (priority, arrival); it is admitted with all the pages it may need; the parts of its prompt nobody has
computed are prefilled, page-sized tiles of several requests to a chunk; then it decodes in its slot. Results do not depend
on the slot, on what runs beside it or on the order of arrival.
"""

import functools
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl.config import LoraConfig, SamplerConfig
from jaxrl.data import Source
from jaxrl.engine.pages import TRASH_PAGE, Allocation, Node, PageCache
from jaxrl.engine.programs import MAX_STEPS, STOP_IDS, Programs, Slots, Steps, Tiles, unpack_steps
from jaxrl.engine.sampling import Controls
from jaxrl.engine.stopping import StopStrings
from jaxrl.models.architecture import Architecture
from jaxrl.rollout.admission import admit
from jaxrl.rollout.protocol import SampledTokens, SamplerError, SamplingParams

# A dispatch of decode aims at this long: short enough that requests, cancellations and weights are taken up promptly,
# long enough that the host's share of it is small.
TARGET_DISPATCH_SECONDS = 0.03
_programs = functools.cache(Programs)  # an engine made again with the same limits compiles nothing
RATE_WINDOW_SECONDS = 5.0  # over which tokens per second are counted


@dataclass(eq=False)
class Request:
    """One generation. The fields below `stop_ids` belong to the engine."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    stop_ids: frozenset[int]
    sink: Any = None  # whoever submitted it; opaque here
    arrival: int = -1
    slot: int = -1
    allocation: Allocation | None = None
    last_token: int = -1
    num_tokens: int = 0  # prompt and generated
    num_left: int = 0  # tokens still allowed
    stop_strings: StopStrings | None = None
    is_cancelled: bool = False


@dataclass(frozen=True)
class Emission:
    """What a step produced for a request: tokens, and the reason if they are the last."""

    request: Request
    tokens: SampledTokens
    finish_reason: str | None


@dataclass
class _Queues:
    waiting: list[tuple[int, int, Request]] = field(default_factory=list)  # heap
    prefilling: list[Request] = field(default_factory=list)  # in order of admission
    decoding: dict[int, Request] = field(default_factory=dict)  # by slot


class Engine:
    def __init__(
        self,
        architecture: Architecture,
        weights: Any,
        version: int,
        config: SamplerConfig,
        decode: Callable[[list[int]], str] | None,
        eos_token_ids: Sequence[int],
        lora: LoraConfig | None,
    ):
        self.config = config
        self.version = version
        self.hold = False  # admit nobody: a publish waits until none is running
        self._decode_text = decode
        self._eos = frozenset(eos_token_ids)
        self._device = jax.local_devices()[0]
        most_pages = -(-config.max_length // config.page_size) + 1
        num_usable = config.pages or config.slots * most_pages
        if num_usable < most_pages:
            raise SamplerError(
                f"sampler.pages = {config.pages} cannot hold one sequence of sampler.max_length = {config.max_length} tokens: "
                f"use at least {most_pages}, or 0"
            )
        self._has_lora = lora is not None
        self._vocab_size = architecture.vocab_size
        self._programs = _programs(architecture, config, num_usable + 1, lora, self._device)
        self._cache = PageCache(num_usable + 1, config.page_size)
        self._pools = self._programs.make_pools()
        self._queues = _Queues()
        self._free_slots = list(range(config.slots - 1, -1, -1))
        self._arrivals = itertools.count()
        self._prefilled_last = False
        self._seconds_per_step: float | None = None
        self._recent: deque[tuple[float, int]] = deque()  # (time, tokens) of recent dispatches
        self._weights = self._copy(weights)

    # Requests

    def make_request(self, prompt: Sequence[int], params: SamplingParams, priority: int, sink: Any = None) -> Request:
        """Raises SamplerError if the prompt cannot be generated from. Thread-safe: reads constants only."""
        ids = admit(prompt, params, self.config.max_length, self._vocab_size)
        if params.stop_strings and self._decode_text is None:
            raise SamplerError("sampling.stop needs a tokenizer: this sampler was made without one")
        stop_ids = self._eos | frozenset(params.stop_token_ids)
        return Request(ids, params, priority, stop_ids, sink)

    def submit(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        heapq.heappush(self._queues.waiting, (request.priority, request.arrival, request))

    def cancel(self, request: Request) -> None:
        """Frees whatever the request holds; nothing more is emitted for it."""
        request.is_cancelled = True  # if it waits, it is dropped when its turn comes
        if request.slot >= 0:
            self._finish(request)

    # Weights

    def publish(self, weights: Any, version: int) -> tuple[int, int]:
        """Installs a copy of `weights`. Returns its bytes and how many generations go on under it. Raises SamplerError, and
        changes nothing, if a tensor does not fit.

        Generations that go on keep their cached keys and values: their later tokens are computed by the new weights over
        what the old ones left, and carry the new version. A forward of the new weights alone gives them other log-probs,
        so parity of a generation that spans versions is bounded by that, not by rounding. Requests still in prefill start again, so that a
        generation that has emitted nothing sees one version only.
        """
        copy = self._copy(weights)
        _check_same_form(self._weights, copy)
        jax.block_until_ready(copy)
        self._weights, self.version = copy, version
        self.clear_prefix_cache()
        for request in self._queues.prefilling:
            self._release(request)
            heapq.heappush(self._queues.waiting, (request.priority, request.arrival, request))
        self._queues.prefilling = []
        return sum(leaf.nbytes for leaf in jax.tree.leaves(copy)), len(self._queues.decoding)

    def clear_prefix_cache(self) -> None:
        self._cache.clear()

    def _copy(self, weights: Any) -> Any:
        """The weights in the sampler's own memory, as it computes with them."""
        if "params" not in weights:
            raise SamplerError(f'published weights need "params" beside what they have: {", ".join(weights) or "nothing"}')
        if ("lora" in weights) != self._has_lora:
            there, here = ("adapters", "without") if "lora" in weights else ("no adapters", "with")
            raise SamplerError(f"the published weights have {there}, but this sampler was made {here} a LoRA config")
        return self._programs.prepare_weights(jax.device_put(weights, self._device))

    # State

    @property
    def num_running(self) -> int:
        return self.config.slots - len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        return sum(not request.is_cancelled for _, _, request in list(self._queues.waiting))

    @property
    def can_work(self) -> bool:
        return self.num_running > 0 or (bool(self._queues.waiting) and not self.hold)

    @property
    def kv_use(self) -> float:
        return 1 - self._cache.num_available / self._cache.num_usable

    @property
    def tokens_per_second(self) -> float:
        since = time.monotonic() - RATE_WINDOW_SECONDS
        return sum(count for at, count in list(self._recent) if at >= since) / RATE_WINDOW_SECONDS

    # The step

    def step(self) -> list[Emission]:
        """Admits what fits, then computes one prefill chunk or one dispatch of decode."""
        self._admit()
        self._start_ready()
        queues = self._queues
        # An idle slot costs as much as a busy one, so slots are filled first while most are empty; then chunks alternate
        # with decoding, and what is decoding is never stalled for long.
        fill = len(queues.prefilling) >= len(queues.decoding)
        if queues.prefilling and (fill or not self._prefilled_last):
            self._prefill_chunk()
            self._prefilled_last = True
            self._start_ready()
            return []
        self._prefilled_last = False
        return self._decode_steps() if queues.decoding else []

    def _admit(self) -> None:
        waiting = self._queues.waiting
        while waiting and self._free_slots and not self.hold:
            request = waiting[0][2]
            if not request.is_cancelled:
                num_total = min(len(request.prompt) + request.params.max_tokens, self.config.max_length)
                allocation = self._cache.allocate(request.prompt, num_total)
                if allocation is None:
                    return  # the first in order goes first: letting others pass could starve it
                request.allocation = allocation
                request.slot = self._free_slots.pop()
                request.last_token = request.prompt[-1]
                request.num_tokens = len(request.prompt)
                request.num_left = num_total - len(request.prompt)
                if request.params.stop_strings:
                    begun = request.prompt[len(request.prompt) - request.params.num_continued :]
                    request.stop_strings = StopStrings(request.params.stop_strings, self._decode_text, begun)
                self._queues.prefilling.append(request)
            heapq.heappop(waiting)

    def _start_ready(self) -> None:
        """Moves requests whose prompt is computed to decoding, each with its own copy of the partly filled prompt page."""
        copies = []
        still = []
        for request in self._queues.prefilling:
            allocation = request.allocation
            if not all(node.ready for node in allocation.nodes):
                still.append(request)
                continue
            if allocation.tail is not None:
                copies.append((allocation.tail.page, allocation.private[0]))
                self._cache.release_tail(allocation)
            self._queues.decoding[request.slot] = request
        self._queues.prefilling = still
        if copies:
            pairs = np.full((self.config.slots, 2), TRASH_PAGE, np.int32)
            pairs[: len(copies)] = copies
            self._pools = self._programs.copy_pages(self._pools, pairs[:, 0].copy(), pairs[:, 1].copy())

    def _prefill_chunk(self) -> None:
        programs = self._programs
        num_tiles, size = programs.num_tiles, programs.page_size
        tokens = np.zeros((num_tiles, size), np.int32)
        start = np.zeros(num_tiles, np.int32)
        page = np.full(num_tiles, TRASH_PAGE, np.int32)
        tables = np.full((num_tiles, programs.table_width), TRASH_PAGE, np.int32)
        chosen: dict[Node, None] = {}
        for request in self._queues.prefilling:
            nodes = request.allocation.nodes
            for i, node in enumerate(nodes):
                if len(chosen) == num_tiles:
                    break
                if node.ready or node in chosen:
                    continue
                n = len(chosen)
                chosen[node] = None
                tokens[n, : len(node.tokens)] = node.tokens
                start[n], page[n] = node.start, node.page
                tables[n, : i + 1] = [ancestor.page for ancestor in nodes[: i + 1]]
        self._pools = programs.prefill(self._weights, self._pools, Tiles(tokens, start, page, tables))
        for node in chosen:
            node.ready = True

    def _decode_steps(self) -> list[Emission]:
        running = dict(self._queues.decoding)
        began = time.monotonic()
        refill = bool(self._queues.waiting) and not self.hold
        self._pools, steps = self._programs.decode(
            self._weights, self._pools, self._slots(running), np.int32(self._num_steps()), np.bool_(refill)
        )
        steps = unpack_steps(np.asarray(steps))
        count = steps.count
        emissions = [self._collect(request, steps, count) for request in running.values()]
        now = time.monotonic()
        self._seconds_per_step = (now - began) / count
        self._recent.append((now, sum(len(e.tokens.ids) for e in emissions)))
        while self._recent[0][0] < now - RATE_WINDOW_SECONDS:
            self._recent.popleft()
        return emissions

    def _num_steps(self) -> int:
        if self._seconds_per_step is None:
            return 1
        return int(np.clip(TARGET_DISPATCH_SECONDS / self._seconds_per_step, 1, MAX_STEPS))

    def _slots(self, running: dict[int, Request]) -> Slots:
        num_slots = self.config.slots
        tables = np.full((num_slots, self._programs.table_width), TRASH_PAGE, np.int32)
        token, position, remaining, top_k = (np.zeros(num_slots, np.int32) for _ in range(4))
        stop_ids = np.full((num_slots, STOP_IDS), -1, np.int32)
        temperature, top_p = np.ones(num_slots, np.float32), np.ones(num_slots, np.float32)
        min_p, seed = np.zeros(num_slots, np.float32), np.zeros(num_slots, np.uint32)
        for slot, request in running.items():
            params = request.params
            table = request.allocation.table
            tables[slot, : len(table)] = table
            token[slot], position[slot], remaining[slot] = request.last_token, request.num_tokens - 1, request.num_left
            watched = sorted(request.stop_ids)[:STOP_IDS]
            stop_ids[slot, : len(watched)] = watched
            temperature[slot], top_p[slot], top_k[slot] = params.temperature, params.top_p, params.top_k
            min_p[slot], seed[slot] = params.min_p, params.seed & 0xFFFFFFFF
        return Slots(tables, token, position, remaining, stop_ids, Controls(temperature, top_p, top_k, min_p, seed))

    def _collect(self, request: Request, steps: Steps, count: int) -> Emission:
        """The request's share of a dispatch, up to its end; finishes it there."""
        slot = request.slot
        count = min(count, request.num_left)
        ids = steps.token[:count, slot]
        reason = None
        for i, token in enumerate(ids.tolist()):
            if token in request.stop_ids:
                count, reason = i + 1, "stop"
                break
        if request.stop_strings is not None and (found := request.stop_strings.feed(ids[:count].tolist())) is not None:
            count, reason = found + 1, "stop"
        policy, behaviour = steps.policy_logp[:count, slot].copy(), steps.behaviour_logp[:count, slot].copy()
        if not (np.isfinite(policy).all() and np.isfinite(behaviour).all()):
            raise SamplerError(f"log-probabilities are not finite under the weights of version {self.version}")
        request.last_token = int(ids[count - 1])
        request.num_tokens += count
        request.num_left -= count
        if reason is None and request.num_left == 0:
            reason = "length"
        tokens = SampledTokens(
            ids[:count].copy(),
            policy,
            behaviour,
            np.full(count, self.version, np.int32),
            np.full(count, Source.PLAIN, np.uint8),
        )
        if reason is not None:
            self._finish(request)
        return Emission(request, tokens, reason)

    def _finish(self, request: Request) -> None:
        if self._queues.decoding.pop(request.slot, None) is None:
            self._queues.prefilling.remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        self._cache.release(request.allocation)
        request.allocation = None
        self._free_slots.append(request.slot)
        request.slot = -1


def _check_same_form(old: Any, new: Any) -> None:
    """Raises SamplerError naming the first tensor that is missing, unexpected or of another shape."""
    old_shapes, new_shapes = (
        {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (old, new)
    )
    for name in sorted(old_shapes.keys() | new_shapes.keys()):
        if old_shapes.get(name) != new_shapes.get(name):
            raise SamplerError(
                f"published weights do not fit this sampler: {name} is {new_shapes.get(name, 'missing')}, "
                f"{old_shapes.get(name, 'unknown')} here"
            )
