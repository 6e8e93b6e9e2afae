"""What running episodes have sampled reaches the disk in time, and a kill does not change how long answers are."""

import asyncio
import functools
import math

import numpy as np
import pytest

from jaxrl.data import Episode, Group, Source, Trajectory
from jaxrl.pipeline import journal_writer
from jaxrl.pipeline.journal import JournalError, open_journal
from jaxrl.pipeline.journal_writer import JournalWriter
from jaxrl.rollout.partial import Increment, Recorder
from jaxrl.rollout.protocol import Completion, SampledTokens, SamplingParams

KEY = ((), 0)


def tokens(length: int) -> SampledTokens:
    zeros = np.zeros(length, np.float32)
    return SampledTokens(
        np.arange(length, dtype=np.int32), zeros, zeros, zeros.astype(np.int32), np.full(length, Source.PLAIN, np.uint8)
    )


def finished(index: int, length: int) -> Group:
    t = tokens(length)
    trajectory = Trajectory(t.ids, t.ids >= 0, t.policy_logp, t.behaviour_logp, t.version, t.source, np.zeros(length, np.int32))
    return Group(index, 0, (Episode(0, 0, (trajectory,), 1.0),))


class Spy:
    """The journal, and how many records every write had."""

    def __init__(self, folder):
        self.journal, self.writes = open_journal(folder), []

    def append(self, *groups, partials=()):
        self.writes.append((len(groups), len(partials)))
        self.journal.append(*groups, partials=partials)


def recorded(folder) -> dict[int, int]:
    """Tokens on disk by group, as a start after a kill would find them."""
    journal = open_journal(folder)
    found = journal.partials()
    journal.close()
    return {group: len(episodes[0][KEY].tokens.ids) for group, episodes in found.items()}


def test_one_write_a_second_for_all_and_none_without_news(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_writer, "PARTIAL_SECONDS", 0.05)

    async def main():
        spy = Spy(tmp_path)
        writer = JournalWriter(spy)
        for start in range(3):
            for group in range(5):
                writer.add(group, 0, Increment(KEY, b"", start, tokens(1), None))
        await asyncio.sleep(0.5)
        assert spy.writes == [(0, 5)] and recorded(tmp_path) == dict.fromkeys(range(5), 3)
        writer.add(0, 0, Increment(KEY, b"", 3, tokens(2), None))
        writer.add(1, 0, Increment(KEY, b"", 3, tokens(2), "stop"))
        await writer.append(finished(1, 5))  # takes the others along, and needs its own parts no more
        assert spy.writes[1:] == [(1, 1)]
        assert recorded(tmp_path) == {0: 5, 2: 3, 3: 3, 4: 3}
        await asyncio.sleep(0.2)
        assert len(spy.writes) == 2
        monkeypatch.setattr(journal_writer, "PARTIAL_TOKENS", 10)
        monkeypatch.setattr(journal_writer, "PARTIAL_SECONDS", 3600.0)
        writer.add(2, 0, Increment(KEY, b"", 3, tokens(20), None))
        await asyncio.sleep(0.2)
        assert spy.writes[2:] == [(0, 1)]
        writer.add(2, 0, Increment(KEY, b"", 23, tokens(1), None))
        await writer.close()
        assert recorded(tmp_path)[2] == 24

    asyncio.run(main())


def test_a_disk_that_refuses_ends_the_generations_too(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_writer, "PARTIAL_SECONDS", 0.01)

    class Full(Spy):
        def append(self, *groups, partials=()):
            raise JournalError("cannot write: No space left on device")

    async def main():
        writer = JournalWriter(Full(tmp_path))
        writer.add(0, 0, Increment(KEY, b"", 0, tokens(1), None))
        await asyncio.sleep(0.2)
        with pytest.raises(JournalError, match="No space"):
            writer.add(0, 0, Increment(KEY, b"", 1, tokens(1), None))
        with pytest.raises(JournalError, match="No space"):
            await writer.close()

    asyncio.run(main())


# The length distribution

NUM_EPISODES, AT_ONCE, MEAN_LENGTH, NUM_KILLS = 400, 40, 20, 10
MOST = 16 * MEAN_LENGTH
PARAMS = SamplingParams(MOST)


class Killed(Exception):
    pass


class Geometric:
    """Ends every answer with the same probability after every token. Its randomness is its own, so what is sampled again
    comes out otherwise: the worst case. Dies when it has sampled `budget` tokens."""

    def __init__(self, rng: np.random.Generator, budget: float):
        self.rng, self.left = rng, budget

    async def stream(self, prompt_ids, params, priority=0):
        for i in range(params.max_tokens):
            await asyncio.sleep(0.002)
            self.left -= 1
            if self.left <= 0:
                raise Killed
            reason = "stop" if self.rng.random() < 1 / MEAN_LENGTH else "length" if i + 1 == params.max_tokens else None
            yield Completion(tokens(1), reason)
            if reason:
                return


async def live(folder, sampler: Geometric, keeps_partials: bool) -> None:
    """One start: every episode that has not finished, AT_ONCE at a time, until the sampler dies."""
    journal = open_journal(folder)
    known = {group.index for group in journal.replay()}
    partials = journal.partials() if keeps_partials else {}
    writer = JournalWriter(journal)
    slots = asyncio.Semaphore(AT_ONCE)

    async def episode(index: int) -> None:
        async with slots:
            write = functools.partial(writer.add, index, 0) if keeps_partials else lambda increment: None
            recorder = Recorder(partials.get(index, {}).get(0, {}), write)
            completion = await recorder.generate(sampler, KEY, [1], PARAMS, index)
            await writer.append(finished(index, len(completion.tokens.ids)))

    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(NUM_EPISODES):
                if index not in known:
                    tasks.create_task(episode(index))
    except* Killed:
        pass
    finally:
        journal.close()


def lengths(folder, seed: int, num_kills: int, keeps_partials: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    for _ in range(num_kills):
        budget = rng.uniform(0.5, 1.5) * NUM_EPISODES * MEAN_LENGTH / (NUM_KILLS + 2)
        asyncio.run(live(folder, Geometric(rng, budget), keeps_partials))
    asyncio.run(live(folder, Geometric(rng, math.inf), keeps_partials))
    journal = open_journal(folder)
    found = [len(group.episodes[0].trajectories[0].ids) for group in journal.replay()]
    journal.close()
    assert len(found) == NUM_EPISODES
    return np.array(found)


def same_distribution(x: np.ndarray, y: np.ndarray) -> float:
    """p-value of the two-sample Kolmogorov-Smirnov test, by its asymptotic law (too large for ties: conservative)."""
    values = np.union1d(x, y)
    distance = max(abs(np.mean(x <= v) - np.mean(y <= v)) for v in values)
    return min(1.0, 2 * math.exp(-2 * distance**2 * len(x) * len(y) / (len(x) + len(y))))


def test_ten_kills_do_not_change_how_long_answers_are(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_writer, "PARTIAL_SECONDS", 0.005)
    whole = lengths(tmp_path / "whole", 0, 0, True)
    continued = lengths(tmp_path / "continued", 1, NUM_KILLS, True)
    restarted = lengths(tmp_path / "restarted", 2, NUM_KILLS, False)
    assert same_distribution(continued, whole) > 1e-4, (continued.mean(), whole.mean())
    assert same_distribution(restarted, whole) < 1e-6, "the test cannot tell: " + str((restarted.mean(), whole.mean()))
