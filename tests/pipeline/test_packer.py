"""The packing process packs as the function does, and ends with the trainer; what happens to it is told."""

import asyncio
import os
import signal

import jax
import numpy as np
import pytest

from jaxrl.config import parse
from jaxrl.data import Episode, Group, Source, Trajectory
from jaxrl.packing import PackingError, RowLimits
from jaxrl.pipeline import packer as packing
from jaxrl.pipeline.batch import make_batch
from jaxrl.pipeline.packer import Packer, PackerError

CONFIG = parse(
    {
        "model": {"checkpoint": "none"},
        "env": "arithmetic",
        "packing": {"row_length": 64, "rows": 2},
        "sampling": {"max_tokens": 32},
    }
)
LIMITS = RowLimits.from_config(CONFIG.packing)


def make_groups(num_groups: int = 6, longest: int = 40) -> list[Group]:
    rng = np.random.default_rng(0)

    def episode(index: int) -> Episode:
        length = int(rng.integers(10, longest + 1))
        sampled = np.arange(length) >= 6
        trajectory = Trajectory(
            ids=np.r_[np.arange(6), rng.integers(0, 50, length - 6)].astype(np.int32),
            trainable=sampled,
            policy_logp=np.where(sampled, -rng.random(length), 0).astype(np.float32),
            behaviour_logp=np.where(sampled, -rng.random(length), 0).astype(np.float32),
            version=np.where(sampled, 3, -1).astype(np.int32),
            source=np.where(sampled, Source.PLAIN, Source.CONTEXT).astype(np.uint8),
            turn=np.where(sampled, 0, -1).astype(np.int32),
        )
        return Episode(0, index, (trajectory,), float(rng.random()), metrics={"a": 1.0}, messages=({"role": "user"},))

    return [Group(i, i, tuple(episode(k) for k in range(4))) for i in range(num_groups)]


@pytest.fixture(scope="module")
def packer():
    packer = Packer(CONFIG, LIMITS)
    yield packer
    packer.close()


def test_batches_are_those_of_the_function(packer):
    for step, groups in ((3, make_groups()), (4, make_groups(1)), (5, [])):
        got, expected = asyncio.run(packer.make_batch(groups, step)), make_batch(groups, CONFIG, LIMITS, step)
        assert got.metrics == expected.metrics and got.num_tokens == expected.num_tokens
        assert len(got.rows) == len(expected.rows) and (len(got.rows) > 1 or len(groups) < 6)
        for a, b in zip(jax.tree.leaves(got.rows), jax.tree.leaves(expected.rows), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_what_cannot_be_packed_is_refused_and_the_process_goes_on(packer):
    with pytest.raises(PackingError, match="packing.row_length"):
        asyncio.run(packer.make_batch(make_groups(1, longest=200), 3))
    with pytest.raises(PackerError, match=r"(?s)failed: Traceback.*AttributeError"):
        asyncio.run(packer.make_batch([Group(0, 0, (Episode(0, 0, (None,), 1.0),))], 3))
    assert asyncio.run(packer.make_batch(make_groups(1), 3)).rows


def test_a_process_that_hangs_or_dies_is_an_error(monkeypatch):
    monkeypatch.setattr(packing, "PACK_SECONDS", 0.5)
    packer = Packer(CONFIG, LIMITS)
    os.kill(packer._process.pid, signal.SIGSTOP)
    with pytest.raises(PackerError, match=r"did not answer within 0.5 s"):
        asyncio.run(packer.make_batch(make_groups(1), 3))
    packer._process.kill()
    for _ in range(2):
        with pytest.raises(PackerError, match=r"died \(SIGKILL\)"):
            asyncio.run(packer.make_batch(make_groups(1), 3))
    packer.close()


def test_it_ends_when_the_trainer_does(packer):
    """Whoever is killed closes this pipe; nobody else holds its end, for descriptors are not inherited."""
    packer._process.stdin.close()
    assert packer._process.wait(30) == 1
