"""A record of what was sampled is what was sampled, however it was cut; what it has is not sampled again."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data import Source
from jaxrl.rollout.partial import CallRecord, Increment, Recorder, calls_of, merge, question
from jaxrl.rollout.protocol import Completion, SampledTokens, SamplerError, SamplingParams, join

EOS = 0
PARAMS = SamplingParams(max_tokens=12, temperature=0.7, seed=4)


def tokens(ids, version=0) -> SampledTokens:
    n = len(ids)
    logp = -np.asarray(ids, np.float32) / 7
    return SampledTokens(
        np.array(ids, np.int32), logp, logp - 1, np.full(n, version, np.int32), np.full(n, Source.PLAIN, np.uint8)
    )


def same(a: SampledTokens, b: SampledTokens) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "policy_logp", "version"))


class PositionSampler:
    """The token at a position depends on the seed, the position and the token before, as the engine's does."""

    def __init__(self, version=0, most=5):
        self.version, self.most, self.asked = version, most, []

    async def stream(self, prompt_ids, params, priority=0):
        self.asked.append((list(prompt_ids), params))
        ids, start = list(prompt_ids), len(prompt_ids)
        for _ in range(0, params.max_tokens, self.most):
            part = []
            while len(part) < self.most and len(ids) - start < params.max_tokens and ids[-1] != EOS:
                part.append(int(np.random.default_rng([params.seed, len(ids), ids[-1]]).integers(0, 9)))
                ids.append(part[-1])
            reason = "stop" if ids[-1] == EOS else "length" if len(ids) - start == params.max_tokens else None
            await asyncio.sleep(0)
            yield Completion(tokens(part, self.version), reason)
            if reason:
                return


def sample(calls, asked, version=0, most=5):
    """Asks [(key, prompt)] one after another. Returns completions, the written increments and the metrics."""
    written = []
    sampler = PositionSampler(version, most)
    recorder = Recorder(calls, written.append)

    async def ask():
        return [await recorder.generate(sampler, key, prompt, PARAMS, 0) for key, prompt in asked]

    return asyncio.run(ask()), written, recorder.metrics(), sampler


ASKED = [(((), 0), [1, 2]), (((), 1), [3]), (((0,), 0), [1, 2, 4]), (((), 2), [5, 6]), (((0,), 1), [7])]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_continued_from_any_increment_it_is_what_it_would_have_been(data):
    whole, increments, _, _ = sample({}, ASKED, most=2)
    cut = data.draw(st.integers(0, len(increments)))
    flushes = sorted(data.draw(st.lists(st.integers(0, cut), max_size=4)))
    record = [i for a, b in zip([0, *flushes], [*flushes, cut], strict=True) for i in merge(increments[a:b])]
    calls = calls_of(record)
    assert sum(len(c.tokens.ids) for c in calls.values()) == sum(len(i.tokens.ids) for i in increments[:cut])
    again, added, metrics, sampler = sample(calls, ASKED, version=1, most=2)
    num_known = 0
    for (key, _), a, b in zip(ASKED, whole, again, strict=True):
        assert b.tokens.ids.tolist() == a.tokens.ids.tolist() and b.finish_reason == a.finish_reason
        known = len(calls[key].tokens.ids) if key in calls else 0
        assert b.tokens.version.tolist() == [0] * known + [1] * (len(b.tokens.ids) - known)
        num_known += known
    assert metrics == ({"resume/continued_tokens": num_known, "resume/discarded_calls": 0} if calls else {})
    finished = sum(c.finish_reason is not None for c in calls.values())
    assert len(sampler.asked) == len(ASKED) - finished
    # And the next start finds both starts' tokens.
    both = calls_of([*record, *merge(added)])
    for (key, prompt), completion in zip(ASKED, again, strict=True):
        assert same(both[key].tokens, completion.tokens) and both[key].finish_reason == completion.finish_reason
        assert both[key].asked == question(prompt, PARAMS)


def test_a_call_that_asks_something_else_voids_the_record_of_its_chat_from_there_on():
    _, increments, _, _ = sample({}, ASKED)
    calls = calls_of(increments)
    changed = [ASKED[0], (((), 1), [8]), *ASKED[2:]]
    _, added, metrics, sampler = sample(calls, changed)
    assert metrics["resume/discarded_calls"] == 2  # itself and ((), 2)
    assert metrics["resume/continued_tokens"] == sum(len(calls[key].tokens.ids) for key in (((), 0), ((0,), 0), ((0,), 1)))
    assert [prompt for prompt, _ in sampler.asked] == [[8], [5, 6]]
    both = calls_of([*increments, *added[:1]])
    assert both.keys() == {((), 0), ((), 1), ((0,), 0), ((0,), 1)}
    assert both[((), 1)].asked == question([8], PARAMS)


def test_what_does_not_follow_is_no_part_of_the_record():
    def part(start, ids, reason=None, prompt=(1,)):
        return Increment(((), 0), question(prompt, PARAMS), start, tokens(ids), reason)

    first, second, third = part(0, [1, 2]), part(2, [3]), part(3, [4], "stop")
    assert calls_of([second, third]) == {}
    assert calls_of([first, third])[((), 0)].tokens.ids.tolist() == [1, 2]
    assert calls_of([first, second, part(0, [9])])[((), 0)].tokens.ids.tolist() == [9]
    assert calls_of([first, part(2, [3], prompt=(2,))])[((), 0)].tokens.ids.tolist() == [1, 2]
    record = calls_of([first, second, third])[((), 0)]
    assert record.finish_reason == "stop" and same(record.tokens, join([first.tokens, second.tokens, third.tokens]))


def test_a_continued_call_is_told_from_a_new_one():
    record = CallRecord(question([1, 2], PARAMS), tokens([3, 4, 5]), None)
    _, _, _, sampler = sample({((), 0): record}, ASKED[:1])
    ((prompt, params),) = sampler.asked
    assert prompt == [1, 2, 3, 4, 5] and (params.max_tokens, params.num_continued, params.seed) == (9, 3, PARAMS.seed)


def test_a_stream_that_breaks_off_is_an_error():
    class Broken(PositionSampler):
        async def stream(self, prompt_ids, params, priority=0):
            yield Completion(tokens([1]), None)

    with pytest.raises(SamplerError, match="without a finish reason"):
        asyncio.run(Recorder({}, lambda increment: None).generate(Broken(), ((), 0), [1], PARAMS, 0))
