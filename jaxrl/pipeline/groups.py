"""Runs the episodes of a group; the first of them to end make it.

A group can be cut: its task is cancelled, and its `Progress` holds what ended and what the others have sampled, with the
log-probs and versions of every token. Run again, it continues there.
"""

import asyncio
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.config import Config
from jaxrl.data import Episode, Group
from jaxrl.packing import RowLimits
from jaxrl.pipeline.batch import refuse_too_long
from jaxrl.pipeline.data_order import task_of
from jaxrl.pipeline.first_to_end import first_to_end
from jaxrl.pipeline.journal_writer import JournalWriter
from jaxrl.pipeline.rollouts import num_sampled
from jaxrl.rollout.chat import CallKey
from jaxrl.rollout.episodes import EpisodeRunner, sampling_params
from jaxrl.rollout.partial import CallRecord, Recorder


@dataclass
class Progress:
    """Of a group, from one start to the next."""

    episodes: dict[int, Episode] = field(default_factory=dict)  # ended, in that order
    calls: dict[int, Mapping[CallKey, CallRecord]] = field(default_factory=dict)  # of the others, by episode
    writes: dict[int, asyncio.Task] = field(default_factory=dict)  # of the episodes of this process: on their way to disk


@dataclass(frozen=True)
class Ran:
    group: Group
    left_out: tuple[int, ...]  # tokens that each episode past the first group_size had sampled when these had ended


async def run_group(
    index: int,
    tasks: Sequence[Mapping[str, Any]],
    runner: EpisodeRunner,
    journal: JournalWriter,
    progress: Progress,
    config: Config,
    limits: RowLimits,
) -> Ran:
    """The group at data position `index`, from where `progress` has it; the oldest groups have the sampler first. Cancelling it
    cancels its episodes, and `progress` then holds what they had."""
    task_index = task_of(index, len(tasks), config.seed)
    params = sampling_params(config, evaluation=False)
    wanted = config.pipeline.group_size
    started = wanted + config.pipeline.extra_episodes

    async def one(k: int) -> None:
        if k not in progress.episodes:
            recorder = None
            if config.pipeline.mode != "sync":  # there a restart repeats every bit, and a continuation would not
                recorder = Recorder(progress.calls.get(k, {}), functools.partial(journal.add, index, k))
            try:
                episode = await runner.run(
                    tasks[task_index], params, task_index=task_index, group=index, index=k, priority=index, recorder=recorder
                )
            except asyncio.CancelledError:
                if recorder is not None:
                    progress.calls[k] = recorder.stop()
                raise
            episode = refuse_too_long(episode, limits)
            progress.writes[k] = asyncio.ensure_future(journal.append(Group(index, task_index, (episode,))))
            progress.episodes[k] = episode
        if k in progress.writes:
            await asyncio.shield(progress.writes[k])
        if _chosen(progress.episodes.values(), wanted, started) is not None:
            for task in running:
                if task is not asyncio.current_task():
                    task.cancel()

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(k)) for k in range(started)]
    if progress.writes:
        await asyncio.wait(progress.writes.values())  # of the episodes left out too
    chosen = _chosen(progress.episodes.values(), wanted, started)
    assert chosen is not None, f"group {index} ended without its episodes"
    kept = {episode.index for episode in chosen}
    left_out = tuple(_num_tokens(progress, k) for k in range(started) if k not in kept)
    return Ran(Group(index, task_index, chosen), left_out)


def _chosen(ended: Iterable[Episode], wanted: int, started: int) -> tuple[Episode, ...] | None:
    """The group's episodes by index, once there are enough."""
    ended = list(ended)
    places = first_to_end([episode.error is None for episode in ended], wanted, started)
    return None if places is None else tuple(sorted((ended[place] for place in places), key=lambda e: e.index))


def _num_tokens(progress: Progress, k: int) -> int:
    if k in progress.episodes:
        return num_sampled(progress.episodes[k])
    return sum(len(call.tokens.ids) for call in progress.calls.get(k, {}).values())
