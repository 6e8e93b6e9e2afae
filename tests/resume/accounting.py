"""What must hold of a run that was killed, against one that was not and against its own journal."""

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from killing import (
    Kill,
    final_arrays,
    finish,
    host_state,
    journaled_episodes,
    kill_once,
    log_tail,
    make_run,
    metrics,
    num_lines,
    rollout_files,
    saved_steps,
    start,
    timeless,
    trained_episodes,
    wait_for,
)

from jaxrl.rollout.tokenizer import load_tokenizer


def check_sync(folder: Path, num_kills: int, steps: int, rng: np.random.Generator) -> dict[str, Any]:
    """A run killed `num_kills` times, a third of them while it starts, and its twin that never was:
    parameters, optimizer state, metrics and rollouts are equal bit for bit."""
    options = ("--pipeline.steps", str(steps))
    whole, killed = make_run(folder / "whole"), make_run(folder / "killed")
    undisturbed = start(whole, *options)
    kills = kill_often(killed, num_kills, rng, *options)
    wait_for(undisturbed, whole)
    finish(killed, *options)
    assert_same_run(killed, whole)
    return {
        "bit_equal": True,
        "arrays": len(final_arrays(whole)),
        "steps": steps,
        "episodes": sum(map(len, trained_episodes(whole).values())),
        **summary(kills),
    }


def kill_often(folder: Path, num_kills: int, rng: np.random.Generator, *options: str, after=lambda: None) -> list[Kill]:
    """Fails if the run ends before it was killed so often. `after` is called after every kill."""
    kills = []
    for i in range(num_kills):
        kill = kill_once(folder, rng, *options, early=i % 3 == 1)
        assert kill is not None, f"the run ended before kill {i + 1} of {num_kills}: give it more steps"
        assert kill.num_orphans == 0, "an environment worker outlived the run"
        kills.append(kill)
        after()
    return kills


def summary(kills: list[Kill]) -> dict[str, Any]:
    return {
        "kills": len(kills),
        "kill_seconds": [k.seconds for k in kills],
        "kill_steps": [k.logged for k in kills],
        "saved_at_kill": [k.saved for k in kills],
    }


def assert_same_run(a: Path, b: Path) -> None:
    assert rollout_files(a) == rollout_files(b)
    for x, y in zip(timeless(metrics(a)), timeless(metrics(b)), strict=True):
        assert x == y, f"step {x['step']}: {[k for k in x if x.get(k) != y.get(k)]}"
    arrays, expected = final_arrays(a), final_arrays(b)
    assert arrays.keys() == expected.keys()
    for name in expected:
        assert arrays[name] == expected[name], name


def run_to_the_end(folder: Path, *options: str, devices: int) -> dict[str, Any]:
    """Continues a run on other devices."""
    before = saved_steps(folder)[-1]
    finish(folder, *options, devices=devices)
    lines = metrics(folder)
    parity = max(line["parity/logp_mean_abs"] for line in lines if line["step"] > before and "parity/logp_mean_abs" in line)
    assert parity < 1e-5
    return {"from_step": before, "to_step": lines[-1]["step"], "devices": devices, "options": options, "parity_after": parity}


def stop_by_signal(folder: Path, steps: int, rng: np.random.Generator) -> dict[str, Any]:
    """SIGTERM saves the step it has reached and ends with 0; the run continues to the same end."""
    options = ("--pipeline.steps", str(steps), "--checkpoint.every", "1000")
    whole, stopped = make_run(folder / "whole"), make_run(folder / "stopped")
    finish(whole, *options)
    at = []
    for _ in range(3):
        process = start(stopped, *options)
        lines = num_lines(stopped) + int(rng.integers(1, 12))
        while num_lines(stopped) < lines and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log_tail(stopped)
        at.append(saved_steps(stopped)[-1])
        assert at[-1] == metrics(stopped)[-1]["step"] and at[-1] < steps, "what was trained is not what was saved"
    finish(stopped, *options)
    assert_same_run(stopped, whole)
    return {"bit_equal": True, "stopped_at": at}


