"""Writes the journal from the event loop. A finished episode is on disk before anything else learns of it, and what running
episodes have sampled follows within a second.

Both go into one write: what is on disk is always a state in which the run was, and a kill never keeps an answer
that ended while it drops the same moment's tokens of one that had not.
"""

import asyncio
from collections.abc import Sequence

from jaxrl.data import Group
from jaxrl.pipeline.journal import Journal, Partial
from jaxrl.rollout.partial import Increment, merge

PARTIAL_SECONDS = 1.0  # what a kill may take from a running episode
PARTIAL_TOKENS = 1 << 18  # a few megabytes in memory


class JournalWriter:
    """Appends from the event loop: what comes while one fsync runs shares the next."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._waiting: list[tuple[Group, asyncio.Future]] = []
        self._partial: dict[tuple[int, int], list[Increment]] = {}  # by group and episode
        self._num_tokens = 0  # in _partial
        self._is_due = False  # to be written, whether an episode finishes or not
        self._timer: asyncio.TimerHandle | None = None
        self._busy: asyncio.Task | None = None
        self._error: Exception | None = None

    async def append(self, group: Group) -> None:
        """Returns when it is on disk. Raises JournalError if the disk refuses."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((group, written))
        self._start()
        await written

    def add(self, group: int, episode: int, increment: Increment) -> None:
        """More tokens of a running episode, on disk within PARTIAL_SECONDS. Raises what the disk said to earlier ones."""
        if self._error is not None:
            raise self._error
        self._partial.setdefault((group, episode), []).append(increment)
        self._num_tokens += len(increment.tokens.ids)
        if self._num_tokens >= PARTIAL_TOKENS:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PARTIAL_SECONDS, self._flush)

    async def close(self) -> None:
        """Writes what was added. Raises JournalError if the disk refuses."""
        self._flush()
        await self._busy
        if self._error is not None:
            raise self._error

    def _flush(self) -> None:
        self._is_due = True
        self._start()

    def _start(self) -> None:
        if self._busy is None or self._busy.done():
            self._busy = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._waiting or self._is_due:
            batch, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._append, [group for group, _ in batch], self._take_partial())
            except Exception as error:  # those who wait raise it
                self._error = error
                _settle(batch, error)
            else:
                _settle(batch, None)

    def _take_partial(self) -> dict[tuple[int, int], list[Increment]]:
        partial, self._partial, self._num_tokens, self._is_due = self._partial, {}, 0, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return partial

    def _append(self, groups: list[Group], partial: dict[tuple[int, int], list[Increment]]) -> None:
        finished = {(group.index, episode.index) for group in groups for episode in group.episodes}
        partials = [Partial(*place, tuple(merge(parts))) for place, parts in partial.items() if place not in finished]
        self._journal.append(*groups, partials=partials)


def _settle(batch: Sequence[tuple[Group, asyncio.Future]], error: Exception | None) -> None:
    for _, written in batch:
        if not written.done():
            written.set_exception(error) if error else written.set_result(None)
