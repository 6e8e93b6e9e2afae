"""The panel fits its terminal and says what it was given."""

import io
import time

import pytest
from rich.console import Console

from jaxrl.metrics import names
from jaxrl.metrics.live import LiveTracker, View, sparkline
from jaxrl.metrics.progress import Progress, duration


def view_of(num_steps):
    now = [0.0]
    view = View("my run", Progress(0, 200, lambda: now[0]))
    for step in range(1, num_steps + 1):
        now[0] += 30
        metrics = {
            names.REWARD: step / 200,
            names.LAG_MEAN: 0.75,
            names.LAG_MAX: 2.0,
            names.PARITY: 3.1e-6,
            names.TRAINER_RATE: 3456.0,
            names.SAMPLER_RATE: 61234.0,
            names.FAILED: float(step % 50 == 0),
        }
        view.log(step, metrics)
        if step % 10 == 0:
            view.log(step, {names.HELDOUT: step / 400})
    now[0] += 7
    return view


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("num_steps", [0, 1, 130])
def test_fits_the_terminal(width, num_steps):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(view_of(num_steps))
    lines = console.file.getvalue().splitlines()
    assert {len(line) for line in lines} == {width}
    assert not any("…" in line.replace("to go …", "") for line in lines)  # nothing cut short


def test_says_what_it_was_given():
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(view_of(130))
    text = console.file.getvalue()
    for part in (
        "my run",
        "step 130/200",
        "to go 35:00",
        "1:05:07 so far",
        "this step 7 s",
        "reward    0.650 ▁",
        "held-out  0.325 ▁",
        "lag 0.75",
        "worst lag 2",
        "parity 3.1e-06",
        "failed 2",
        "train tok/s 3.5k",
        "sample tok/s 61k",
    ):
        assert part in text, part


def test_sparkline_is_the_whole_series():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 10) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(1000)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.5, 0.5], 10) == "▁▁"
    assert sparkline([float("nan"), 0, 1], 10) == "▁█"
    assert sparkline([], 10) == "" and sparkline([1.0], 0) == ""


def test_durations():
    assert [duration(s) for s in (0.4, 59, 60, 245, 3723)] == ["0 s", "59 s", "1:00", "4:05", "1:02:03"]


def test_the_tracker_draws_and_leaves_the_last_state_standing():
    out = io.StringIO()
    tracker = LiveTracker("run", 0, 2, Console(file=out, width=80, force_terminal=True, color_system=None))
    tracker.log(1, {names.REWARD: 0.125})
    tracker.log(2, {names.REWARD: 0.875})
    time.sleep(0.3)
    tracker.close()
    assert "step 2/2" in out.getvalue() and "0.875 ▁█" in out.getvalue()
