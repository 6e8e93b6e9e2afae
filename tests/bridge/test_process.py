"""Servers as child processes: how they start, fail, stop, and that nothing of them stays. The server is a stand-in of a few lines."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge.client.process import Launch, start
from bridge.client.segments import run_id, sweep
from jaxrl.rollout.protocol import SamplerError

STAND_IN = """
import http.server, multiprocessing.shared_memory, os, pathlib, signal, subprocess, sys, time
how, pids = sys.argv[1], pathlib.Path(sys.argv[2])
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        well = how != "sick" and self.headers["Authorization"] == "Bearer " + os.environ["JAXRL_BRIDGE_KEY"]
        self.send_response(200 if well else 500)
        self.end_headers()
    def log_message(self, *args): pass
if how == "fails":
    print("(EngineCore pid=7) ERROR 12-01 10:00:00 [core.py:9] ValueError: head size 16 is not supported")
    print("RuntimeError: Engine core initialization failed. See root cause above.", os.environ["JAXRL_BRIDGE_KEY"], flush=True)
    sys.exit(3)
detached = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (pids.with_suffix(".asked").touch(), sys.exit(0)))
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
pids.with_suffix(".memory").write_text(memory.name)
pids.write_text(f"{os.getpid()} {detached.pid}")
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def launch(folder: Path, how: str, start_seconds: float = 20.0) -> Launch:
    (folder / "stand_in.py").write_text(STAND_IN)
    command = (sys.executable, str(folder / "stand_in.py"), how, str(folder / "pids"))
    return Launch(command, dict(os.environ), folder / "neutral", folder / "vllm-0.log", "a-key-of-no-one", start_seconds)


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def shared_memory(folder: Path) -> Path:
    """What only the server's resource tracker can remove when the server is killed."""
    return Path("/dev/shm") / (folder / "pids.memory").read_text()


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_gone(started: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(exists, started)):
        assert time.monotonic() < deadline, [pid for pid in started if exists(pid)]
        time.sleep(0.02)


def test_a_server_that_fails_to_start_is_quoted_without_its_key(tmp_path):
    (tmp_path / "vllm-0.log").write_text("of an earlier start: KeyError: old\n")
    with pytest.raises(SamplerError) as caught:
        asyncio.run(start(launch(tmp_path, "fails")))
    text = str(caught.value)
    assert "did not start: ValueError: head size 16 is not supported" in text  # the cause, not the last error
    assert "Engine core initialization failed" in text and str(tmp_path / "vllm-0.log") in text
    assert "a-key-of-no-one" not in text and "earlier start" not in text


def test_a_server_that_never_answers_is_given_up(tmp_path):
    with pytest.raises(SamplerError, match="did not answer within sampler.start_seconds = 1.5"):
        asyncio.run(start(launch(tmp_path, "sick", start_seconds=1.5)))
    wait_gone(pids(tmp_path), 1.0)


@pytest.mark.parametrize("how", ["well", "stubborn"])
def test_stop_asks_then_kills_and_takes_what_detached_itself(how, tmp_path, monkeypatch):
    monkeypatch.setattr("bridge.client.process.GRACE_SECONDS", 1.0)

    async def go():
        server = await start(launch(tmp_path, how))
        assert server.alive and all(map(exists, pids(tmp_path)))
        await server.stop()
        assert not server.alive

    asyncio.run(go())
    wait_gone(pids(tmp_path), 1.0)
    assert (tmp_path / "pids.asked").exists() == (how == "well")
    assert not shared_memory(tmp_path).exists()


def test_the_death_of_a_server_is_told_and_it_starts_again(tmp_path):
    async def go():
        first = await start(launch(tmp_path, "well"))
        started = pids(tmp_path)
        os.kill(started[0], signal.SIGKILL)
        assert "by signal 9" in str(await asyncio.wait_for(first.ended(), 5))
        wait_gone(started, 2.0)
        second = await start(launch(tmp_path, "well"))
        assert second.alive and second.url != first.url
        await asyncio.gather(first.kill(), second.kill())
        assert not second.alive

    asyncio.run(go())


def test_nothing_survives_a_trainer_that_is_killed_and_the_next_start_waits_for_that(tmp_path):
    trainer = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_process import launch, start
import bridge.client.process
bridge.client.process.GRACE_SECONDS = 0.5
async def go():
    await start(launch(Path({str(tmp_path)!r}), "stubborn"))
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(go())
"""
    process = subprocess.Popen([sys.executable, "-c", trainer], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    started = pids(tmp_path)
    process.kill()
    process.wait()
    memory = shared_memory(tmp_path)
    assert all(map(exists, started)) and memory.exists()  # they ignore SIGTERM

    async def again():
        server = await start(launch(tmp_path, "well"))
        assert not any(map(exists, started)) and not memory.exists()
        await server.stop()

    asyncio.run(again())


def test_segments_of_dead_processes_and_of_this_run_are_swept(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    own, other = run_id(tmp_path / "run"), run_id(tmp_path / "other")
    run, _, me = own.partition(".")
    stays = [f"jaxrl-{own}-0", f"jaxrl-{other}-0", f"jaxrl-gateway-{me}-x", "psm_1", "jaxrl-notes"]
    goes = [f"jaxrl-{run}.1-0", f"jaxrl-{other.partition('.')[0]}.{gone.pid}-0", f"jaxrl-gateway-{gone.pid}-x"]
    for name in (*stays, *goes):
        (tmp_path / name).touch()
    sweep(own, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(stays)
