"""The supervised warm start: given traces, packed as prefix trees, before the first rollout.

A trace is a line {"prompt": text, "completion": text}, continued as plain text, or {"messages": [...]}, rendered by the
chat template. The loss sees completions, or the assistant's messages, with the end-of-sequence token.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.config import ConfigError
from jaxrl.data import Source, Trajectory
from jaxrl.losses.advantages import supervised
from jaxrl.packing import misfit, pack
from jaxrl.packing.rows import empty_batch
from jaxrl.pipeline.setup import Parts
from jaxrl.rollout.loading import read_jsonl
from jaxrl.rollout.tokenizer import ChatTemplateError, Tokenizer
from jaxrl.trainer.processes import Action, Peers, Record
from jaxrl.trainer.state import TrainState

log = logging.getLogger(__name__)
KEY = "sft.data"


def warm_start(
    parts: Parts,
    traces: Sequence[Trajectory],
    state: TrainState,
    peers: Peers,
    log_step: Callable[[int, Mapping[str, float]], None],
) -> TrainState:
    """Process 0: the state after `sft.steps` steps on the traces; its optimizer state and step start anew for what follows.
    Raises FloatingPointError if the loss is not finite."""
    config = parts.config
    for step, chosen in zip(range(config.sft.steps), _batches(len(traces), config.sft.batch_size, config.seed), strict=False):
        rows, _ = pack(supervised([traces[i] for i in chosen]), parts.limits, config.packing.rows)
        peers.send(Record(Action.TRAIN, step, len(rows)), rows)
        state, metrics = parts.trainer.sft_step(state, rows)
        if step % max(1, config.sft.steps // 20) == 0 or step == config.sft.steps - 1:
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            if values["nonfinite"]:
                raise FloatingPointError(f"the loss of warm-start step {step} is not finite: lower sft.lr or look at {KEY}")
            log_step(step + 1, values)
    return parts.trainer.init(parts.trainer.variables(state))


def follow_warm_start(parts: Parts, state: TrainState, peers: Peers) -> TrainState:
    """Every other process: the same steps, on the rows that process 0 sends."""
    template = empty_batch(parts.limits, parts.config.packing.rows)
    for _ in range(parts.config.sft.steps):
        _, rows = peers.receive(template)
        state, _ = parts.trainer.sft_step(state, rows)
    return parts.trainer.init(parts.trainer.variables(state))


def _batches(num_traces: int, size: int, seed: int) -> Iterator[list[int]]:
    """Every trace once an epoch, in a seeded order; a batch may span two epochs."""
    rng = np.random.default_rng([seed, 1])
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += rng.permutation(num_traces).tolist()
        yield waiting[:size]
        waiting = waiting[size:]


def read_traces(parts: Parts) -> list[Trajectory]:
    """One trajectory per completion or assistant message of the file `sft.data`. Raises ConfigError naming the file and
    the trace that cannot be used."""
    path = Path(parts.config.sft.data)
    traces = []
    for number, row in enumerate(read_jsonl(KEY, path), 1):
        where = f"{path}, trace {number}"
        bos = () if "messages" in row else parts.tokenizer.bos  # a chat template has its own
        for prompt, completion in _pieces(row, parts.tokenizer, where):
            trace = _trajectory(prompt, completion, bos, parts)
            if not trace.trainable.any():
                raise ConfigError(KEY, f"{where} has nothing to learn: give it a prompt")
            if problem := misfit(len(trace.ids), int(trace.trainable.sum()), parts.limits):
                raise ConfigError(KEY, f"{where}: {problem}, or leave it out")
            if len(trace.ids) > parts.architecture.context_length:
                have = f"{where} has {len(trace.ids)} tokens, the model's positions end at {parts.architecture.context_length}"
                raise ConfigError(KEY, f"{have}: leave it out, or use rope scaling")
            traces.append(trace)
    if not traces:
        raise ConfigError(KEY, f"{path} holds no traces")
    return traces


def _pieces(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Iterator[tuple[str, str]]:
    """(what comes before, what is learned), both as text."""
    if "messages" not in row and set(row) >= {"prompt", "completion"}:
        for key in ("prompt", "completion"):
            if not isinstance(row[key], str):
                raise ConfigError(KEY, f"{where}: `{key}` is {row[key]!r}, it must be a text")
        yield row["prompt"], row["completion"]
        return
    if "messages" not in row:
        raise ConfigError(KEY, f"{where} has neither `messages` nor `prompt` and `completion`; it has: {', '.join(row)}")
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(KEY, f'{where}: `messages` must be a list of {{"role": …, "content": …}}')
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        try:
            before = tokenizer.render(messages[:i], generate=True)
            after = tokenizer.render(messages[: i + 1], generate=False)
        except ChatTemplateError as error:
            raise ConfigError(KEY, f"{where}: {error}") from error
        if not after.startswith(before):
            raise ConfigError(KEY, f"{where}: the chat template does not put message {i} behind its own generation prompt")
        yield before, after[len(before) :]


def _trajectory(prompt: str, completion: str, bos: Sequence[int], parts: Parts) -> Trajectory:
    before = [*bos, *parts.tokenizer.encode(prompt, start=True)]
    learned = parts.tokenizer.encode(completion, start=not before)
    ends = [i for i, token in enumerate(learned) if token in parts.eos_ids]
    # What a template puts behind the end of a turn is never sampled.
    learned = learned[: ends[-1] + 1] if ends else [*learned, parts.eos_ids[0]]
    ids = np.array([*before, *learned], np.int32)
    given = np.arange(len(ids)) >= len(before)
    zeros = np.zeros(len(ids), np.float32)
    return Trajectory(
        ids=ids,
        trainable=given & (np.arange(len(ids)) > 0),
        policy_logp=zeros,
        behaviour_logp=zeros,
        version=np.where(given, 0, -1).astype(np.int32),
        source=np.where(given, Source.FORCED, Source.CONTEXT).astype(np.uint8),
        turn=np.where(given, 0, -1).astype(np.int32),
    )
