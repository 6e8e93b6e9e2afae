"""Runs the episodes of groups. A finished episode is on disk before anything else learns of it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config import Config
from jaxrl.data import Episode, Group
from jaxrl.packing import RowLimits
from jaxrl.pipeline.batch import refuse_too_long
from jaxrl.pipeline.data_order import task_of
from jaxrl.pipeline.journal import Journal
from jaxrl.rollout.episodes import EpisodeRunner, sampling_params


class JournalWriter:
    """Appends episodes from the event loop: those that finish while one fsync runs share the next."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._waiting: list[tuple[Group, asyncio.Future]] = []
        self._busy: asyncio.Task | None = None

    async def append(self, group: Group) -> None:
        """Returns when it is on disk. Raises JournalError if the disk refuses."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((group, written))
        if self._busy is None or self._busy.done():
            self._busy = asyncio.create_task(self._write())
        await written

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._journal.append, *(group for group, _ in batch))
            except Exception as error:  # those who wait raise it
                _settle(batch, error)
            else:
                _settle(batch, None)


def _settle(batch: Sequence[tuple[Group, asyncio.Future]], error: Exception | None) -> None:
    for _, written in batch:
        if not written.done():
            written.set_exception(error) if error else written.set_result(None)


async def run_group(
    index: int,
    tasks: Sequence[Mapping[str, Any]],
    runner: EpisodeRunner,
    journal: JournalWriter,
    recorded: Sequence[Episode],
    config: Config,
    limits: RowLimits,
) -> Group:
    """The group at data position `index`. Episodes that `recorded` holds are taken from there, the others run; the
    oldest groups have the sampler first. Cancelling it cancels its episodes."""
    task_index = task_of(index, len(tasks), config.seed)
    params = sampling_params(config, evaluation=False)
    known = {episode.index: episode for episode in recorded}

    async def one(k: int) -> Episode:
        if k in known:
            return known[k]
        episode = await runner.run(tasks[task_index], params, task_index=task_index, group=index, index=k, priority=index)
        episode = refuse_too_long(episode, limits)
        await journal.append(Group(index, task_index, (episode,)))
        return episode

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(k)) for k in range(config.pipeline.group_size)]
    return Group(index, task_index, tuple(task.result() for task in running))
