"""The settings that a run may change on its way: what a config refuses, and that a tuner's decisions are sound and readable."""

import dataclasses

import pytest

from jaxrl.bench.autotuner import make_case, run_config
from jaxrl.config import ConfigError, PackingConfig, parse
from jaxrl.packing import RowLimits
from jaxrl.pipeline.autotuner import Autotuner, Bounds, Replay, fit_trainer, useful_rate
from jaxrl.pipeline.events import Knobs
from jaxrl.pipeline.fill import groups_that_fill, pack_rows
from jaxrl.pipeline.simulator import simulate
from jaxrl.pipeline.workload import Workload, draw_group


def pipeline(**keys):
    return {
        "model": {"checkpoint": "any"},
        "env": {"name": "sums"},
        "pipeline": {"mode": "async", "groups_per_step": 8, **keys},
    }


@pytest.mark.parametrize(
    "key, keys",
    [
        ("min_groups", {"min_groups": 9}),
        ("publish_every", {"publish_every": 3, "max_lag": 1}),
        ("queue", {"workers": 2, "queue": 2}),
        ("queue", {"queue": 2}),
        ("workers", {"workers": 2, "mode": "sync"}),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(key, keys):
    with pytest.raises(ConfigError, match=f"pipeline.{key}"):
        parse(pipeline(**keys))


def test_settings_that_work():
    assert parse(pipeline(min_groups=4, workers=6, queue=4, publish_every=2, max_lag=1)).pipeline.workers == 6


def test_the_packer_says_how_many_groups_fill_the_rows():
    workload = Workload(lengths=(50.0, 400.0), group_size=4, prompt_tokens=100)
    groups = [draw_group(workload, 0, index, 0) for index in range(32)]
    limits = RowLimits.from_config(PackingConfig(row_length=2048, reads=8192, trajectories=256))
    counts = groups_that_fill(groups, 3, lambda g: pack_rows(g, limits), 3 * 2048, 4, seed=0)
    tokens = sum(g.tokens for g in groups) / len(groups)
    assert all(abs(count - 3 * 2048 / tokens) < 3 for count in counts)
    # Where tokens alone decide, the packer needs as many rows as the simulated trainer counts, or one more.
    assert pack_rows(groups, limits) - -(-sum(g.tokens for g in groups) // 2048) in (0, 1)


def test_the_tuner_improves_a_bad_start_within_the_lag_and_its_profile_replays():
    start, bounds = Knobs(4, 4, 4, 4, 1), Bounds(max_lag=2, groups=12, workers=16)
    case = dataclasses.replace(make_case(0), start=start, bounds=bounds, max_lag=2)
    limits = RowLimits.from_config(PackingConfig(row_length=case.machine.row_length, reads=4 * case.machine.row_length))
    config = run_config(case, 9, case.start)
    known = dataclasses.replace(case.machine, decode=((1.0, 1.0),), batch_seconds=1.0)
    tuner = Autotuner(config, case.bounds, known, case.workload.group_size, case.workload.calls, lambda g: pack_rows(g, limits))
    records = simulate(config, case.workload, case.machine, tuner=tuner)
    left_alone = simulate(config, case.workload, case.machine)
    assert useful_rate(records[5:], None) > 1.2 * useful_rate(left_alone[5:], None)
    assert max(lag for r in records for lag in r.lags) <= case.max_lag
    assert tuner.decisions and "useful tokens per second" in str(tuner.decisions[0])
    replayed = simulate(config, case.workload, case.machine, tuner=Replay(tuner.decisions))
    assert [r.seconds for r in replayed] == [r.seconds for r in records]


def test_the_trainers_curve_is_found_from_steps_of_different_sizes():
    case = make_case(0)
    small, large = (simulate(run_config(case, 6, dataclasses.replace(case.start, groups_per_step=n, min_groups=n, workers=64, queue=64)),
                             case.workload, case.machine) for n in (4, 48))  # fmt: skip
    base, slope = fit_trainer(small + large)
    assert (base, slope) == pytest.approx((case.machine.step_seconds, case.machine.batch_seconds))
