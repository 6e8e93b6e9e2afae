"""What the sampler asks servers for and makes of their lines."""

import asyncio

import numpy as np
import pytest

from bridge.client.sampler import VllmSampler
from jaxrl.data import Source
from jaxrl.rollout.protocol import SamplerError, SamplingParams


class Script:
    """A fleet that says what it is told to, and remembers what it was asked."""

    def __init__(self, *lines):
        self.lines, self.asked, self.is_closed = lines, [], False

    async def stream(self, prompt_ids, params, priority):
        self.asked.append((prompt_ids, params, priority))
        try:
            for line in self.lines:
                yield line
            pytest.fail("it read behind the last line")
        except GeneratorExit:
            self.is_closed = True
            raise


def line(ids, version=3, finish_reason=None, logp=None):
    logp = [-0.1 * i for i in ids] if logp is None else logp
    return {"ids": ids, "logp": logp, "versions": [[version, len(ids)]]} | (
        {"finish_reason": finish_reason} if finish_reason else {}
    )


def sampler(fleet) -> VllmSampler:
    """Token 97 is "a"."""
    return VllmSampler(
        fleet, decode=lambda ids: "".join(map(chr, ids)), eos_ids=(1, 2), max_length=32, vocab_size=128, dtype="float32"
    )


def generate(fleet, prompt, params, priority=0):
    return asyncio.run(sampler(fleet).generate(prompt, params, priority))


def test_lines_become_tokens_with_both_log_probs_and_versions():
    fleet = Script(
        line([97, 98]), {"ids": [99, 100], "logp": [-1, -2], "versions": [[3, 1], [4, 1]], "finish_reason": "length"}
    )
    completion = generate(fleet, [5, 6], SamplingParams(50, stop_token_ids=(9, 2)), priority=-1)
    tokens = completion.tokens
    assert completion.finish_reason == "length" and tokens.ids.tolist() == [97, 98, 99, 100]
    assert tokens.version.tolist() == [3, 3, 3, 4] and (tokens.source == Source.PLAIN).all()
    np.testing.assert_allclose(tokens.policy_logp, [-9.7, -9.8, -1, -2], rtol=1e-6)
    assert tokens.policy_logp.tolist() == tokens.behaviour_logp.tolist()
    ((prompt, asked, priority),) = fleet.asked
    assert list(prompt) == [5, 6] and priority == -1
    assert asked.stop_token_ids == (1, 2, 9) and asked.max_tokens == 30  # 2 and 30 fill max_length
    assert fleet.is_closed


def test_greedy_tokens_are_emitted_with_certainty():
    tokens = generate(Script(line([97], finish_reason="stop")), [5], SamplingParams(5, temperature=0.0)).tokens
    assert tokens.behaviour_logp.tolist() == [0.0] and tokens.policy_logp[0] < 0


@pytest.mark.parametrize(
    "prompt, num_continued, kept", [("q", 0, "xyab"), ("qxya", 0, "xyab"), ("qxya", 1, "xyab"), ("qxab", 0, "xyab")]
)
def test_a_generation_is_cut_behind_the_token_that_completes_a_stop_string(prompt, num_continued, kept):
    fleet = Script(line([ord(c) for c in "xya"]), line([ord(c) for c in "bcd"]), line([ord("e")]))
    params = SamplingParams(20, stop_strings=("ab",), num_continued=num_continued)
    completion = generate(fleet, [ord(c) for c in prompt], params)
    assert "".join(map(chr, completion.tokens.ids)) == kept and completion.finish_reason == "stop"
    assert len(completion.tokens.version) == len(completion.tokens.policy_logp) == 4
    assert fleet.is_closed  # the server is told


def test_a_stop_string_may_begin_in_the_tokens_that_are_continued():
    fleet = Script(line([ord("b"), ord("c")]))
    completion = generate(fleet, [ord("q"), ord("a")], SamplingParams(20, stop_strings=("ab",), num_continued=1))
    assert completion.tokens.ids.tolist() == [ord("b")] and completion.finish_reason == "stop"


@pytest.mark.parametrize(
    "prompt, params, says",
    [
        ([], SamplingParams(5), "empty"),
        ([3] * 32, SamplingParams(5), "sampler.max_length = 32"),
        ([128], SamplingParams(5), "vocabulary of 128"),
        ([3], SamplingParams(5, top_p=0.9), "top_p"),
        ([3], SamplingParams(5, top_k=2), "top_k"),
        ([3], SamplingParams(5, min_p=0.1), "min_p"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompt, params, says):
    fleet = Script()
    with pytest.raises(SamplerError, match=says):
        generate(fleet, prompt, params)
    assert not fleet.asked


def test_columns_of_different_lengths_are_an_error():
    with pytest.raises(SamplerError, match="2 tokens with 1 log-probs"):
        generate(Script(line([5, 6], logp=[-1])), [3], SamplingParams(5))
