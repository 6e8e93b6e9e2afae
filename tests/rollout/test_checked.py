"""Tokens that do not say what they are, or are of weights that nobody asked for, are an error that says so."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from jaxrl.data import Source
from jaxrl.rollout.checked import CheckedSampler
from jaxrl.rollout.protocol import Completion, PublishReport, SampledTokens, SamplerError, SamplingParams, join


def tokens(*versions: int) -> SampledTokens:
    n = len(versions)
    zeros = np.zeros(n, np.float32)
    return SampledTokens(np.arange(n, dtype=np.int32), zeros, zeros, np.array(versions, np.int32), np.full(n, Source.PLAIN))


class Scripted:
    """Sends `parts`; between two of them `meanwhile` runs."""

    def __init__(self, *parts: SampledTokens, meanwhile=None, refuses=False):
        self.parts, self.meanwhile, self.refuses = parts, meanwhile, refuses

    async def stream(self, prompt_ids, params, priority=0):
        for i, part in enumerate(self.parts):
            if i and self.meanwhile:
                await self.meanwhile()
            yield Completion(part, "stop" if i == len(self.parts) - 1 else None)

    async def generate(self, prompt_ids, params, priority=0):
        if self.meanwhile:
            await self.meanwhile()
        return Completion(join(self.parts), "stop")

    async def publish(self, weights, version, in_flight):
        if self.refuses:
            raise SamplerError("no room for the weights")
        return PublishReport(version, 0, 0.0, 0)


async def stream(sampler):
    return [part async for part in sampler.stream([1], SamplingParams(9))]


async def generate(sampler):
    return await sampler.generate([1], SamplingParams(9))


@pytest.mark.parametrize("ask", [stream, generate])
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([tokens(5), tokens(5, 5)], None),
        ([tokens(4)], r"versions \[4\] where 5 to 5"),
        ([tokens(5), tokens(6)], r"versions \[(5, )?6\] where 5 to 5"),
        ([tokens(5), tokens(5, 4)], r"versions \[4, 5\] where 5 to 5"),
        ([tokens(-1)], r"versions \[-1\]"),
        ([replace(tokens(5, 5), version=np.array([5]))], "2 tokens with 1 values of version"),
        ([replace(tokens(5, 5), policy_logp=np.zeros(1))], "2 tokens with 1 values of policy_logp"),
        ([replace(tokens(5), behaviour_logp=np.array([np.nan]))], "behaviour_logp is not finite"),
    ],
)
def test_every_token_is_of_the_served_version(ask, parts, message):
    sampler = CheckedSampler(Scripted(*parts), 5)
    if message is None:
        asyncio.run(ask(sampler))
    else:
        with pytest.raises(SamplerError, match=message):
            asyncio.run(ask(sampler))


@pytest.mark.parametrize("ask", [stream, generate])
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([tokens(5), tokens(5, 6)], None),
        ([tokens(5), tokens(5)], None),  # a sampler that takes up new weights late
        ([tokens(5), tokens(6), tokens(5)], r"where (5|6) to 6, never falling"),
        ([tokens(5), tokens(7)], r"where 5 to 6"),
    ],
)
def test_a_publish_under_way_raises_what_may_come_and_not_what_must(ask, parts, message):
    async def main():
        async def publish():
            await sampler.publish(None, 6, True)

        inner = Scripted(*parts, meanwhile=publish)
        sampler = CheckedSampler(inner, 5)
        if message is None:
            await ask(sampler)
            inner.parts, inner.meanwhile = [tokens(5)], None
            with pytest.raises(SamplerError, match=r"versions \[5\] where 6 to 6"):  # the next request must see it
                await ask(sampler)
        else:
            with pytest.raises(SamplerError, match=message):
                await ask(sampler)

    asyncio.run(main())


def test_a_refused_publish_is_not_waited_for():
    async def main():
        sampler = CheckedSampler(Scripted(tokens(5), refuses=True), 5)
        with pytest.raises(SamplerError, match="no room"):
            await sampler.publish(None, 6, True)
        await generate(sampler)

    asyncio.run(main())
