"""The seam between what samples tokens and everything else.

The embedded JAX engine and a vLLM server both implement `Sampler`; environments and the pipeline
see nothing else of them.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class SampledTokens:
    """A run of sampled tokens; arrays of one length."""

    ids: np.ndarray  # int32
    policy_logp: np.ndarray  # float32
    behaviour_logp: np.ndarray  # float32
    version: np.ndarray  # int32
    source: np.ndarray  # uint8, data.Source


@dataclass(frozen=True)
class Completion:
    tokens: SampledTokens
    finish_reason: str  # "stop" (token or string), "length", "cancelled"


@dataclass(frozen=True)
class PublishReport:
    version: int
    num_bytes: int
    seconds: float
    num_continued: int  # generations that were running and went on under the new weights


@dataclass(frozen=True)
class SamplerLoad:
    num_running: int
    num_waiting: int
    kv_use: float  # share of cache pages in use, 0 to 1
    tokens_per_second: float


class Sampler(Protocol):
    def stream(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> AsyncIterator[SampledTokens]:
        """Yields tokens as they are sampled; closing the iterator cancels the generation. Lower
        priority numbers run first. Raises SamplerError if the prompt cannot fit."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> Completion:
        """The whole completion. Raises SamplerError if the sampler fails."""

    async def publish(self, weights: Any, version: int, in_flight: bool) -> PublishReport:
        """Installs weights (a pytree, copied before this returns). In flight: running generations go
        on under them; otherwise it waits until none is running. Cached prefixes of older versions
        never serve requests that start later."""

    def load(self) -> SamplerLoad: ...

    async def close(self) -> None: ...
