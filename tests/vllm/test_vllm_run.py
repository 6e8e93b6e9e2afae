"""Whole runs with a vLLM server, by the command a user types: in step, with adapters, and in flight through a kill -9."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_fleet import needs_vllm

from bridge.client.segments import run_id

ROOT = Path(__file__).parents[2]
PARITY = 2e-5
LIMIT = 280.0  # seconds of a run, the start of its server included
pytestmark = needs_vllm

CONFIG = """
out = "{out}"
seed = 3
sampler = {{ kind = "vllm", max_length = 24, slots = 16 }}
sampling = {{ max_tokens = 6 }}
pipeline = {{ groups_per_step = 4, group_size = 4 }}
packing = {{ row_length = 64, rows = 8 }}
optimizer = {{ lr = 1e-2 }}
log = {{ tensorboard = false, live = false }}
env = "{tasks}:sevens"

[model]
tokenizer = "configs/quickstart"
remat = "none"

[model.architecture]
model_type = "llama"
vocab_size = 16
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 128
tie_word_embeddings = true
eos_token_id = 1
"""


def command(folder: Path, *options: str) -> list[str]:
    file = folder / "run.toml"
    file.write_text(CONFIG.format(out=folder, tasks=ROOT / "tests" / "pipeline" / "tiny_tasks.py"))
    return [sys.executable, "-m", "jaxrl.train", str(file), *options]


def lines(folder: Path) -> list[dict]:
    """Of the optimizer steps so far."""
    file = folder / "run" / "metrics.jsonl"
    whole = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [step for step in (json.loads(line) for line in whole if line.endswith("\n")) if "loss" in step]


def processes(folder: Path) -> list[int]:
    """Everything that holds the server's log open."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/fd/1") == str(folder / "run" / "vllm-0.log"):
                found.append(int(pid))
        except OSError:
            continue
    return found


def segments(folder: Path) -> list[Path]:
    """Shared memory of the run, whichever of its processes made it."""
    return list(Path("/dev/shm").glob(f"jaxrl-{run_id(folder / 'run').partition('.')[0]}.*"))


@pytest.mark.whole
def test_a_run_with_adapters_is_on_policy_and_leaves_nothing(tmp_path):
    run = subprocess.run(
        command(tmp_path, "--pipeline.steps", "3", "--model.lora.rank", "4"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["ended"] == "finished"
    steps = lines(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:  # from the second on, only with the adapter that was published
        assert step["lag/max"] == 0 and step["parity/logp_max"] <= PARITY and step["episodes/failed"] == 0
    assert not processes(tmp_path) and not segments(tmp_path)


def test_a_run_that_is_killed_leaves_no_server_and_goes_on(tmp_path):
    options = ("--pipeline.mode", "inflight", "--pipeline.max_lag", "2", "--pipeline.steps", "4", "--checkpoint.every", "1")
    first = subprocess.Popen(command(tmp_path, *options), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + LIMIT
        while len(lines(tmp_path)) < 2:
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.1)
        assert len(processes(tmp_path)) > 1 and segments(tmp_path)
    finally:
        first.kill()
        first.wait()
    deadline = time.monotonic() + 15
    while processes(tmp_path):
        assert time.monotonic() < deadline, processes(tmp_path)
        time.sleep(0.1)

    second = subprocess.run(command(tmp_path, *options), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert second.returncode == 0, second.stderr
    steps = lines(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert max(step["lag/max"] for step in steps) <= 2
    assert max(step.get("parity/logp_max", 0.0) for step in steps) <= PARITY
    assert not processes(tmp_path) and not segments(tmp_path)


@pytest.mark.whole
def test_a_server_that_cannot_start_is_quoted_and_the_run_says_how_to_go_on(tmp_path):
    run = subprocess.run(
        command(tmp_path, "--sampler.flags", '["--no-such-flag"]'), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    assert run.returncode == 1 and "--no-such-flag" in run.stderr and "the same command continues" in run.stderr
    assert not processes(tmp_path)
