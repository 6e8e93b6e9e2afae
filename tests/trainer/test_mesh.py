"""Layouts of 8 devices against one device, in one process and in two. Every layout: tests/proofs/proof_layouts.py."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from layouts import AXES, CONFIG, compare, make_batches, step_on

HERE = Path(__file__).parent
# Every axis at 2, 4 and 8.
LAYOUTS = [(8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8), (4, 2, 1, 1), (1, 1, 2, 4), (1, 4, 1, 2), (2, 1, 4, 1)]


@pytest.fixture(scope="module")
def reference():
    return step_on({"data": 1}, make_batches())


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "x".join(map(str, sizes)))
def test_layout_equals_one_device(reference, sizes):
    gradient_error, adam_error = compare(step_on(dict(zip(AXES, sizes, strict=True)), make_batches()), reference)
    print(f"{sizes}: gradients {gradient_error:.1e}, after Adam {adam_error:.1e} lr")
    assert gradient_error <= 1e-5 and adam_error <= 1e-2


def test_ring_under_remat_equals_one_device(reference):
    """A TPU's transport, its custom gradient inside recomputed layers."""
    ring = CONFIG.attention.model_copy(update={"transport": "ring"})
    config = CONFIG.model_copy(update={"attention": ring, "model": CONFIG.model.model_copy(update={"remat": "full"})})
    gradient_error, adam_error = compare(step_on({"fsdp": 2, "context": 4}, make_batches(), config), reference)
    assert gradient_error <= 1e-5 and adam_error <= 1e-2


def test_two_processes_equal_one_device(reference, tmp_path):
    """Process 1 has no rows but those it is sent, and its signal ends the run of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(tmp_path / "result"), json.dumps({"fsdp": 2, "context": 2, "tensor": 2})]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent)])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "one_of_two_processes.py"), str(port), str(i), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        outputs = [p.communicate(timeout=200) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], outputs
    events = [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]
    assert events[0] == events[1] and events[0][:2] == [["TRAIN 7 2", "CHECKPOINT 7 0", "PUBLISH 7 0"], "STOP 7 0"]
    result, published, heard = pickle.loads((tmp_path / "result").read_bytes())
    assert heard == ["SIGTERM on process 1"]
    jax.tree.map(np.testing.assert_array_equal, published, result["after"])
    gradient_error, adam_error = compare(result, reference)
    assert gradient_error <= 1e-5 and adam_error <= 1e-2
