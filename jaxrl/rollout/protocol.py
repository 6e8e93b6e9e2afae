"""The seam between what samples tokens and everything else.

The embedded JAX engine and a vLLM server both implement `Sampler`; environments and the pipeline
see nothing else of them.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np


class SamplerError(Exception):
    """A sampler could not do what was asked: the message names the server or setting and the fix."""


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn. `seed` and the token's position determine its randomness."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy, and log-probs are at temperature 1
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()  # generation ends after the token that completes one
    seed: int = 0  # 32 bits
    num_continued: int = 0  # last tokens of the prompt that are the completion's own beginning: a stop string may start there


@dataclass(frozen=True)
class SampledTokens:
    """A run of sampled tokens; arrays of one length."""

    ids: np.ndarray  # int32
    policy_logp: np.ndarray  # float32
    behaviour_logp: np.ndarray  # float32
    version: np.ndarray  # int32
    source: np.ndarray  # uint8, data.Source


def join(parts: Sequence[SampledTokens]) -> SampledTokens:
    """Runs of tokens, at least one, as one run."""
    return SampledTokens(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(SampledTokens)))


@dataclass(frozen=True)
class Completion:
    """What was sampled behind a prompt; from a stream, a part of it."""

    tokens: SampledTokens
    finish_reason: str | None  # "stop" (token or string), "length"; None: more follows in the stream


@dataclass(frozen=True)
class PublishReport:
    version: int
    num_bytes: int
    seconds: float
    num_continued: int  # generations that were running and went on under the new weights
    stop_seconds: float | None = None  # of `seconds`, in which no token was computed; None: not measured


@dataclass(frozen=True)
class SamplerLoad:
    num_running: int
    num_waiting: int
    kv_use: float  # share of cache pages in use, 0 to 1
    tokens_per_second: float
    num_moved: int = 0  # generations that went on at another server, since the start
    num_restarts: int = 0  # of servers, since the start


class Sampler(Protocol):
    def stream(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> AsyncIterator[Completion]:
        """Yields tokens as they are sampled, at least one at a time, the last with the finish reason; closing the
        iterator cancels the generation. Lower priority numbers run first. Raises SamplerError if the prompt cannot fit."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> Completion:
        """The whole completion. Raises SamplerError if the sampler fails."""

    async def publish(self, weights: Any, version: int, in_flight: bool) -> PublishReport:
        """Installs weights (a pytree, copied before this returns). In flight: running generations go
        on under them; otherwise it waits until none is running. Cached prefixes of older versions
        never serve requests that start later."""

    def load(self) -> SamplerLoad: ...

    async def close(self) -> None: ...
