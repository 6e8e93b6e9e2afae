"""What a run says when sampler and trainer disagree: on tokens of the current version, with the cause, once."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.config import parse
from jaxrl.data import Source, TrainingTrajectory, Trajectory
from jaxrl.metrics import names
from jaxrl.packing import RowLimits, pack
from jaxrl.pipeline.parity_watch import AGAIN, LIMIT, ParityWatch

CONFIG = parse({"model": {"checkpoint": "none"}, "env": {"name": "none"}, "packing": {"row_length": 512, "terms": 512}})
STEP = 4  # trains version 3


def rows_of(versions: list[int]):
    """A row of answers of 20 tokens, one of each version, with random log-probs."""
    trajectories, rng = [], np.random.default_rng(7)
    for i, version in enumerate(versions):
        sampled = np.arange(25) >= 5
        minus = np.where(sampled, -rng.uniform(0, 4, 25), 0).astype(np.float32)
        columns = np.where(sampled, version, -1).astype(np.int32), np.where(sampled, Source.PLAIN, 0).astype(np.uint8)
        ids = np.concatenate([np.arange(5), 10 + i + np.arange(20)]).astype(np.int32)
        t = Trajectory(ids, sampled, minus, minus, *columns, np.where(sampled, 0, -1).astype(np.int32))
        trajectories.append(TrainingTrajectory(t, np.ones(25, np.float32), np.ones(25, np.float32), i))
    ((rows,), _) = pack(trajectories, RowLimits.from_config(CONFIG.packing), 1)
    return rows


def trainers(rows, differences: np.ndarray) -> np.ndarray:
    """The trainer's log-probs [R, U], off by `differences` [trajectories, 20]."""
    logp = np.zeros(rows.reads.target.shape, np.float32)
    for row, slot in zip(*np.nonzero(rows.terms.read >= 0), strict=True):
        read = rows.terms.read[row, slot]
        which = rows.trajectories.index[row, rows.terms.trajectory[row, slot]]
        place = rows.positions[row, rows.reads.state[row, read]] + 1 - 5
        logp[row, read] = rows.terms.policy_logp[row, slot] - differences[which, place]
    return logp


def suspicious() -> ParityWatch:
    watch = ParityWatch(CONFIG, lambda token: f"<{token}>")
    watch.note({names.PARITY: 2 * LIMIT})
    return watch


def test_nothing_is_computed_while_both_agree():
    watch, batch = ParityWatch(CONFIG, str), SimpleNamespace(rows=[rows_of([3] * 10)])
    for metrics in ({}, {names.PARITY: LIMIT / 2}):
        watch.note(metrics)
        assert watch.batch(batch, STEP) == -1
    watch.note({names.PARITY: 2 * LIMIT})
    assert watch.batch(batch, STEP) == 0
    assert watch.batch(SimpleNamespace(rows=[rows_of([2] * 10), rows_of([3] * 10)]), STEP) == 1
    assert watch.batch(SimpleNamespace(rows=[rows_of([2] * 10)]), STEP) == -1


def test_stale_prefixes_are_told_from_rounding_and_older_tokens_do_not_count():
    rng = np.random.default_rng(0)
    rounding = rng.normal(0, 0.001, (10, 20))
    stale = rounding.copy()
    stale[4] += rng.normal(0, 2, 20)
    rows, watch = rows_of([3] * 9 + [1]), suspicious()
    older = rounding.copy()
    older[9] += 5.0  # of version 1: the policy moved, nobody erred
    assert watch.examine(rows, trainers(rows, older), STEP) is None
    text = watch.examine(rows, trainers(rows, stale), STEP)
    assert "Likely cause: wrong version or stale prefix" in text and "on 180 tokens" in text
    worst = int(np.argmax(np.abs(stale[4])))
    assert f"'<{14 + worst}>' at {5 + worst}" in text


def test_a_cause_is_told_once_and_looked_for_again_later(caplog):
    rng = np.random.default_rng(1)
    rows, watch = rows_of([3] * 10), suspicious()
    batch = SimpleNamespace(rows=[rows])
    precision = trainers(rows, rng.normal(0, 0.1, (10, 20)))
    assert "Likely cause: precision" in watch.examine(rows, precision, STEP)
    assert watch.batch(batch, STEP + 1) == -1
    later = rows_of([STEP + AGAIN - 1] * 10)
    assert watch.batch(SimpleNamespace(rows=[later]), STEP + AGAIN) == 0
    assert watch.examine(later, precision, STEP + AGAIN) is None
    other = trainers(later, rng.normal(0.5, 0.01, (10, 20)))
    assert "Likely cause: other weights" in watch.examine(later, other, STEP + AGAIN)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_of_sixteen_bits_is_no_disagreement(dtype):
    config = CONFIG.model_copy(update={"sampler": CONFIG.sampler.model_copy(update={"dtype": dtype})})
    watch = ParityWatch(config, str)
    watch.note({names.PARITY: 0.04})
    assert (watch.batch(SimpleNamespace(rows=[rows_of([3] * 10)]), STEP) == 0) == (dtype == "float32")
