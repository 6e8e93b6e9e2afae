"""A sampler that is held to its word: every token has its log-probs, and comes from the weights it should come from.

The served version is asserted, not believed: a server that missed a publish, or never left the base model, would
otherwise train the policy on another one's answers.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from jaxrl.rollout.protocol import Completion, PublishReport, SampledTokens, Sampler, SamplerError, SamplerLoad, SamplingParams


class CheckedSampler:
    """`sampler`, which serves `version`, with every completion checked; raises SamplerError for a token that lacks a
    log-prob, and for versions that fall within a completion, are older than the newest publish that was acknowledged when it was
    asked for, or were never handed to the sampler."""

    def __init__(self, sampler: Sampler, version: int):
        self._sampler = sampler
        self._served = version  # the newest that the sampler acknowledged
        self._handed = version  # the newest that it may have

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> AsyncIterator[Completion]:
        oldest = self._served
        async with aclosing(self._sampler.stream(prompt_ids, params, priority)) as parts:
            async for part in parts:
                oldest = self._check(part.tokens, oldest)
                yield part

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> Completion:
        oldest = self._served
        completion = await self._sampler.generate(prompt_ids, params, priority)
        self._check(completion.tokens, oldest)
        return completion

    async def publish(self, weights: Any, version: int, in_flight: bool) -> PublishReport:
        self._handed = max(self._handed, version)
        report = await self._sampler.publish(weights, version, in_flight)
        self._served = version
        return report

    def load(self) -> SamplerLoad:
        return self._sampler.load()

    async def close(self) -> None:
        await self._sampler.close()

    def _check(self, tokens: SampledTokens, oldest: int) -> int:
        """Returns the version that what follows must not fall below."""
        for name in ("policy_logp", "behaviour_logp", "version", "source"):
            column = getattr(tokens, name)
            if len(column) != len(tokens.ids):
                raise SamplerError(f"the sampler sent {len(tokens.ids)} tokens with {len(column)} values of {name}")
            if not np.isfinite(column).all():
                raise SamplerError(f"the sampler sent a token whose {name} is not finite")
        if not len(tokens.ids):
            return oldest
        version = tokens.version
        if version[0] < oldest or version[-1] > self._handed or (np.diff(version) < 0).any():
            raise SamplerError(
                f"the sampler sent tokens of policy versions {sorted(set(version.tolist()))} where {oldest} to {self._handed}, "
                "never falling, were expected: it does not serve what was published to it, restart it"
            )
        return int(version[-1])
