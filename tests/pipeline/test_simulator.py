"""Simulated runs against cases that can be worked out by hand, and the whole way from metrics to a prediction."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxrl.pipeline.calibration import CalibrationError, read_steps
from jaxrl.pipeline.events import ControllerConfig
from jaxrl.pipeline.simulator import simulate
from jaxrl.pipeline.workload import Machine, Workload, interpolate
from jaxrl.simulate import main, predict

SAME = Workload(lengths=(100.0, 100.0), group_size=2)
PLAIN = Machine(decode=((1.0, 0.01), (8.0, 0.01)), slots=8, batch_seconds=2.0, row_length=4096)


def config(**changes) -> ControllerConfig:
    base = ControllerConfig("sync", steps=6, groups_per_step=4, max_lag=1, window=64, checkpoint_every=100)
    return replace(base, **changes)


def test_a_sync_step_takes_its_generation_and_its_training():
    records = simulate(config(), SAME, PLAIN)
    assert [r.seconds for r in records] == pytest.approx([100 * 0.01 + 2.0] * 6)
    assert [r.lags for r in records] == [(0,) * 4] * 6
    assert [r.num_sampled for r in records] == [800] * 6


def test_answers_beyond_the_slots_wait_for_a_place():
    records = simulate(config(), SAME, replace(PLAIN, slots=4))
    assert records[1].seconds == pytest.approx(2 * 100 * 0.01 + 2.0)


def test_sequences_share_a_replica_as_the_curve_says():
    """One of 100 tokens and one of 300: two at once up to the first end, then one."""
    workload = Workload(lengths=(100.0, 300.0), group_size=1)
    machine = replace(PLAIN, decode=((1.0, 0.01), (2.0, 0.03)))
    records = simulate(config(groups_per_step=2, steps=4), workload, machine)
    for record in records:
        short, long = sorted(int(g.lengths[0, 0]) for g in record.trained)
        assert record.seconds == pytest.approx(short * 0.03 + (long - short) * 0.01 + 2.0)


def test_async_hides_generation_behind_training():
    records = simulate(config(mode="inflight", steps=20), SAME, PLAIN)
    assert records[-2].seconds == pytest.approx(2.0)
    assert max(lag for r in records for lag in r.lags) == 1


def test_where_both_sides_share_a_processor_both_slow_down():
    machine = replace(PLAIN, overlap=0.5)
    records = simulate(config(mode="inflight", steps=40), SAME, machine)
    # 1 s of generation and 2 s of training, of which one second runs beside the other, at half speed each.
    assert np.mean([r.seconds for r in records[10:-2]]) == pytest.approx(3.0, rel=0.02)


def test_a_plain_async_publish_waits_for_running_calls_and_lag_counts_from_the_first_token():
    workload = Workload(lengths=(50.0, 400.0), group_size=1)
    records = simulate(config(mode="async", max_lag=3, steps=30, workers=8), workload, PLAIN)
    assert max(r.publish_seconds for r in records) > 0
    assert max(lag for r in records for lag in r.lags) <= 3


def test_a_period_trains_while_its_groups_run_and_publishes_once():
    """Two groups of 100 and 300 tokens: the first step runs beside the second group's last 2 s."""
    workload = Workload(lengths=(100.0, 300.0), group_size=1)
    machine = replace(PLAIN, publish_seconds=1.0)
    run = replace(config(), mode="periodic", publish_every=2, groups_per_step=1, steps=6)
    records = simulate(run, workload, machine)
    assert [r.lags for r in records] == [(0,), (1,)] * 3
    for first, second, third in zip(records[::2], records[1::2], records[2::2], strict=False):
        short, long = (max(int(g.lengths[0, 0]) for g in r.trained) for r in (first, second))
        assert second.seconds == pytest.approx(max(0.0, (long - short) * 0.01 - 2.0) + 2.0)
        assert second.publish_seconds == 0 and third.publish_seconds == pytest.approx(1.0)


def test_partial_cuts_what_runs_and_continues_it_where_it_was():
    workload = Workload(lengths=(50.0, 800.0), group_size=1)
    run = config(mode="partial", groups_per_step=2, max_lag=2, workers=4, steps=30)
    records = simulate(run, workload, PLAIN)
    trained = [g for r in records for g in r.trained]
    assert len(trained) == 60 and max(lag for r in records for lag in r.lags) == 2
    # Every token is sampled once, however often its group was cut; what is left over had begun and was not needed.
    extra = sum(r.num_sampled for r in records) - sum(int(g.lengths.sum()) for g in trained)
    assert 0 <= extra < 4 * 800
    waits = np.mean([r.seconds for r in simulate(replace(run, mode="sync", workers=0), workload, PLAIN)])
    assert np.mean([r.seconds for r in records]) < waits


