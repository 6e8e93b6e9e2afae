"""`python -m jaxrl.bench packing [--data DIR]`: what planning costs and what packing saves, as JSON lines.

groups     long prompts shared by a group: seconds to plan (validation, tree, rows), on one core
scaling    the same up to 50,000 trajectories
agents     a batch shaped like a published one: 48 groups of three task families under one system prompt
tau_bench  one sequence per model call of the tau-bench airline runs, in Qwen3's template; it needs
           DIR/tau-bench/airline_tasks_*.json.gz and DIR/qwen3-tokenizer/{tokenizer.json.gz, tokenizer_config.json}

Making the data is not timed. `seconds` is the median wall-clock time of `repeats` runs, `best_seconds`
the shortest, `cpu_seconds` the shortest process time: on a busy machine only the last says anything.
"""

import argparse
import gzip
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxrl.config import PackingConfig
from jaxrl.data import TrainingTrajectory, Trajectory
from jaxrl.packing import Plan, RowLimits, plan
from jaxrl.packing.tree import build_tree

VOCABULARY = 150_000


def trajectory(index: int, group: int, ids: np.ndarray, num_context: int) -> TrainingTrajectory:
    """Everything after the first num_context tokens is trainable. Values the planner does not read are zeros."""
    zeros, whole = np.broadcast_to(np.float32(0), len(ids)), np.broadcast_to(np.int32(0), len(ids))
    trainable = np.zeros(len(ids), bool)
    trainable[num_context:] = True
    tokens = Trajectory(ids, trainable, zeros, zeros, whole, whole, whole)
    return TrainingTrajectory(tokens, zeros, zeros, index, index, group)


