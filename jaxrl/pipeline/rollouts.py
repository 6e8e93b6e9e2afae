"""What was sampled: its metrics, and a few episodes per step that a person can read."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from jaxrl.data import Episode, Group
from jaxrl.metrics import names
from jaxrl.rollout.episodes import FAILURES, failure_kind
from jaxrl.rollout.protocol import SamplerLoad
from jaxrl.rollout.tokenizer import Tokenizer

LENGTH_PERCENTILES = (0, 10, 25, 50, 75, 90)  # logged; the simulator is calibrated from them


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Over all episodes of `groups`, whether they are trained on or not; failed ones count as failed, not as reward 0."""
    episodes = [e for g in sorted(groups, key=lambda g: g.index) for e in g.episodes]
    scored = [e for e in episodes if e.error is None]
    failures = Counter(failure_kind(e) for e in episodes if e.error is not None)
    metrics: dict[str, float] = {names.FAILED: float(sum(failures.values())), "episodes/finished": float(len(episodes))}
    metrics |= {f"{names.FAILED}.{kind}": float(failures[kind]) for kind in FAILURES}
    if not scored:
        return metrics
    rewards = np.array([e.reward for e in scored])
    sampled = np.array([num_sampled(e) for e in scored])
    metrics |= {
        names.REWARD: float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "completion/tokens_mean": float(sampled.mean()),
        "completion/tokens_max": float(sampled.max()),
        **{f"completion/tokens_p{p}": float(np.percentile(sampled, p)) for p in LENGTH_PERCENTILES},
    }
    own = defaultdict(list)
    for episode in scored:
        for name, value in episode.metrics.items():
            own[name if "/" in name else f"env/{name}"].append(value)
    return metrics | {name: float(np.mean(values)) for name, values in sorted(own.items())}


def extra_metrics(groups: Sequence[Group], left_out: Sequence[int]) -> dict[str, float]:
    """What keeping the first episodes to end favours: tokens of those that were kept, and of the others, which had sampled
    `left_out` tokens when they were stopped and would have gone on."""
    kept = [num_sampled(e) for g in groups for e in g.episodes if e.error is None]
    if not left_out or not kept:
        return {}
    return {
        "extra/left_out": float(len(left_out)),
        "extra/kept_tokens_mean": float(np.mean(kept)),
        "extra/left_out_tokens_mean": float(np.mean(left_out)),
    }


def load_metrics(loads: Sequence[SamplerLoad]) -> dict[str, float]:
    """Means over what was seen of the sampler: generations that run and that wait, share of the KV cache in use; and, of servers
    that failed, how many generations have moved and how often one was started again, since the run began."""
    if not loads:
        return {}
    return {
        "load/running": float(np.mean([load.num_running for load in loads])),
        "load/waiting": float(np.mean([load.num_waiting for load in loads])),
        "load/kv_use": float(np.mean([load.kv_use for load in loads])),
        "load/moved": float(loads[-1].num_moved),
        "load/restarts": float(loads[-1].num_restarts),
    }


def num_sampled(episode: Episode) -> int:
    return sum(int(t.trainable.sum()) for t in episode.trajectories)


def write_rollouts(folder: Path, step: int, groups: Sequence[Group], tokenizer: Tokenizer, most: int) -> None:
    """FOLDER/step_NNNNNN.jsonl.zst (read it with zstdcat): up to `most` episodes, the first of every group, then the
    second, and so on."""
    episodes = [(g, e) for g in groups for e in g.episodes]
    chosen = sorted(episodes, key=lambda pair: (pair[1].index, pair[0].index))[:most]
    if not chosen:
        return
    text = "".join(json.dumps(_readable(group, episode, tokenizer), ensure_ascii=False) + "\n" for group, episode in chosen)
    folder.mkdir(exist_ok=True)
    path = _path(folder, step)
    part = path.with_suffix(".part")
    part.write_bytes(zstandard.compress(text.encode()))
    part.replace(path)


def cut_rollouts(folder: Path, step: int) -> None:
    """Deletes what is past the restored step."""
    for path in folder.glob("step_*"):
        if int(path.name.removeprefix("step_").partition(".")[0]) > step:
            path.unlink()


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.jsonl.zst"


def _readable(group: Group, episode: Episode, tokenizer: Tokenizer) -> dict[str, Any]:
    versions = [int(v) for t in episode.trajectories for v in t.version[t.trainable]]
    return {
        "group": group.index,
        "task": group.task_index,
        "episode": episode.index,
        "reward": None if episode.error else episode.reward,
        "error": episode.error,
        "sampled_tokens": len(versions),
        "versions": [min(versions), max(versions)] if versions else None,
        "metrics": dict(episode.metrics),
        "messages": [dict(m) for m in episode.messages],
        "text": [tokenizer.decode(t.ids.tolist(), special=True) for t in episode.trajectories],
    }
