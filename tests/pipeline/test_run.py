"""Whole runs of a tiny model: real sampler, real environment processes, real checkpoints."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import zstandard
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.checkpoint import Checkpoints, abstract_state
from jaxrl.config import Config, ConfigError, parse
from jaxrl.metrics import jsonl
from jaxrl.models.hf import save_checkpoint
from jaxrl.pipeline.run import RunError, run
from jaxrl.pipeline.setup import build, initial_variables
from jaxrl.rollout import workers
from jaxrl.samplers import make_sampler

TASKS = Path(__file__).parent / "tiny_tasks.py"


def make_tokenizer(folder: Path) -> Path:
    """One token a character."""
    vocab = {text: i for i, text in enumerate(["<pad>", "<eos>", *"0123456789+=-"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(str(folder))
    return folder


def make_config(out: Path, task: str, **tables) -> Config:
    base = {
        "out": str(out),
        "seed": 5,
        "model": {
            "tokenizer": str(make_tokenizer(out / "tokenizer")),
            "remat": "none",
            "architecture": {
                "model_type": "llama",
                "vocab_size": 15,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
                "eos_token_id": 1,
            },
        },
        "env": {"name": f"{TASKS}:{task}", "timeout_seconds": 30.0},
        "sampling": {"max_tokens": 6},
        "sampler": {"slots": 16, "max_length": 24, "page_size": 8, "prefill_chunk": 8},
        "pipeline": {"steps": 3, "groups_per_step": 4, "group_size": 4},
        "packing": {"row_length": 64, "rows": 8},
        "optimizer": {"lr": 1e-2},
        "log": {"tensorboard": False, "live": False},
    }
    for table, values in tables.items():
        base[table] = base.get(table, {}) | values if isinstance(values, dict) else values
    return parse(base)


def metrics_of(config: Config) -> list[dict]:
    """Lines of optimizer steps."""
    lines = jsonl.read(Path(config.out) / config.name / "metrics.jsonl")
    return [line for line in lines if "reward/mean" in line or "loss" in line]


def exact(lines: list[dict]) -> list[dict]:
    """What must be equal to the bit: everything but clocks."""
    return [{k: v for k, v in line.items() if not k.startswith(("time", "load/")) and "per_second" not in k} for line in lines]


def weights_of(config: Config, step: int | None = None) -> dict[str, np.ndarray]:
    parts = build(config)
    checkpoints = Checkpoints(Path(config.out) / config.name / "checkpoints", 1, False, read_only=True)
    state = parts.trainer.init(initial_variables(parts))
    state = checkpoints.restore(checkpoints.latest() if step is None else step, abstract_state(state))
    checkpoints.close()
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_weights(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Config:
    """A sync run that nothing interrupts."""
    config = make_config(tmp_path_factory.mktemp("straight"), "two_turns", pipeline={"steps": 5}, eval={"num_tasks": 4})
    summary = run(config, make_sampler)
    assert summary["ended"] == "finished" and summary["steps"] == 5
    return config


def test_sync_twice_is_equal_to_the_bit(straight, tmp_path):
    config = straight.model_copy(update={"out": str(tmp_path)})
    run(config, make_sampler)
    lines = exact(metrics_of(config))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines == exact(metrics_of(straight))
    assert_same_weights(weights_of(config), weights_of(straight))


def test_sync_is_on_policy_and_says_what_it_does(straight):
    for line in metrics_of(straight):
        assert line["lag/max"] == 0 and line["groups/finished"] == 4 and line["parity/logp_mean_abs"] < 1e-5
        assert line["episodes/failed"] == 0 and line["chat/calls"] == 3
        assert {"reward/std", "packing/fill", "tokens/unique", "optimizer/gradient_norm", "policy/entropy"} <= line.keys()
    folder = Path(straight.out) / straight.name
    lines = zstandard.decompress((folder / "rollouts" / "step_000005.jsonl.zst").read_bytes(), max_output_size=10**6)
    rollouts = [json.loads(line) for line in lines.decode().splitlines()]
    assert [r["group"] for r in rollouts] == [16, 17, 18, 19] and all(r["versions"] == [4, 4] for r in rollouts)
    assert (folder / "config.toml").exists()


def test_sigterm_saves_and_the_same_command_ends_as_if_nothing_had_happened(straight, tmp_path):
    config = straight.model_copy(update={"out": str(tmp_path)})
    file = tmp_path / config.name / "metrics.jsonl"

    def stop():
        while not file.exists() or '"step": 2' not in file.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    summary = run(config, make_sampler)
    thread.join()
    assert summary["ended"] == "stopped by SIGTERM" and 2 <= summary["steps"] < 5
    assert run(config, make_sampler)["ended"] == "finished"
    assert exact(metrics_of(config)) == exact(metrics_of(straight))
    assert_same_weights(weights_of(config), weights_of(straight))


def test_a_finished_run_says_so_again_and_a_longer_one_goes_on(straight, tmp_path):
    shutil.copytree(Path(straight.out) / straight.name, tmp_path / straight.name)
    config = straight.model_copy(update={"out": str(tmp_path)})
    summary = run(config, make_sampler)
    assert summary["ended"] == "finished" and summary["steps"] == 5 and summary["heldout_before"] is not None
    longer = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"steps": 6})})
    assert run(longer, make_sampler)["steps"] == 6
    assert [line["step"] for line in metrics_of(longer)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("mode, max_lag", [("async", 1), ("inflight", 2)])
def test_off_policy_modes_learn_within_their_lag(mode, max_lag, tmp_path):
    pipeline = {"mode": mode, "max_lag": max_lag, "steps": 30, "groups_per_step": 4, "group_size": 8, "window": 3}
    config = make_config(tmp_path, "sevens", pipeline=pipeline, sampler={"slots": 32})
    assert run(config, make_sampler)["ended"] == "finished"
    lines = metrics_of(config)
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert len(lines) == 30 and max(line["lag/max"] for line in lines) <= max_lag
    assert max(line["lag/max"] for line in lines) >= 1  # or nothing here was off the policy
    assert np.mean(rewards[:4]) < 0.15 and np.mean(rewards[-4:]) > 0.6
    looks = [line for line in lines if "load/running" in line]
    assert all(0 <= line["load/running"] <= 32 and 0 <= line["load/kv_use"] <= 1 for line in looks)
    assert any(line["load/running"] > 0 and line["load/kv_use"] > 0 for line in looks)
    assert sum(line["groups/dropped_stale"] for line in lines) == 0


@pytest.mark.parametrize(
    "pipeline",
    [
        {"mode": "periodic", "publish_every": 2},
        {"mode": "partial", "max_lag": 2, "workers": 8, "extra_episodes": 2},
        {"mode": "async", "max_lag": 2, "publish": "pull"},
    ],
    ids=["periodic", "partial", "pull"],
)
def test_other_modes_learn_within_their_lag(pipeline, tmp_path):
    pipeline = {"steps": 14, "groups_per_step": 4, "group_size": 8, **pipeline}
    config = make_config(tmp_path, "sevens", pipeline=pipeline, sampler={"slots": 8}, eval={"num_tasks": 4, "every": 5})
    summary = run(config, make_sampler)
    assert summary["ended"] == "finished" and summary["steps"] == 14
    lines = metrics_of(config)
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert max(line["lag/max"] for line in lines) <= (1 if pipeline["mode"] == "periodic" else 2)
    assert max(line["lag/max"] for line in lines) >= 1 and sum(line["groups/dropped_stale"] for line in lines) == 0
    assert np.mean(rewards[-3:]) > 2 * np.mean(rewards[:3])
    evaluated = [
        line["step"] for line in jsonl.read(Path(config.out) / config.name / "metrics.jsonl") if "heldout/reward" in line
    ]
    assert sorted(evaluated) == [0, 5, 10, 14]
    if pipeline["mode"] == "partial":
        assert sum(line["groups/cut"] for line in lines) > 0
        assert any(line.get("resume/continued_tokens", 0) > 0 for line in lines)
        assert any(line.get("extra/left_out", 0) > 0 for line in lines)
        assert all(line["episodes/finished"] == 8 * line["groups/finished"] for line in lines)


def test_failing_and_hanging_environments_cost_their_episodes_only(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "BLOCKED_SECONDS", 1.0)
    pipeline = {"steps": 2, "groups_per_step": 16, "group_size": 2}
    config = make_config(tmp_path, "troubled", pipeline=pipeline, env={"timeout_seconds": 2.0, "workers": 2}, seed=1)
    assert run(config, make_sampler)["ended"] == "finished"
    total = {
        kind: sum(line[f"episodes/failed.{kind}"] for line in metrics_of(config)) for kind in ("raised", "timeout", "hung")
    }
    from jaxrl.pipeline.data_order import task_of

    seen = [task_of(i, 64, seed=1) for i in range(32)]
    assert total["raised"] == 2 * sum(i % 4 == 1 for i in seen) > 0
    assert total["timeout"] == 2 * sum(i % 8 == 2 for i in seen) > 0
    assert total["hung"] == 2 * (3 in seen)
    assert all(line["groups/failed"] > 0 for line in metrics_of(config))


def test_when_every_group_of_a_step_fails_the_run_ends_with_the_cause(tmp_path):
    config = make_config(tmp_path, "broken")
    with pytest.raises(RunError, match="every episode of the last 4 groups failed.*no task works"):
        run(config, make_sampler)


def test_a_loss_that_is_not_finite_stops_the_run_with_its_row_and_its_weights(tmp_path):
    config = make_config(tmp_path, "overflowing", algorithm={"scale_by_std": False})
    with pytest.raises(RunError, match="step 1 .*not finite.*nan_step_1.npz"):
        run(config, make_sampler)
    row = np.load(tmp_path / "run" / "nan_step_1.npz")
    assert row["tokens"].shape[1] == 64 and np.abs(row["terms.advantage"]).max() > 1e29
    parts = build(config)
    first = jax.tree.leaves(initial_variables(parts))
    saved = weights_of(config, step=0)
    assert all(any(np.array_equal(x, y) for y in saved.values()) for x in first)


def test_adapters_on_a_checkpoint_resume_without_saving_the_base(tmp_path):
    parts = build(make_config(tmp_path, "sevens"))
    save_checkpoint(
        tmp_path / "base", initial_variables(parts)["params"], parts.architecture, "float32", parts.tokenizer.folder
    )
    model = {"checkpoint": str(tmp_path / "base"), "lora": {"rank": 2}, "architecture": None, "tokenizer": None}
    config = make_config(tmp_path, "sevens", model=model, pipeline={"steps": 2})
    run(config, make_sampler)
    run(config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"steps": 3})}), make_sampler)
    straight = config.model_copy(update={"name": "straight", "pipeline": config.pipeline.model_copy(update={"steps": 3})})
    run(straight, make_sampler)
    assert exact(metrics_of(config)) == exact(metrics_of(straight))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 1, False, read_only=True)
    assert "frozen" not in checkpoints.fields(3)
    checkpoints.close()


def test_bad_combinations_are_told_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="`eval.num_tasks`"):
        run(make_config(tmp_path, "sevens", eval={"num_tasks": 100}), make_sampler)
    with pytest.raises(ConfigError, match="`packing.rows`"):
        run(make_config(tmp_path, "sevens", packing={"rows": 3}), make_sampler)
    with pytest.raises(ConfigError, match="`model.tokenizer`.*vocab_size is 9"):
        model = make_config(tmp_path, "sevens").model.model_dump(exclude_none=True)
        model["architecture"]["vocab_size"] = 9
        run(make_config(tmp_path, "sevens", model=model), make_sampler)
