"""The sampler protocol: asyncio on one side, the engine's thread on the other."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_model import ARCHITECTURE, logps_of, random_variables

from jaxrl.config import SamplerConfig
from jaxrl.engine import EmbeddedSampler
from jaxrl.rollout.protocol import SamplerError, SamplingParams, join

CONFIG = SamplerConfig(slots=4, max_length=96, page_size=8, prefill_chunk=32)
ENDLESS = SamplerConfig(slots=4, max_length=8192, page_size=64, prefill_chunk=64)  # longer than any of these tests


def with_sampler(variables, scenario, config=CONFIG):
    """Runs scenario(sampler) with a limit on its time: nothing here may hang."""

    async def main():
        sampler = EmbeddedSampler(ARCHITECTURE, variables, 0, config)
        try:
            return await asyncio.wait_for(scenario(sampler), 60)
        finally:
            await asyncio.wait_for(sampler.close(), 60)

    return asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


def test_streams_and_completions_are_the_same_tokens(variables):
    async def scenario(sampler):
        params = [SamplingParams(20, seed=i) for i in range(6)]
        whole = await asyncio.gather(*(sampler.generate([1, 2, i], how) for i, how in enumerate(params)))
        streamed = []
        for i, how in enumerate(params):
            streamed.append([part async for part in sampler.stream([1, 2, i], how)])
        return whole, streamed

    whole, streamed = with_sampler(variables, scenario)
    for completion, parts in zip(whole, streamed, strict=True):
        assert completion.finish_reason == "length" and len(completion.tokens.ids) == 20
        assert len(parts) > 1 and [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == "length"
        together = join([part.tokens for part in parts])
        for name in ("ids", "policy_logp", "behaviour_logp", "version", "source"):
            assert getattr(together, name).tolist() == getattr(completion.tokens, name).tolist()


def test_closing_a_stream_frees_its_slot_and_pages(variables):
    async def scenario(sampler):
        streams = [sampler.stream(list(range(i, i + 30)), SamplingParams(8000, seed=i)) for i in range(4)]
        for stream in streams:
            await anext(stream)
        assert sampler.load().num_running == 4 and sampler.load().kv_use > 0
        waiting = asyncio.create_task(sampler.generate([1] * 40, SamplingParams(3)))
        await streams[0].aclose()
        assert len((await waiting).tokens.ids) == 3
        task = asyncio.create_task(sampler.generate([7] * 20, SamplingParams(8000)))
        await until(lambda: sampler.load().num_running == 4)
        task.cancel()
        for stream in streams[1:]:
            await stream.aclose()
        await until(lambda: sampler.load().num_running == 0)
        assert sampler.load().kv_use == 0 and sampler.load().num_waiting == 0

    with_sampler(variables, scenario, ENDLESS)


def test_publish_in_flight_continues_what_runs(variables):
    new = random_variables(1)

    async def scenario(sampler):
        stream = sampler.stream([1, 2, 3], SamplingParams(1000, seed=1))
        parts = [await anext(stream)]
        report = await sampler.publish(new, 1, in_flight=True)
        assert report.version == 1 and report.num_continued == 1 and report.seconds >= 0
        assert report.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(new))
        jax.tree.map(lambda leaf: leaf.delete(), new)
        parts += [part async for part in stream]
        version = join([part.tokens for part in parts]).version
        assert len(version) == 1000 and version[0] == 0 and version[-1] == 1 and (np.diff(version) >= 0).all()

    with_sampler(variables, scenario, ENDLESS)


def test_publish_waits_until_none_runs_and_holds_new_requests_back(variables):
    new = random_variables(1)

    async def scenario(sampler):
        stream = sampler.stream([1, 2, 3], SamplingParams(90, seed=1))
        await anext(stream)
        publish = asyncio.create_task(sampler.publish(new, 1, in_flight=False))
        await asyncio.sleep(0)
        late = asyncio.create_task(sampler.generate([1, 2, 3], SamplingParams(4)))
        version = np.concatenate([part.tokens.version async for part in stream])
        assert (version == 0).all()
        assert (await publish).num_continued == 0
        completion = await late
        assert (completion.tokens.version == 1).all()
        return completion

    completion = with_sampler(variables, scenario)
    np.testing.assert_allclose(completion.tokens.policy_logp, logps_of(new, [1, 2, 3], completion.tokens.ids), atol=1e-5)


def test_a_refused_publish_leaves_the_sampler_running(variables):
    async def scenario(sampler):
        with pytest.raises(SamplerError, match="params/norm/scale"):
            await sampler.publish({"params": variables["params"] | {"norm": {"scale": jnp.ones(65)}}}, 1, in_flight=True)
        completion = await sampler.generate([1, 2], SamplingParams(2))
        assert (completion.tokens.version == 0).all()

    with_sampler(variables, scenario)


def test_the_prefix_cache_and_emptying_it_change_no_bit(variables):
    async def scenario(sampler):
        first = await sampler.generate(list(range(40)), SamplingParams(8, seed=2))
        again = await sampler.generate(list(range(40)), SamplingParams(8, seed=2))
        await sampler.publish(variables, 1, in_flight=True)
        fresh = await sampler.generate(list(range(40)), SamplingParams(8, seed=2))
        return first, again, fresh

    first, again, fresh = with_sampler(variables, scenario)
    for other in (again, fresh):
        assert other.tokens.ids.tobytes() == first.tokens.ids.tobytes()
        assert other.tokens.policy_logp.tobytes() == first.tokens.policy_logp.tobytes()


def test_a_prompt_that_cannot_fit_is_refused_at_once(variables):
    async def scenario(sampler):
        with pytest.raises(SamplerError, match="sampler.max_length = 96"):
            await sampler.generate([1] * 96, SamplingParams(1))
        with pytest.raises(SamplerError, match="sampler.max_length = 96"):
            await anext(sampler.stream([1] * 96, SamplingParams(1)))

    with_sampler(variables, scenario)


def test_an_engine_that_fails_reaches_everyone_who_waits(variables):
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, variables)

    async def scenario(sampler):
        tasks = [asyncio.create_task(sampler.generate([1, i], SamplingParams(8000))) for i in range(8)]
        await until(lambda: sampler.load().num_running == 4)
        await sampler.publish(broken, 1, in_flight=True)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, SamplerError) and "not finite under the weights of version 1" in str(r) for r in results)
        for later in (sampler.generate([1], SamplingParams(1)), sampler.publish(variables, 2, True)):
            with pytest.raises(SamplerError, match="not finite"):
                await later

    with_sampler(variables, scenario, ENDLESS)


def test_closing_the_sampler_ends_every_wait(variables):
    async def scenario(sampler):
        tasks = [asyncio.create_task(sampler.generate([1, i], SamplingParams(8000))) for i in range(8)]
        await until(lambda: sampler.load().num_running == 4)
        held = asyncio.create_task(sampler.publish(variables, 1, in_flight=False))
        await asyncio.sleep(0)
        await sampler.close()
        results = await asyncio.gather(*tasks, held, return_exceptions=True)
        assert all(isinstance(r, SamplerError) and "closed" in str(r) for r in results)
        with pytest.raises(SamplerError, match="closed"):
            await sampler.generate([1], SamplingParams(1))

    with_sampler(variables, scenario, ENDLESS)
