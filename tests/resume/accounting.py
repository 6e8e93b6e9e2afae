"""What must hold of a run that was killed, against one that was not and against its own journal."""

import signal
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from killing import (
    Calls,
    Kill,
    final_arrays,
    finish,
    host_state,
    journaled,
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

from jaxrl.data import Episode
from jaxrl.rollout.partial import CallRecord
from jaxrl.rollout.protocol import SampledTokens
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


def kill_often(
    folder: Path,
    num_kills: int,
    rng: np.random.Generator,
    *options: str,
    after: Callable[[], None] = lambda: None,
    when: Callable[[int], str] = lambda i: "starting" if i % 3 == 1 else "later",
    gently: Callable[[int], bool] = lambda i: False,
) -> list[Kill]:
    """Fails if the run ends before it was killed so often. `after` is called after every kill; `when` says at which
    moment kill i comes, `gently` whether it is a SIGTERM."""
    kills = []
    for i in range(num_kills):
        kill = kill_once(folder, rng, *options, when=when(i), gently=gently(i))
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
    """A run killed `num_kills` times, every fifth by SIGTERM: every group is trained on at most once, every finished episode that
    was on disk at a kill is trained on as it was, what the others had sampled is a part of what they became, and what is
    missing in the end was left out for a reason that is counted."""
    options = (*_async(mode, steps), *options)
    killed = make_run(folder / "killed", delay=0.01, slow={"seconds": 0.02})
    tokenizer = load_tokenizer(str(killed))
    on_disk: dict[tuple[int, int], list[str]] = {}  # every episode that was ever on disk and not yet in a checkpoint
    begun: dict[tuple[int, int], Calls] = {}  # the calls of every episode that ran at a kill, as they were at its last one

    def look() -> None:
        controller = host_state(killed).get("controller", {"next_index": 0, "live": []})
        finished, partial = journaled(killed)
        for (group, episode), result in finished.items():
            if group >= controller["next_index"] or group in controller["live"]:
                text = [tokenizer.decode(t.ids.tolist(), special=True) for t in result.trajectories]
                known = on_disk.setdefault((group, episode), text)
                assert known == text, f"episode {episode} of group {group} finished once and was sampled again"
            assert_continues(begun.get((group, episode), {}), sampled_by(result))
        for place, calls in partial.items():
            assert_continues(begun.get(place, {}), calls)
            begun[place] = calls

    kills = kill_often(killed, num_kills, rng, *options, after=look, gently=lambda i: i % 5 == 3)
    finish(killed, *options)
    figures = {"steps": steps, "episodes_on_disk_at_kills": len(on_disk)} | account(killed, on_disk)
    return figures | account_continued(killed, begun) | summary(kills)


def _async(mode: str, steps: int, max_lag: int = 2) -> tuple[str, ...]:
    return ("--pipeline.mode", mode, "--pipeline.max_lag", str(max_lag), "--pipeline.steps", str(steps))


def sampled_by(episode: Episode) -> Calls:
    """What the calls of a finished episode sampled, by call; for episodes of one chat."""
    found = {}
    for t in episode.trajectories:
        for turn in np.unique(t.turn[t.trainable]).tolist():
            columns = (t.ids, t.policy_logp, t.behaviour_logp, t.version, t.source)
            tokens = SampledTokens(*(column[t.trainable & (t.turn == turn)] for column in columns))
            found[(), turn] = CallRecord(b"", tokens, "stop")
    return found


def assert_continues(before: Calls, after: Calls) -> None:
    """Every token with its log-probs and its version."""
    for key, call in before.items():
        for field in fields(SampledTokens):
            old, new = getattr(call.tokens, field.name), getattr(after[key].tokens, field.name)
            assert old.tobytes() == new[: len(old)].tobytes(), f"{field.name} of call {key} changed"


def account_continued(folder: Path, begun: dict[tuple[int, int], Calls]) -> dict[str, Any]:
    """The episodes that ran at a kill, as they were trained on."""
    tokenizer = load_tokenizer(str(folder))
    trained = {key: line for lines in trained_episodes(folder).values() for key, line in lines.items()}
    continued = {key: calls for key, calls in begun.items() if key in trained}
    num_tokens = num_versions = 0
    for key, calls in continued.items():
        line = trained[key]
        (text,) = line["text"]
        answers = [tokenizer.decode(calls[call].tokens.ids.tolist(), special=True) for call in sorted(calls)]
        prompt = text[: text.index("=") + 1]
        assert text.startswith(prompt + "+7=".join(answers)), f"group {key[0]}, episode {key[1]} was not continued"
        assert line["metrics"]["resume/discarded_calls"] == 0
        assert line["metrics"]["resume/continued_tokens"] == sum(len(calls[call].tokens.ids) for call in calls)
        version = np.concatenate([calls[call].tokens.version for call in calls])
        assert line["versions"][0] <= version.min() and line["versions"][1] >= version.max()
        num_tokens += len(version)
        num_versions += line["versions"][0] < line["versions"][1]
    assert continued, "no kill met a running episode: the test shows nothing"
    return {"continued_and_trained_on": len(continued), "tokens_continued": num_tokens, "over_versions": num_versions}


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


def check_same_tokens(folder: Path, mode: str, steps: int, *options: str) -> dict[str, Any]:
    """Whether the run `check_async` left sampled, token for token, what a run does that was not killed."""
    whole = make_run(folder / "whole")
    finish(whole, *_async(mode, steps), *options)
    runs = (folder / "killed", whole)
    a, b = ({key: line["text"] for lines in trained_episodes(run).values() for key, line in lines.items()} for run in runs)
    both = a.keys() & b.keys()
    assert all(a[key] == b[key] for key in both)
    return {"episodes_in_both": len(both), "token_equal": len(both)}


def check_lengths(folder: Path, num_kills: int, steps: int, rng: np.random.Generator) -> dict[str, Any]:
    """Whether kills favour short answers, at learning rate 0 and with other random numbers after every start: sampled
    tokens per episode of a killed run, and of one that starts running episodes again, against a run that was not killed.
    The first has to have the same distribution, and the second, or the test could not tell, another one."""
    longer = ("--sampling.max_tokens", "40", "--sampler.max_length", "100")
    options = (*_async("async", steps, max_lag=4), "--optimizer.lr", "0", *longer)
    runs = {"whole": 0, "continued": num_kills, "restarted": num_kills}
    lengths = {}
    for name, kills in runs.items():
        run = make_run(folder / name, slow={"seconds": 0.06, "fresh": True, "forgets": name == "restarted"})
        kill_often(run, kills, rng, *options, when=lambda i: "sampling")
        finish(run, *options)
        lines = [line for lines in trained_episodes(run).values() for line in lines.values()]
        lengths[name] = np.array([line["sampled_tokens"] for line in lines])
    means = {f"mean_tokens_{name}": round(float(x.mean()), 2) for name, x in lengths.items()}
    p = {f"p_{name}": same_distribution(lengths[name], lengths["whole"]) for name in ("continued", "restarted")}
    assert p["p_continued"] > 1e-3, f"kills changed how long answers are: {means | p}"
    assert p["p_restarted"] < 1e-3, f"the test cannot tell: {means | p}"
    return {"kills": num_kills, "episodes": {name: len(x) for name, x in lengths.items()}, **means, **p}


def same_distribution(x: np.ndarray, y: np.ndarray) -> float:
    """p-value of the two-sample Kolmogorov-Smirnov test by its asymptotic law; with ties it is too large."""
    distance = max(abs(np.mean(x <= v) - np.mean(y <= v)) for v in np.union1d(x, y))
    return float(min(1.0, 2 * np.exp(-2 * distance**2 * len(x) * len(y) / (len(x) + len(y)))))