def long_prompts(num_trajectories: int, num_groups: int, seed: int = 0) -> list[TrainingTrajectory]:
    """Completions of 100 to 1,000 tokens on prompts of 5,000, of which a system prompt of 1,000 is common to all."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCABULARY, 1000, dtype=np.int32)
    prompts = [np.concatenate([system, rng.integers(0, VOCABULARY, 4000, dtype=np.int32)]) for _ in range(num_groups)]
    out = []
    for k in range(num_trajectories):
        completion = rng.integers(0, VOCABULARY, rng.integers(100, 1001), dtype=np.int32)
        out.append(trajectory(k, k % num_groups, np.concatenate([prompts[k % num_groups], completion]), 5000))
    return out


def agents(seed: int = 0) -> list[TrainingTrajectory]:
    """450 completions of 48 groups, ~494,000 logical tokens. Published with it: one system prompt of 350
    tokens, three task families, 241,000 tokens placed in 61 rows of 4,096. Chosen here so that
    about as many are placed: 150 tokens per family, 105 to 235 per question,
    completions of 427 on average, log-normal with sigma 0.6.
    """
    rng = np.random.default_rng(seed)

    def tokens(count):
        return rng.integers(0, VOCABULARY, count, dtype=np.int32)

    system, families = tokens(350), [tokens(150) for _ in range(3)]
    prompts = [np.concatenate([system, families[g % 3], tokens(rng.integers(105, 236))]) for g in range(48)]
    length = rng.lognormal(0, 0.6, 450)
    length = np.minimum(length / length.mean() * (494_000 / 450 - np.mean([len(p) for p in prompts])), 3000).astype(int)
    return [
        trajectory(k, k % 48, np.concatenate([prompts[k % 48], tokens(length[k])]), len(prompts[k % 48])) for k in range(450)
    ]


def tau_bench(data: Path) -> list[TrainingTrajectory]:
    """One trajectory per model call: the history up to an assistant message, and the message."""
    from transformers import AutoTokenizer

    runs = []
    for path in sorted((data / "tau-bench").glob("airline_tasks_*.json.gz")):
        runs += json.loads(gzip.decompress(path.read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        source = data / "qwen3-tokenizer"
        (Path(folder) / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
        shutil.copy(source / "tokenizer_config.json", folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    out: list[TrainingTrajectory] = []
    for episode, run in enumerate(runs):
        messages = [message | {"content": message.get("content") or ""} for message in run["traj"]]
        calls = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = [tokenizer.apply_chat_template(messages[:k], tokenize=False, add_generation_prompt=True) for k in calls]
        texts = [tokenizer.apply_chat_template(messages[: k + 1], tokenize=False) for k in calls]
        for prompt, text, encoding in zip(prompts, texts, tokenizer.backend_tokenizer.encode_batch(texts), strict=True):
            if not text.startswith(prompt):
                raise ValueError(f"episode {episode}: the template rewrites the prompt of a call")
            ids = np.array(encoding.ids, np.int32)
            num_context = sum(end <= len(prompt) for _, end in encoding.offsets)
            out.append(trajectory(len(out), run["task_id"], ids, num_context))
    return out


def timed(trajectories: list[TrainingTrajectory], row_length: int, repeats: int) -> tuple[Plan, dict[str, float]]:
    limits = RowLimits.from_config(PackingConfig(row_length=row_length))
    wall, cpu, tree = [], [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        planned = plan(trajectories, limits)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    ids = [t.trajectory.ids for t in trajectories]
    for _ in range(repeats):
        start_cpu = time.process_time()
        build_tree(ids)
        tree.append(time.process_time() - start_cpu)
    seconds = {
        "seconds": np.median(wall),
        "best_seconds": min(wall),
        "cpu_seconds": min(cpu),
        "tree_cpu_seconds": min(tree),
    }
    return planned, {name: round(float(value), 4) for name, value in seconds.items()} | {"repeats": repeats}


def line(case: str, trajectories: list[TrainingTrajectory], row_length: int, repeats: int) -> dict:
    planned, seconds = timed(trajectories, row_length, repeats)
    stats = planned.stats
    return {
        "bench": "packing",
        "case": case,
        "row_length": row_length,
        "trajectories": stats.trajectories,
        "groups": len({t.group_index for t in trajectories}),
        "logical_tokens": stats.logical_tokens,
        "unique_tokens": stats.unique_tokens,
        "placed_tokens": stats.placed_tokens,
        "rows": stats.num_rows,
        "fill": round(stats.fill, 4),
        "placed_over_unique": round(stats.overhead, 4),
        "logical_over_placed": round(stats.sharing, 3),
        **seconds,
    }


def lines(data: Path | None, max_trajectories: int) -> Iterator[dict]:
    trajectories = long_prompts(6700, 768)
    for row_length in (16_384, 32_768, 131_072):
        yield line("groups", trajectories, row_length, 9)
    del trajectories
    for count in (12_500, 25_000, 50_000):
        if count <= max_trajectories:
            found = line("scaling", long_prompts(count, count * 768 // 6700), 131_072, 3)
            yield found | {"cpu_microseconds_per_trajectory": round(found["cpu_seconds"] / count * 1e6, 2)}
    for seed in range(5):
        found = line("agents", agents(seed), 4096, 9)
        yield found | {"seed": seed, "published_placed_tokens": 241_000, "published_rows": 61}
    if data is None:
        print("tau_bench left out: give the folder of tau-bench/ and qwen3-tokenizer/ with --data DIR", file=sys.stderr)
        return
    trajectories = tau_bench(data)
    for row_length in (16_384, 32_768, 131_072):
        yield line("tau_bench", trajectories, row_length, 5)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.bench packing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder that holds tau-bench/ and qwen3-tokenizer/; without it that part is left out"
    )
    parser.add_argument("--max-trajectories", type=int, default=50_000, help="largest case of `scaling`; 50,000 need 1.5 GB")
    options = parser.parse_args(argv)
    if options.data is not None:
        for name in ("tau-bench", "qwen3-tokenizer"):
            if not (options.data / name).is_dir():
                parser.error(f"--data {options.data}: no folder {name} in it")
    for found in lines(options.data, options.max_trajectories):
        print(json.dumps(found), flush=True)
