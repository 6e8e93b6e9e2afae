"""Runs over two processes: what they train is what one process trains; whoever is killed, the other ends with an error, and
the same command goes on. Prints what it found; fails on the first lie.

python tests/proofs/proof_processes.py [CASE ...]
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "resume"))

from killing import ROOT, make_run, metrics, saved_steps, timeless  # noqa: E402

MESH = ("--mesh.fsdp", "2", "--mesh.context", "2", "--mesh.tensor", "2")
LIMIT = 300.0  # seconds after which a process counts as hanging
TRACE = {"prompt": "1+2=", "completion": "37"}
ADAPTERS = ("--model.lora.rank", "2", "--model.lora.targets", '["q_proj"]')


def main() -> None:
    base = Path(tempfile.mkdtemp(prefix="processes-"))
    cases = {
        "sync": lambda folder: same_as_one(folder, 5),
        "warm start": lambda folder: same_as_one(folder, 2, "--sft.data", str(base / "traces.jsonl"), "--sft.steps", "3"),
        "adapters": lambda folder: same_as_one(folder, 2, *ADAPTERS),
        "async": asynchronous,
        "resumed": resumed,
        "follower killed": lambda folder: killed(folder, 1, signal.SIGKILL),
        "process 0 killed": lambda folder: killed(folder, 0, signal.SIGKILL),
        "follower frozen": lambda folder: killed(folder, 1, signal.SIGSTOP),
        "another config": another_config,
    }
    (base / "traces.jsonl").write_text((json.dumps(TRACE) + "\n") * 8)
    for name in sys.argv[1:] or cases:
        began = time.monotonic()
        found = cases[name](make_run(base / name.replace(" ", "-")))
        print(json.dumps({"proof": name} | found | {"seconds": round(time.monotonic() - began)}), flush=True)
    shutil.rmtree(base)


def start(folder: Path, count: int, *options: str, others: tuple[str, ...] = ()) -> list[subprocess.Popen]:
    """The command in `count` processes with eight devices together; process 1 gets the options `others` too. Output: FOLDER/I.log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for i in range(count):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(8 // count),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-processes"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        if count > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(i),
            }
        command = [sys.executable, "-m", "jaxrl.train", str(folder / "config.toml"), "--packing.rows", "4", *MESH, *options]
        with open(folder / f"{i}.log", "wb") as log:
            processes.append(
                subprocess.Popen([*command, *(others if i else ())], cwd=ROOT, env=environment, stdout=log, stderr=log)
            )
    return processes


def ends(folder: Path, processes: list[subprocess.Popen]) -> list[int]:
    """Their exit codes; fails if one does not end."""
    try:
        return [process.wait(LIMIT) for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still running after {LIMIT:g} s\n{tail(folder, 0)}\n{tail(folder, 1)}") from None
    finally:
        for process in processes:
            process.kill()


def tail(folder: Path, process: int) -> str:
    file = folder / f"{process}.log"
    return file.read_text()[-3000:] if file.exists() else ""


def trained_to(folder: Path, step: int, processes: list[subprocess.Popen]) -> None:
    until = time.monotonic() + LIMIT
    while not any(line["step"] >= step and "loss" in line for line in metrics(folder)):
        assert time.monotonic() < until and all(p.poll() is None for p in processes), tail(folder, 0) + tail(folder, 1)
        time.sleep(0.05)


def finish(folder: Path, count: int, steps: int, *options: str) -> None:
    codes = ends(folder, start(folder, count, "--pipeline.steps", str(steps), *options))
    assert codes == [0] * count, tail(folder, 0) + tail(folder, 1)


def difference(a: Path, b: Path) -> float:
    """The largest relative difference of a metric, parity and load aside: those are noise."""
    worst = 0.0
    for x, y in zip(timeless(metrics(a)), timeless(metrics(b)), strict=True):
        assert x.keys() == y.keys(), x.keys() ^ y.keys()
        for name in (n for n in x if not n.startswith(("parity/", "load/"))):
            worst = max(worst, abs(x[name] - y[name]) / max(abs(y[name]), 1e-3))
    assert worst < 1e-3, worst
    return worst


def same_as_one(folder: Path, steps: int, *options: str) -> dict:
    one = make_run(folder.with_name(folder.name + "-one"))
    finish(folder, 2, steps, *options)
    finish(one, 1, steps, *options)
    return {"steps": steps, "largest_difference": difference(folder, one)}


def asynchronous(folder: Path) -> dict:
    """Off the policy: parity is of the tokens of the current version alone."""
    finish(folder, 2, 12, "--pipeline.mode", "async", "--eval.every", "0")
    lines = [line for line in metrics(folder) if "loss" in line]
    parity = [line["parity/logp_mean_abs"] for line in lines if "parity/logp_mean_abs" in line]
    assert len(lines) == 12 and max(parity) < 1e-5
    return {"steps": 12, "max_lag": max(line["lag/max"] for line in lines), "parity": max(parity)}


def resumed(folder: Path) -> dict:
    """Both killed at once, then resumed by two, against a run that nobody killed."""
    processes = start(folder, 2, "--pipeline.steps", "6")
    trained_to(folder, 4, processes)
    for process in processes:
        process.kill()
        process.wait()
    finish(folder, 2, 6)
    whole = make_run(folder.with_name("resumed-whole"))
    finish(whole, 2, 6)
    return {"largest_difference": difference(folder, whole)}


def killed(folder: Path, victim: int, how: signal.Signals) -> dict:
    """The other process ends with an error within the limit, and the same command goes on."""
    processes = start(folder, 2, "--pipeline.steps", "500", "--eval.every", "0")
    trained_to(folder, 4, processes)
    began = time.monotonic()
    processes[victim].send_signal(how)
    code = ends(folder, [processes[1 - victim]])[0]
    seconds = time.monotonic() - began
    processes[victim].kill()
    processes[victim].wait()
    assert code != 0
    said = [line for line in tail(folder, 1 - victim).splitlines() if line.startswith(("error:", "F"))]
    logged = max(line["step"] for line in metrics(folder))
    saved = saved_steps(folder)
    assert saved
    processes = start(folder, 2, "--pipeline.steps", "500", "--eval.every", "0")
    trained_to(folder, logged + 1, processes)
    processes[0].send_signal(signal.SIGTERM)
    assert ends(folder, processes) == [0, 0]
    return {"survivor_ended_after": round(seconds, 1), "exit": code, "said": said[-1][:200], "saved": saved}


def another_config(folder: Path) -> dict:
    codes = ends(folder, start(folder, 2, others=("--optimizer.lr", "1.0")))
    assert all(codes) and "optimizer.lr" in tail(folder, 0) and "optimizer.lr" in tail(folder, 1)
    return {"exit": codes}


if __name__ == "__main__":
    main()
