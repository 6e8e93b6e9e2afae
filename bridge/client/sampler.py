"""vLLM servers behind the sampler protocol: what is asked of them, and what their lines mean to the trainer.

Servers know token ids only: stop strings are looked for here, and a generation is cut behind the token that completes
one. They return one log-prob per token, after temperature and truncation; nothing truncates (the config refuses it), so it
is the policy's and the behaviour's at once. At temperature 0 it is the policy's at temperature 1, and the behaviour's is 0.
"""

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.data import Source
from jaxrl.engine.stopping import StopStrings
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
        """As the protocol has it. The servers get a copy in their own dtype, which is kept until the next publish: a server
        that has to be started again gets it again."""
        copy = await asyncio.to_thread(self._copy, weights)
        return await self._fleet.publish(copy, version, in_flight)

    def load(self) -> SamplerLoad:
        return self._fleet.load()

    async def close(self) -> None:
        await self._fleet.close()

    def _copy(self, weights: Any) -> Any:
        return jax.block_until_ready(jax.tree.map(self._copy_leaf, weights))

    def _copy_leaf(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x.astype(self._dtype)
        return jnp.array(x, self._dtype, copy=True)


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


def allow_connections(count: int) -> None:
    """Raises this process's limit of open files as far as it may, for a connection for each of `count` generations."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 1024 if hard == resource.RLIM_INFINITY else min(count + 1024, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
