"""The sampler over one real server, held to a full forward of the weights that each token says it is from."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from vllm_fleet import ARCHITECTURE, LENGTH, PYTHON, TOLERANCE, log_probs, needs_vllm, weights

from bridge.client.sampler import start_sampler
from jaxrl.config import parse
from jaxrl.rollout.protocol import SamplerError, SamplingParams, join

pytestmark = needs_vllm
LIMIT = 240.0  # seconds of a test, the start of the server included
PROMPT = [9, 8, 7, 6, 5, 4, 3]
EOS = 2


def decode(ids) -> str:
    return "".join(chr(0x4E00 + i) for i in ids)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(scenario) awaits scenario(sampler) on the sampler's event loop, within LIMIT."""
    sampler_table = {"kind": "vllm", "python": str(PYTHON), "slots": 16, "max_length": LENGTH}
    tables = {"model": {"architecture": ARCHITECTURE.to_hf(), "tokenizer": "none"}, "env": "sums", "sampler": sampler_table}
    folder = tmp_path_factory.mktemp("sampler")
    with asyncio.Runner() as runner:

        async def start():
            first = asyncio.get_running_loop().create_future()
            first.set_result((weights(1), 1))
            return await start_sampler(parse(tables), ARCHITECTURE, decode, (), folder, first)

        sampler = runner.run(asyncio.wait_for(start(), LIMIT))

        def run(scenario):
            return runner.run(asyncio.wait_for(scenario(sampler), LIMIT))

        yield run
        runner.run(sampler.close())


def assert_exact(tokens, prompt, version) -> None:
    expected = log_probs(version, prompt, tokens.ids.tolist())
    assert np.abs(tokens.policy_logp - expected).max() <= TOLERANCE
    assert tokens.policy_logp.tolist() == tokens.behaviour_logp.tolist()


def test_many_at_once_differ_and_have_the_log_probs_of_the_weights(run):
    params = SamplingParams(40, stop_token_ids=(EOS,))
    answers = run(lambda sampler: asyncio.gather(*(sampler.generate(PROMPT, params) for _ in range(24))))
    assert len({tuple(answer.tokens.ids.tolist()) for answer in answers}) == 24
    for answer in answers:
        ids = answer.tokens.ids.tolist()
        assert (answer.tokens.version == 1).all() and EOS not in ids[:-1]
        assert answer.finish_reason == ("stop" if ids[-1] == EOS else "length") and len(ids) <= 40
        assert_exact(answer.tokens, PROMPT, 1)


def test_greedy_is_certain_and_cut_behind_a_stop_string(run):
    greedy = SamplingParams(40, temperature=0.0)
    whole = run(lambda sampler: sampler.generate(PROMPT, greedy)).tokens
    assert not whole.behaviour_logp.any()
    expected = log_probs(1, PROMPT, whole.ids.tolist())
    assert np.abs(whole.policy_logp - expected).max() <= TOLERANCE
    text = decode(whole.ids)
    stop = text[9:11]
    found = text.index(stop) + 2

    async def cut(sampler):
        answer = await sampler.generate(PROMPT, SamplingParams(40, temperature=0.0, stop_strings=(stop,)))
        begun = [*PROMPT, *whole.ids[: found - 1].tolist()]  # the stop string's first token is there already
        rest = await sampler.generate(begun, SamplingParams(40, temperature=0.0, stop_strings=(stop,), num_continued=found - 1))
        return answer, rest

    answer, rest = run(cut)
    assert answer.finish_reason == "stop" and answer.tokens.ids.tolist() == whole.ids[:found].tolist()
    assert rest.finish_reason == "stop" and rest.tokens.ids.tolist() == [whole.ids[found - 1]]


def test_closing_a_stream_ends_the_generation_there(run):
    async def scenario(sampler):
        async with aclosing(sampler.stream(PROMPT, SamplingParams(900))) as parts:
            await anext(parts)
        while sampler.load().num_running or sampler.load().num_waiting:
            await asyncio.sleep(0.05)
        return await sampler.generate([3] * (LENGTH - 4), SamplingParams(900))

    answer = run(scenario)
    assert len(answer.tokens.ids) <= 4 and answer.finish_reason in ("length", "stop")  # what max_length has room for


def test_weights_change_under_generations_and_their_tokens_say_where(run):
    new = weights(2)  # made before anything runs

    async def scenario(sampler):
        begun = asyncio.Event()

        async def generation(first):
            parts = []
            async with aclosing(sampler.stream([first, *PROMPT], SamplingParams(1500))) as stream:
                async for part in stream:
                    parts.append(part.tokens)
                    begun.set()
            return join(parts)

        running = [asyncio.create_task(generation(first)) for first in range(8)]  # so many that they take their time
        await begun.wait()
        report = await sampler.publish(new, 2, in_flight=True)
        return report, await asyncio.gather(*running), await sampler.generate(PROMPT, SamplingParams(20))

    report, answers, after = run(scenario)
    assert report.version == 2 and report.num_continued > 0
    assert sum(set(tokens.version.tolist()) == {1, 2} for tokens in answers) > 0
    for first, tokens in enumerate(answers):
        assert len(tokens.ids) == 1500 and (np.diff(tokens.version) >= 0).all()
        for version in set(tokens.version.tolist()):
            off = np.abs(tokens.policy_logp - log_probs(version, [first, *PROMPT], tokens.ids.tolist()))
            assert off[tokens.version == version].max() <= TOLERANCE
    assert_exact(after.tokens, PROMPT, 2)


def test_weights_of_another_model_are_refused_by_name_and_change_nothing(run):
    async def scenario(sampler):
        params = dict(weights(1)["params"])
        params["norm"] = {"scale": np.ones(32, np.float32)}
        with pytest.raises(SamplerError, match="model.norm.weight"):
            await sampler.publish({"params": params}, 3, in_flight=True)
        return await sampler.generate(PROMPT, SamplingParams(5))

    assert_exact(run(scenario).tokens, PROMPT, 2)
