"""Nothing that was appended is lost, whatever byte the process died at; what is forgotten leaves the disk."""

import dataclasses
import logging
import os
import resource
import struct
import subprocess
import sys
import zlib

import msgpack
import numpy as np
import pytest

from jaxrl.data import Episode, Group, Trajectory
from jaxrl.pipeline.journal import JournalError, Partial, open_journal
from jaxrl.rollout.partial import CallRecord, Increment
from jaxrl.rollout.protocol import SampledTokens, join


def trajectory(seed: int, length: int = 7) -> Trajectory:
    rng = np.random.default_rng(seed)
    return Trajectory(
        ids=rng.integers(0, 99, length, np.int32),
        trainable=rng.random(length) < 0.5,
        policy_logp=rng.standard_normal(length).astype(np.float32),
        behaviour_logp=rng.standard_normal(length).astype(np.float32),
        version=rng.integers(-1, 5, length).astype(np.int32),
        source=rng.integers(0, 5, length).astype(np.uint8),
        turn=rng.integers(-1, 3, length).astype(np.int32),
        temperature=0.7,
        reward=None if seed % 2 else 0.25,
    )


def episode(index: int, seed: int = 0, **changes) -> Episode:
    fields = dict(
        task_index=3,
        index=index,
        trajectories=(trajectory(seed), trajectory(seed + 1, 0)),
        reward=np.float32(0.1).item(),
        step_rewards=(0.5, float("-inf")),
        metrics={"tools/calls": 2.0},
        messages=({"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "２", "calls": [1, None]}),
    )
    return Episode(**fields | changes)


def increment(start: int, length: int, key=((), 0), reason=None, seed=0) -> Increment:
    rng = np.random.default_rng(start + seed)
    tokens = SampledTokens(
        ids=rng.integers(0, 99, length, np.int32),
        policy_logp=rng.standard_normal(length).astype(np.float32),
        behaviour_logp=rng.standard_normal(length).astype(np.float32),
        version=rng.integers(0, 5, length).astype(np.int32),
        source=rng.integers(0, 5, length).astype(np.uint8),
    )
    return Increment(key, b"asked", start, tokens, reason)


def assert_same(a, b):
    """Equal values, dtypes and bits, dataclass by dataclass."""
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def test_what_running_episodes_have_sampled_comes_back_until_they_finish(tmp_path):
    journal = open_journal(tmp_path)
    first, second, third = increment(0, 3), increment(3, 2, reason="stop"), increment(0, 4, key=((0, 1), 2))
    journal.append(partials=[Partial(4, 0, (first,)), Partial(4, 1, (first,)), Partial(7, 0, (first,))])
    journal.append(Group(4, 3, (episode(1, 1),)), partials=[Partial(4, 0, (second, third))])
    journal.close()
    journal = open_journal(tmp_path)
    found = journal.partials(lambda index: index != 7)
    assert {group: set(episodes) for group, episodes in found.items()} == {4: {0}}
    calls = found[4][0]
    assert_same(calls[(), 0], CallRecord(b"asked", join([first.tokens, second.tokens]), "stop"))
    assert_same(calls[(0, 1), 2], CallRecord(b"asked", third.tokens, None))
    calls[(), 0].tokens.ids[0] = 1  # its own memory, writable
    assert set(journal.partials()) == {4, 7}
    journal.append(partials=[Partial(7, 0, (increment(3, 1),))])  # and goes on after a restart
    assert len(journal.partials()[7][0][(), 0].tokens.ids) == 4
    assert [(g.index, len(g.episodes)) for g in journal.replay()] == [(4, 1)]


def test_parts_leave_the_disk_with_the_episode_that_they_became(tmp_path):
    journal = open_journal(tmp_path)
    journal.append(partials=[Partial(9, 0, (increment(0, 3),)), Partial(9, 1, (increment(0, 3),))])
    journal.forget(lambda index: False)
    journal.append(partials=[Partial(9, 1, (increment(3, 3),))])
    journal.append(Group(9, 3, (episode(0, 1),)))
    journal.forget(lambda index: False)
    assert len(segments(tmp_path)) == 3, "episode 1 still runs"
    journal.append(Group(9, 3, (episode(1, 1),)))
    journal.forget(lambda index: False)  # the first has parts of finished episodes only, the others the episodes
    assert [path.stem[-1] for path in segments(tmp_path)] == ["2", "3", "4"]
    journal.close()
    journal = open_journal(tmp_path)
    assert journal.partials() == {} and [len(g.episodes) for g in journal.replay()] == [2]
    journal.append(partials=[Partial(10, 0, (increment(0, 3),))])
    journal.forget(lambda index: index == 10)  # dropped while it ran
    assert [path.stem[-1] for path in segments(tmp_path)] == ["2", "3", "5"]


def segments(folder):
    return sorted(folder.glob("*.journal"))


def test_what_was_appended_comes_back_bit_for_bit(tmp_path):
    whole = Group(5, 3, (episode(0, 10), episode(1, 20, error="tool hung", trajectories=())))
    other = Group(2, 8, (episode(0, 30),))
    journal = open_journal(tmp_path)
    journal.append(whole, other)
    journal.close()
    replayed = list(open_journal(tmp_path).replay())
    assert [g.index for g in replayed] == [2, 5]
    assert_same(replayed[0], other)
    assert_same(replayed[1], whole)
    replayed[0].episodes[0].trajectories[0].ids[0] = 1  # its own memory, writable


def test_episodes_appended_one_by_one_make_one_group_and_repeats_come_once(tmp_path):
    journal = open_journal(tmp_path)
    first, second = episode(1, 1), episode(0, 2)
    for e in (first, second, dataclasses.replace(first, reward=9.0)):
        journal.append(Group(4, 3, (e,)))
    journal.close()
    (group,) = open_journal(tmp_path).replay()
    assert_same(group, Group(4, 3, (second, first)))
    assert list(open_journal(tmp_path).replay(lambda index: index != 4)) == []


def test_a_tail_torn_at_any_byte_costs_its_record_only(tmp_path, caplog):
    journal = open_journal(tmp_path / "whole")
    first, second = Group(0, 3, (episode(0, 1),)), Group(1, 3, (episode(0, 2),))
    journal.append(first)
    (path,) = segments(tmp_path / "whole")
    start = path.stat().st_size
    journal.append(second)
    journal.close()
    data = path.read_bytes()
    cuts = [start, start + 1, start + 7, start + 8, start + 9, (start + len(data)) // 2, len(data) - 1]
    for cut in cuts:
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / path.name).write_bytes(data[:cut])
        caplog.clear()
        journal = open_journal(folder)
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * (cut != start)
        assert_same(tuple(journal.replay()), (first,))
        third = Group(2, 3, (episode(0, 3),))
        journal.append(third)  # and what follows is found again
        journal.close()
        assert_same(tuple(open_journal(folder).replay()), (first, third))


def test_a_flipped_bit_is_not_taken_for_data(tmp_path):
    journal = open_journal(tmp_path)
    journal.append(Group(0, 3, (episode(0, 1),)))
    journal.append(Group(1, 3, (episode(0, 2),)))
    journal.close()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(data)
    assert [g.index for g in open_journal(tmp_path).replay()] == [0]


@pytest.mark.parametrize("torn", [b"", b"jaxrl"])
def test_killed_while_a_segment_was_created(tmp_path, torn):
    journal = open_journal(tmp_path)
    journal.append(Group(0, 3, (episode(0, 1),)))
    journal.close()
    (tmp_path / "00000009.journal").write_bytes(torn)
    journal = open_journal(tmp_path)
    assert [g.index for g in journal.replay()] == [0]
    journal.append(Group(1, 3, (episode(0, 1),)))
    journal.close()
    assert [g.index for g in open_journal(tmp_path).replay()] == [0, 1]


def test_a_file_of_something_else_is_an_error_that_names_it(tmp_path):
    (tmp_path / "00000001.journal").write_bytes(b"jaxrl journal 7\nsomething")
    with pytest.raises(JournalError, match="00000001.journal"):
        open_journal(tmp_path)


def test_records_of_an_unknown_kind_are_left_out_and_kept(tmp_path):
    journal = open_journal(tmp_path)
    journal.append(Group(0, 3, (episode(0, 1),)))
    journal.close()
    (path,) = segments(tmp_path)
    body = msgpack.packb(["replay", {"ids": b"abc"}])
    with open(path, "ab") as file:
        file.write(struct.pack("<II", len(body), zlib.crc32(body)) + body)
    size = path.stat().st_size
    assert [g.index for g in open_journal(tmp_path).replay()] == [0]
    assert path.stat().st_size == size


def test_forgotten_groups_leave_the_disk_and_the_others_stay(tmp_path):
    journal = open_journal(tmp_path)
    late = Group(1, 3, (episode(0, 1),))  # overtaken: in no checkpoint for long
    sizes = []
    for step in range(20):
        for index in range(4 * step, 4 * step + 4):
            if index != 1:
                journal.append(Group(index, 3, (episode(0, index),)))
        if step == 2:
            journal.append(late)
        journal.forget(lambda index, step=step: index < 4 * step and index != 1)  # a checkpoint of the step before
        sizes.append(sum(p.stat().st_size for p in segments(tmp_path)))
    assert max(sizes) <= 4 * sizes[0]
    assert [g.index for g in journal.replay()][0] == 1
    journal.forget(lambda index: True)
    assert list(journal.replay()) == [] and len(segments(tmp_path)) == 1
    journal.append(late)
    journal.close()
    assert_same(tuple(open_journal(tmp_path).replay()), (late,))


def test_a_full_disk_is_an_error_that_names_the_folder_and_hides_nothing(tmp_path):
    """A real limit on the size of a file stands in for the disk's."""
    code = f"""
import resource, signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_journal import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = open_journal({str(tmp_path)!r})
journal.append(Group(0, 3, (episode(0, 1),)))
size = segments(Path({str(tmp_path)!r}))[0].stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, resource.RLIM_INFINITY))
try:
    journal.append(Group(1, 3, (episode(0, 2),)))
except JournalError as error:
    assert {str(tmp_path)!r} in str(error), error
else:
    raise AssertionError("the write went through")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append(Group(2, 3, (episode(0, 3),)))
"""
    subprocess.run(
        [sys.executable, "-c", code.replace("import resource", "from pathlib import Path\nimport resource")], check=True
    )
    assert [g.index for g in open_journal(tmp_path).replay()] == [0, 2]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
