"""What an episode that has not ended has sampled: recorded as it streams in, continued by a later start.

A record is a sequence of increments, each the next tokens of one model call. After a kill the environment starts again
from its task. A call that asks what is recorded gets the recorded tokens, and the sampler goes on behind them if they are
not all; the tokens keep the log-probs and versions they were sampled with. A call that asks something else was made by an
environment that depends on more than the policy's answers: the record of its chat from that call on is thrown away.
"""

import asyncio
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace

from jaxrl.rollout.chat import CallKey
from jaxrl.rollout.protocol import Completion, SampledTokens, Sampler, SamplerError, SamplingParams, join


@dataclass(frozen=True)
class CallRecord:
    """What a call has sampled. finish_reason None: it was still being generated."""

    asked: bytes  # `question` of the call
    tokens: SampledTokens
    finish_reason: str | None


@dataclass(frozen=True)
class Increment:
    """Tokens `start`, `start` + 1, … of a call; those from 0 begin it, and void what is known of it and of later calls of
    the chat."""

    key: CallKey
    asked: bytes
    start: int
    tokens: SampledTokens
    finish_reason: str | None


def question(prompt_ids: Sequence[int], params: SamplingParams) -> bytes:
    """16 bytes, equal for calls that ask the same."""
    how = json.dumps(asdict(params)).encode()
    return hashlib.blake2b(array("i", prompt_ids).tobytes() + how, digest_size=16).digest()


def merge(increments: Iterable[Increment]) -> list[Increment]:
    """The same record in fewer increments: one for every call that stands. What does not continue what is there
    (the increments between were lost) is left out."""
    calls: dict[CallKey, list[Increment]] = {}
    for increment in increments:
        parts = calls.get(increment.key)
        if parts and _continues(parts[-1], increment):
            parts.append(increment)
        elif increment.start == 0 or parts is None:
            _void(calls, increment.key)
            calls[increment.key] = [increment]
    return [replace(parts[-1], start=parts[0].start, tokens=join([part.tokens for part in parts])) for parts in calls.values()]


def calls_of(increments: Iterable[Increment]) -> dict[CallKey, CallRecord]:
    """The calls that a record holds from their first token on."""
    whole = [i for i in merge(increments) if i.start == 0]
    return {i.key: CallRecord(i.asked, i.tokens, i.finish_reason) for i in whole}


def _continues(last: Increment, next: Increment) -> bool:
    return last.asked == next.asked and last.finish_reason is None and last.start + len(last.tokens.ids) == next.start


def _void(calls: dict[CallKey, object], key: CallKey) -> int:
    """Removes a call and the later ones of its chat. Returns how many there were."""
    path, number = key
    later = [(p, n) for p, n in calls if p == path and n >= number]
    for key in later:
        del calls[key]
    return len(later)


class Recorder:
    """Samples the calls of one episode. calls: the record of an earlier start. write: takes every increment as it comes."""

    def __init__(self, calls: Mapping[CallKey, CallRecord], write: Callable[[Increment], None]):
        self._calls = dict(calls)
        first = sorted(calls.items(), key=lambda item: item[0][1])  # a call voids later ones of its chat
        self._increments = [Increment(key, call.asked, 0, call.tokens, call.finish_reason) for key, call in first]
        self._is_stopped = False
        self._write_out = write
        self._has_record = bool(calls)
        self._num_continued = 0
        self._num_discarded = 0

    async def generate(
        self, sampler: Sampler, key: CallKey, prompt_ids: Sequence[int], params: SamplingParams, priority: int
    ) -> Completion:
        """As Sampler.generate, from what is recorded on."""
        asked = question(prompt_ids, params)
        known = self._calls.get(key)
        if known is not None and known.asked != asked:
            self._num_discarded += _void(self._calls, key)
            known = None
        if known is None:
            done, parts = 0, []
        else:
            done, parts = len(known.tokens.ids), [known.tokens]
            self._num_continued += done
            if known.finish_reason is not None:
                return Completion(known.tokens, known.finish_reason)
            prompt_ids = [*prompt_ids, *known.tokens.ids.tolist()]
            params = replace(params, max_tokens=params.max_tokens - done, num_continued=done)
        async with aclosing(sampler.stream(prompt_ids, params, priority)) as stream:
            async for part in stream:
                self._write(Increment(key, asked, done, part.tokens, part.finish_reason))
                parts.append(part.tokens)
                done += len(part.tokens.ids)
                if part.finish_reason is not None:
                    return Completion(join(parts), part.finish_reason)
        raise SamplerError("the sampler's stream ended without a finish reason")

    def stop(self) -> dict[CallKey, CallRecord]:
        """What is recorded, for a later start; nothing is from now on."""
        self._is_stopped = True
        return calls_of(self._increments)

    def _write(self, increment: Increment) -> None:
        if self._is_stopped:  # its generation is being cancelled
            raise asyncio.CancelledError
        self._write_out(increment)
        self._increments.append(increment)

    def metrics(self) -> dict[str, float]:
        """Of episodes that an earlier start left a record of: tokens taken from it, and calls of it that were thrown away."""
        if not self._has_record:
            return {}
        return {"resume/continued_tokens": float(self._num_continued), "resume/discarded_calls": float(self._num_discarded)}