def check_async(folder: Path, num_kills: int, mode: str, steps: int, rng: np.random.Generator, *options: str) -> dict[str, Any]:
    """A run killed `num_kills` times: every group is trained on at most once, every finished episode that was on
    disk at a kill is trained on as it was, and what is missing in the end was left out for a reason that is counted."""
    options = ("--pipeline.mode", mode, "--pipeline.max_lag", "2", "--pipeline.steps", str(steps), *options)
    killed = make_run(folder / "killed", delay=0.01)
    tokenizer = load_tokenizer(str(killed))
    on_disk: dict[tuple[int, int], list[str]] = {}  # every episode that was ever on disk and not yet in a checkpoint

    def look() -> None:
        controller = host_state(killed).get("controller", {"next_index": 0, "live": []})
        for (group, episode), ids in journaled_episodes(killed).items():
            if group >= controller["next_index"] or group in controller["live"]:
                text = [tokenizer.decode(line, special=True) for line in ids]
                known = on_disk.setdefault((group, episode), text)
                assert known == text, f"episode {episode} of group {group} finished once and was sampled again"

    kills = kill_often(killed, num_kills, rng, *options, after=look)
    finish(killed, *options)
    return {"steps": steps, "episodes_on_disk_at_kills": len(on_disk)} | account(killed, on_disk) | summary(kills)


def account(folder: Path, on_disk: dict[tuple[int, int], list[str]]) -> dict[str, Any]:
    by_step = trained_episodes(folder)
    groups = [g for episodes in by_step.values() for g in sorted({group for group, _ in episodes})]
    assert len(groups) == len(set(groups)), "a group was trained on twice"
    trained = {key: text for episodes in by_step.values() for key, text in episodes.items()}
    controller = host_state(folder)["controller"]
    left_out = controller["num_stale"] + controller["num_zero_variance"] + controller["num_failed"]
    missing = set(range(controller["next_index"])) - set(groups)
    # Sampled for a step that never came: the last groups of the run.
    unneeded = len(missing) - left_out
    assert 0 <= unneeded <= 3 * 4, f"{len(missing)} groups are missing, {left_out} were left out"
    reused = [key for key in on_disk if key in trained]
    for key in reused:
        assert trained[key]["text"] == on_disk[key], f"group {key[0]}, episode {key[1]} was finished and sampled again"
    gone = {group for group, _ in on_disk} - set(groups)
    assert all(group in missing or group >= controller["next_index"] for group in gone)
    lags = [line["lag/max"] for line in metrics(folder) if "lag/max" in line]
    return {
        "groups_trained": len(groups),
        "trained_twice": 0,
        "left_out": {k: controller[k] for k in ("num_stale", "num_zero_variance", "num_failed")} | {"unneeded": unneeded},
        "finished_before_a_kill_and_trained_on": len(reused),
        "max_lag": max(lags),
    }


def compare_lengths(folder: Path, mode: str, steps: int, *options: str) -> dict[str, Any]:
    """Whether kills favoured short answers in the run `check_async` left: mean sampled tokens per episode,
    there and in a run that was not killed, and how many standard errors they are apart."""
    whole = make_run(folder / "whole", delay=0.01)
    finish(whole, "--pipeline.mode", mode, "--pipeline.max_lag", "2", "--pipeline.steps", str(steps), *options)
    runs = (folder / "killed", whole)
    a, b = ({key: line for lines in trained_episodes(run).values() for key, line in lines.items()} for run in runs)
    both = sorted(a.keys() & b.keys())
    num_equal = sum(a[key]["text"] == b[key]["text"] for key in both)
    x, y = (np.array([line["sampled_tokens"] for line in lines.values()]) for lines in (a, b))
    apart = (x.mean() - y.mean()) / np.sqrt(x.var() / len(x) + y.var() / len(y))
    assert abs(apart) < 4, f"kills changed the mean length from {y.mean():.3f} to {x.mean():.3f}"
    return {
        "episodes_in_both": len(both),
        "token_equal": num_equal,
        "mean_tokens_killed": round(float(x.mean()), 3),
        "mean_tokens_whole": round(float(y.mean()), 3),
        "standard_errors_apart": round(float(apart), 2),
    }
