"""What `bench shared-prefix` makes and reads: prompts of one length, a run that holds a step, the stop of a generation."""

import asyncio

import numpy as np
import pytest

from jaxrl.bench import shared_prefix
from jaxrl.data import Source
from jaxrl.rollout.protocol import Completion, PublishReport, SampledTokens, SamplingParams
from jaxrl.rollout.tokenizer import load_tokenizer

TOKENIZER = "configs/quickstart"


def options(*more: str):
    return shared_prefix._parse(["--python", "python", "--tokenizer", TOKENIZER, *more])


def test_prompts_begin_sequences_of_one_length():
    tokenizer = load_tokenizer(TOKENIZER)
    texts = shared_prefix._prompts(tokenizer, 57, 5)
    assert [len(tokenizer.bos) + len(tokenizer.encode(text, start=True)) for text in texts] == [57] * 5
    assert len(set(texts)) == 5


@pytest.mark.parametrize("mode", ["sync", "async", "inflight"])
def test_one_row_holds_a_step(mode, tmp_path):
    config = shared_prefix._config(mode, "http://127.0.0.1:1", options("--prompt-tokens", "5200"), tmp_path)
    tokens = 6 * (5200 + 16 * 100)
    assert tokens <= config.packing.row_length < tokens + 1024
    assert config.packing.reads >= 6 * 16 * 100
    assert config.sampler.max_length == 5300


class Slow:
    """A token every 10 ms, but none for 100 ms while it publishes."""

    def __init__(self):
        self.free = asyncio.Event()
        self.free.set()

    async def stream(self, prompt_ids, params, priority=0):
        for i in range(params.max_tokens):
            await asyncio.sleep(0.01)
            await self.free.wait()
            one = np.zeros(1, np.float32)
            tokens = SampledTokens(one.astype(np.int32), one, one, one.astype(np.int32), np.full(1, Source.PLAIN, np.uint8))
            yield Completion(tokens, "length" if i + 1 == params.max_tokens else None)

    async def publish(self, weights, version, in_flight):
        self.free.clear()
        await asyncio.sleep(0.1)
        self.free.set()
        return PublishReport(version, 0, 0.1, 1)


def test_the_stop_is_what_a_publish_adds_to_a_gap():
    async def measure():
        watched = shared_prefix._Watched(Slow())
        running = asyncio.gather(*(watched.generate([1], SamplingParams(30)) for _ in range(3)))
        await asyncio.sleep(0.1)
        await watched.publish(None, 7, True)
        completions = await running
        return watched, completions

    watched, completions = asyncio.run(measure())
    assert [len(c.tokens.ids) for c in completions] == [30] * 3
    assert watched.stops(6) == []
    stops = watched.stops(7)
    assert len(stops) == 3
    assert all(0.05 < stop < 0.5 for stop in stops)  # 0.1 less half a gap or so, and a machine that is busy
