"""vLLM servers behind the sampler protocol: what is asked of them, and what their lines mean to the trainer.

Servers know token ids only: stop strings are looked for here, and a generation is cut behind the token that completes
one. They return one log-prob per token, after temperature and truncation; nothing truncates (the config refuses it), so it
is the policy's and the behaviour's at once. At temperature 0 it is the policy's at temperature 1, and the behaviour's is 0.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge.client.fleet import Fleet
from bridge.client.launch import find_interpreter, launches
from bridge.client.link import LinkSettings
from bridge.client.process import KEY_VARIABLE, Launch
from bridge.client.replica import Attached
from bridge.client.segments import run_id, sweep
from jaxrl.config import Config, ConfigError
from jaxrl.data import Source
from jaxrl.engine.stopping import StopStrings
from jaxrl.models.architecture import Architecture
from jaxrl.rollout.admission import admit
from jaxrl.rollout.protocol import (
    Completion,
    PublishReport,
    SampledTokens,
    SamplerError,
    SamplerLoad,
    SamplingParams,
    join,
)


class VllmSampler:
    """Implements `jaxrl.rollout.protocol.Sampler` over a fleet of servers; made by `jaxrl.samplers.make_sampler`."""

    def __init__(
        self,
        fleet: Any,
        *,
        decode: Callable[[list[int]], str],
        eos_ids: Sequence[int],
        max_length: int,
        vocab_size: int,
        dtype: str,
    ):
        self._fleet = fleet
        self._decode = decode
        self._eos_ids = frozenset(eos_ids)
        self._max_length, self._vocab_size = max_length, vocab_size
        self._dtype = jnp.dtype(dtype)
        self._base: Any = None  # under adapters

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> AsyncIterator[Completion]:
        prompt = admit(prompt_ids, params, self._max_length, self._vocab_size)
        if params.top_p != 1 or params.top_k != 0 or params.min_p != 0:
            raise SamplerError("sampling.top_p, top_k and min_p must be off: vLLM does not tell the log-prob before truncation")
        asked = replace(
            params,
            max_tokens=min(params.max_tokens, self._max_length - len(prompt)),
            stop_token_ids=tuple(sorted(self._eos_ids | set(params.stop_token_ids))),
        )
        begun = prompt[len(prompt) - params.num_continued :]
        stops = StopStrings(params.stop_strings, self._decode, begun) if params.stop_strings else None
        async with aclosing(self._fleet.stream(prompt, asked, priority)) as lines:
            async for line in lines:
                reason = line.get("finish_reason")
                tokens = sampled_tokens(line, params.temperature)
                found = stops.feed(tokens.ids.tolist()) if stops is not None and len(tokens.ids) else None
                if found is not None:
                    tokens, reason = _first(tokens, found + 1), "stop"
                if len(tokens.ids) or reason is not None:
                    yield Completion(tokens, reason)
                if reason is not None:
                    return

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> Completion:
        async with aclosing(self.stream(prompt_ids, params, priority)) as stream:
            parts = [part async for part in stream]
        return Completion(join([part.tokens for part in parts]), parts[-1].finish_reason)

    async def publish(self, weights: Any, version: int, in_flight: bool) -> PublishReport:
        """As the protocol has it. The servers get a copy, which is kept until the next publish: a server that has to be
        started again gets it again."""
        return await self._fleet.publish(await asyncio.to_thread(self._copy, weights), version, in_flight)

    def load(self) -> SamplerLoad:
        return self._fleet.load()

    async def close(self) -> None:
        await self._fleet.close()

    def _copy(self, weights: Any) -> Any:
        """In the servers' dtype; a base under adapters, which stays the same, is copied once."""
        if "lora" in weights and self._base is None:
            self._base = self._cast(weights["params"])
        if "lora" in weights:
            return {"params": self._base, "lora": jax.tree.map(np.array, weights["lora"])}
        return {"params": self._cast(weights["params"])}

    def _cast(self, params: Any) -> Any:
        def leaf(x):
            return x.astype(self._dtype) if isinstance(x, np.ndarray) else jnp.array(x, self._dtype, copy=True)

        return jax.block_until_ready(jax.tree.map(leaf, params))


async def start_sampler(
    config: Config,
    architecture: Architecture,
    decode: Callable[[list[int]], str],
    eos_ids: Sequence[int],
    folder: Path,
    weights: Awaitable[tuple[Any, int]],
) -> VllmSampler:
    """Starts, or attaches to, the servers of `config.sampler`, gives them `weights` when these are there, and returns the
    sampler over them. Raises ConfigError and SamplerError; whatever was started is ended then, as when this is cancelled."""
    settings = config.sampler
    name = run_id(folder)
    sweep(name)
    links = LinkSettings(settings, architecture, config.model.lora, name)
    fleet = Fleet(_servers(config, architecture, folder), links.open)
    sampler = VllmSampler(
        fleet,
        decode=decode,
        eos_ids=eos_ids,
        max_length=min(settings.max_length, architecture.context_length),
        vocab_size=architecture.vocab_size,
        dtype=settings.dtype,
    )
    try:
        await fleet.start()
        variables, version = await weights
        await sampler.publish(variables, version, in_flight=False)
    except BaseException:
        await sampler.close()
        raise
    return sampler


def _servers(config: Config, architecture: Architecture, folder: Path) -> list[Launch] | list[Attached]:
    settings = config.sampler
    if settings.urls:
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise ConfigError("sampler.urls", f"set {KEY_VARIABLE} in the environment: those servers answer nobody without it")
        return [Attached(url, key) for url in settings.urls]
    return launches(settings, architecture, config.model.lora, find_interpreter(settings), folder, secrets.token_urlsafe(32))


def sampled_tokens(line: Mapping[str, Any], temperature: float) -> SampledTokens:
    """The tokens of a line of `/bridge/generate`. Raises SamplerError if its columns do not fit together."""
    ids, logp = np.asarray(line["ids"], np.int32), np.asarray(line["logp"], np.float32)
    version = np.repeat(*np.asarray(line["versions"], np.int32).reshape(-1, 2).T)
    if not len(ids) == len(logp) == len(version):
        raise SamplerError(f"a server sent {len(ids)} tokens with {len(logp)} log-probs and {len(version)} versions")
    behaviour = logp if temperature > 0 else np.zeros_like(logp)
    return SampledTokens(ids, logp, behaviour, version, np.full(len(ids), Source.PLAIN, np.uint8))


def _first(tokens: SampledTokens, count: int) -> SampledTokens:
    return SampledTokens(
        *(column[:count] for column in (tokens.ids, tokens.policy_logp, tokens.behaviour_logp, tokens.version, tokens.source))
    )
