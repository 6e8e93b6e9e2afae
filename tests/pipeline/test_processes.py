"""A run over two processes of four devices, stopped there and resumed on one of eight, against the same run on one process.
More kinds of runs, and kills: tests/proofs/proof_processes.py."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_run import exact, make_config, metrics_of

from jaxrl.config import Config
from jaxrl.pipeline.run import run
from jaxrl.pipeline.run_folder import to_toml
from jaxrl.samplers import make_sampler

ROOT = Path(__file__).parents[2]
SECONDS = 200  # of one start, on two busy cores


def start(config: Config, folder: Path) -> list[subprocess.Popen]:
    """The command in two processes, as on two hosts. Their output goes to FOLDER/0.log and FOLDER/1.log."""
    file = folder / "config.toml"
    file.write_text(to_toml(config.model_dump(exclude_none=True)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for i in range(2):
        environment = os.environ | {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(i),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "4",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        }
        with open(folder / f"{i}.log", "wb") as log:
            command = [sys.executable, "-m", "jaxrl.train", str(file)]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    return processes


def wait_for(processes: list[subprocess.Popen], folder: Path) -> str:
    """What process 0 printed last. Fails unless both end well."""
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = [(folder / f"{i}.log").read_text() for i in range(2)]
    assert codes == [0, 0], "\n".join(log[-3000:] for log in logs)
    assert "step 1/" not in logs[1] and '"ended"' not in logs[1]
    return logs[0].splitlines()[-1]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Config:
    pipeline = {"steps": 3, "groups_per_step": 4, "group_size": 4}
    return make_config(
        tmp_path_factory.mktemp("processes"),
        "two_turns",
        pipeline=pipeline,
        mesh={"fsdp": 8},
        checkpoint={"every": 2},
    )


def test_two_processes_are_one(base, tmp_path):
    two = base.model_copy(update={"out": str(tmp_path)})
    processes = start(two, tmp_path)
    file = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + SECONDS
    while not file.exists() or not file.read_bytes().count(b"\n"):
        assert time.monotonic() < until and processes[0].poll() is None, (tmp_path / "0.log").read_text()[-3000:]
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    summary = json.loads(wait_for(processes, tmp_path))
    assert summary["ended"] == "stopped by SIGTERM on process 1" and 1 <= summary["steps"] < 3
    assert run(two, make_sampler)["steps"] == 3  # here, on eight devices of one process
    run(base, make_sampler)
    lines, expected = exact(metrics_of(two)), exact(metrics_of(base))
    assert [line["step"] for line in lines] == [1, 2, 3] == [line["step"] for line in expected]
    for line, wanted in zip(lines, expected, strict=True):
        for name in (line.keys() | wanted.keys()) - {name for name in wanted if name.startswith(("parity/", "load/"))}:
            np.testing.assert_allclose(line[name], wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)
        assert line["parity/logp_mean_abs"] < 1e-5
