"""From a task row to a finished episode: seeds, the sampler's answers, and the trajectories they make.

An episode that fails is an Episode with `error` set, "kind: cause", and no reward. The kinds: raised (an exception, or the
death of the worker process), timeout (too long in its own awaiting), hung (blocked its worker), too_long (no room for an
answer). What the sampler raises is not an episode's failure and is raised.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import Config, EnvConfig
from jaxrl.data import Episode, Source, Trajectory
from jaxrl.rollout.chat import Call, CallKey, LengthLimit
from jaxrl.rollout.partial import Recorder
from jaxrl.rollout.protocol import Completion, Sampler, SamplingParams
from jaxrl.rollout.workers import Workers, WorkerSettings

FAILURES = ("raised", "timeout", "hung", "too_long")


def length_limit(config: Config) -> LengthLimit:
    """The tightest limit on the tokens of a trajectory."""
    row = LengthLimit(config.packing.row_length, "packing.row_length")
    sampler = LengthLimit(config.sampler.max_length, "sampler.max_length")
    return min(row, sampler, key=lambda limit: limit.tokens)


def sampling_params(config: Config, *, evaluation: bool) -> SamplingParams:
    """How the episodes of a run are sampled, for training or (at eval.temperature) for evaluation."""
    s = config.sampling
    return SamplingParams(
        max_tokens=s.max_tokens,
        temperature=config.eval.temperature if evaluation else s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        stop_strings=s.stop,
    )


def call_seed(seed: int, stream: str, group: int, episode: int, key: CallKey) -> int:
    """32 bits that depend on which call it is, never on when it is made."""
    name = json.dumps([seed, stream, group, episode, key]).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest())


def failure_kind(episode: Episode) -> str | None:
    """One of FAILURES, or None for an episode with a reward."""
    return None if episode.error is None else episode.error.partition(":")[0]


class EpisodeRunner:
    """Runs episodes of one environment on worker processes, at most env.concurrency at once, each call on `sampler`."""

    def __init__(
        self,
        env: EnvConfig,
        sampler: Sampler,
        *,
        factory: str,
        tokenizer: Path,
        eos_ids: Sequence[int],
        limit: LengthLimit,
        seed: int,
        log: Path | None = None,
    ):
        self._sampler = sampler
        self._eos_ids = tuple(eos_ids)
        self._seed = seed
        self._slots = asyncio.Semaphore(env.concurrency)
        self.workers = Workers(WorkerSettings(env, factory, seed, Path(tokenizer), self._eos_ids, limit, log))

    async def start(self) -> float:
        """Starts the workers and returns the seconds that took. Raises ConfigError if the environment cannot be built."""
        await self.workers.start()
        return self.workers.startup_seconds

    async def close(self) -> None:
        await self.workers.close()

    async def run(
        self,
        task: Mapping[str, Any],
        params: SamplingParams,
        *,
        task_index: int,
        group: int,
        index: int,
        stream: str = "train",
        priority: int = 0,
        recorder: Recorder | None = None,
    ) -> Episode:
        """One episode: number `index` of `group`, on `task` (row task_index). `params.seed` is set for every call from the
        run's seed, `stream` (so that an evaluation draws other numbers than training), group, index and call. A recorder keeps
        what is sampled as it comes, and continues what an earlier start has kept. Cancelling this cancels the episode
        and its generations. Raises SamplerError and ConfigError; a failed episode is returned."""

        async def generate(call: Call) -> Completion:
            call_params = replace(
                params,
                max_tokens=call.max_tokens,
                stop_token_ids=tuple(sorted({*self._eos_ids, *params.stop_token_ids})),
                stop_strings=tuple(dict.fromkeys([*params.stop_strings, *call.stop])),
                seed=call_seed(self._seed, stream, group, index, call.key),
            )
            if recorder is None:
                return await self._sampler.generate(call.prompt_ids, call_params, priority)
            return await recorder.generate(self._sampler, call.key, call.prompt_ids, call_params, priority)

        async with self._slots:
            job, done = await self.workers.run(task, params.max_tokens, generate)
        answers = {key: answer.result() for key, (_, answer) in job.calls.items() if answer.done() and not answer.cancelled()}
        messages = tuple(done.get("messages", ()))
        if "error" in done:
            return Episode(task_index, index, (), 0.0, error=f"{done['kind']}: {done['error']}", messages=messages)
        turns = {key: turn for turn, key in enumerate(sorted(answers))}
        temperature = params.temperature or 1.0  # greedy log-probs are those at temperature 1
        trajectories = tuple(_trajectory(pieces, answers, turns, temperature) for pieces in done["lines"])
        chat = {"chat/calls": done["num_calls"], "chat/rewrites": done["num_rewrites"], "chat/truncated": done["num_truncated"]}
        kept = {} if recorder is None else recorder.metrics()
        metrics = {**{name: float(count) for name, count in chat.items()}, **kept, **done["metrics"]}
        return Episode(task_index, index, trajectories, done["reward"], tuple(done["step_rewards"]), metrics, messages=messages)


def _trajectory(
    pieces: list[dict[str, Any]], answers: Mapping[CallKey, Completion], turns: Mapping[CallKey, int], temperature: float
) -> Trajectory:
    """The line of a chat as arrays. Tokens of inherited pieces keep what they were sampled with and are not trainable."""
    columns: list[tuple[np.ndarray, ...]] = []
    for piece in pieces:
        if "ids" in piece:
            n = len(piece["ids"])
            zero = np.zeros(n)
            columns.append((np.asarray(piece["ids"]), zero, zero, zero, zero - 1, np.full(n, Source.CONTEXT), zero - 1))
        else:
            (path, number), n = piece["call"], piece["num_tokens"]
            key = (tuple(path), number)
            t = answers[key].tokens
            sampled = np.full(n, not piece["inherited"])
            columns.append(
                (
                    t.ids[:n],
                    sampled,
                    t.policy_logp[:n],
                    t.behaviour_logp[:n],
                    t.version[:n],
                    t.source[:n],
                    np.full(n, turns[key]),
                )
            )
    kinds = (np.int32, np.bool_, np.float32, np.float32, np.int32, np.uint8, np.int32)
    return Trajectory(
        *(np.concatenate(c).astype(kind) for c, kind in zip(zip(*columns, strict=True), kinds, strict=True)), temperature
    )