def test_extra_episodes_keep_the_first_to_end_and_favour_short_ones():
    workload = Workload(lengths=(50.0, 800.0), group_size=4)
    plain = simulate(config(mode="periodic", steps=20), workload, PLAIN)
    more = simulate(config(mode="periodic", steps=20), replace(workload, extra=2), replace(PLAIN, slots=64))
    lengths = [np.concatenate([g.lengths.ravel() for r in records for g in r.trained]) for records in (plain, more)]
    assert len(lengths[0]) == len(lengths[1]) == 20 * 16
    assert lengths[1].mean() < 0.85 * lengths[0].mean()
    assert sum(r.num_sampled for r in more) > lengths[1].sum()


def test_a_sampler_that_pulls_takes_weights_when_no_call_waits():
    workload = Workload(lengths=(50.0, 400.0), group_size=4)
    pull = config(mode="inflight", max_lag=3, steps=30, workers=8, publish="pull")
    records = simulate(pull, workload, replace(PLAIN, batch_seconds=0.5, publish_seconds=0.2))
    pushed = simulate(replace(pull, publish="push"), workload, replace(PLAIN, batch_seconds=0.5, publish_seconds=0.2))
    assert max(lag for r in records for lag in r.lags) <= 3
    assert sum(r.publish_seconds > 0 for r in records) < sum(r.publish_seconds > 0 for r in pushed)


def test_curves_run_on_by_their_last_slope():
    curve = ((1.0, 2.0), (3.0, 4.0), (4.0, 8.0))
    assert [interpolate(curve, x) for x in (0.5, 2.0, 3.5, 5.0)] == [2.0, 3.0, 6.0, 12.0]


def test_thousand_replicas_and_ten_thousand_workers():
    workload = Workload(lengths=(20.0, 100.0, 400.0), group_size=8)
    machine = replace(PLAIN, replicas=1000, slots=16, concurrency=10_000, rows=400)
    records = simulate(config(mode="async", groups_per_step=1250, steps=1, window=5000), workload, machine)
    assert max(r.running for r in records) > 2000


def write_run(folder, records, text):
    """The metrics that a real run would log of these steps."""
    folder.mkdir()
    (folder / "config.toml").write_text(text)
    lines = []
    for r in records:
        lengths = np.concatenate([g.lengths.ravel() for g in r.finished])
        logical = r.num_placed
        lines.append(
            {
                "step": r.step,
                **{f"completion/tokens_p{p}": float(np.percentile(lengths, p)) for p in (0, 10, 25, 50, 75, 90)},
                "completion/tokens_max": float(lengths.max()),
                "completion/tokens_mean": float(lengths.mean()),
                "episodes/finished": len(lengths),
                "groups/finished": len(r.finished),
                "groups/trained": r.num_groups,
                "tokens/trained": r.num_trained,
                "tokens/logical": logical,
                "tokens/placed": r.num_placed,
                "packing/rows": r.num_batches,
                "load/running": r.running,
                "time/step": r.seconds,
                "time/wait": r.wait_seconds,
                "time/train": r.train_seconds,
                "time/pack": 0.0,
                "time/publish": r.publish_seconds,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


TEXT = """
[model]
checkpoint = "models/any"
[env]
name = "sums"
[sampling]
max_tokens = 500
[sampler]
slots = 64
[pipeline]
mode = "{mode}"
steps = 60
groups_per_step = {groups}
group_size = 4
[packing]
row_length = 4096
"""


def test_a_run_calibrates_a_prediction_of_others(tmp_path, capsys):
    workload = Workload(lengths=(20.0, 60.0, 120.0, 250.0, 400.0), group_size=4)
    machine = Machine(decode=((1.0, 0.010), (64.0, 0.022)), slots=64, batch_seconds=1.0, step_seconds=0.5, row_length=4096)
    base = config(steps=60, groups_per_step=12)
    write_run(tmp_path / "was", simulate(base, workload, machine, seed=3), TEXT.format(mode="sync", groups=12))
    for mode, groups in (("sync", 6), ("async", 12), ("inflight", 16)):
        path = tmp_path / f"{mode}.toml"
        path.write_text(TEXT.format(mode=mode, groups=groups))
        assert main([str(path), "--from", str(tmp_path / "was")]) == 0
        told = json.loads(capsys.readouterr().out)
        real = predict(replace(base, mode=mode, groups_per_step=groups, window=4), workload, machine)
        assert told["step_seconds"] == pytest.approx(real["step_seconds"], rel=0.15)


def test_metrics_that_do_not_suffice_are_named(tmp_path):
    with pytest.raises(CalibrationError, match="no such file"):
        read_steps(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/train": 1.0}\n' * 12)
    with pytest.raises(CalibrationError, match="completion/tokens_p50"):
        read_steps(tmp_path / "metrics.jsonl")
