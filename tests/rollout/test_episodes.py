"""Episodes on real worker processes: what goes wrong costs the episode it went wrong in, and nothing is sampled twice."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scripted import ScriptedSampler, save_tokenizer

from jaxrl.config import ConfigError, EnvConfig
from jaxrl.data import Source
from jaxrl.rollout import workers
from jaxrl.rollout.chat import LengthLimit
from jaxrl.rollout.episodes import EpisodeRunner, call_seed, failure_kind
from jaxrl.rollout.protocol import SamplerError, SamplingParams
from jaxrl.rollout.tokenizer import load_tokenizer
from jaxrl.rollout.wire import Pulse
from jaxrl.rollout.worker import Job, Worker

HERE = Path(__file__).parent
ENVIRONMENT = f"{HERE}/user_files/misbehave.py:rollout"
EOS = 2
PARAMS = SamplingParams(max_tokens=20, temperature=0.7, stop_strings=("#",))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), "smollm2")


def script(prompt_ids, params):
    """Three ids that depend on the prompt and the seed, and the end."""
    return [*(int(i) for i in np.random.default_rng([params.seed, *prompt_ids]).integers(70, 90, 3)), EOS], "stop"


def with_runner(sampler, tokenizer, scenario, *, limit=200, **env):
    """Runs `scenario(runner)` with workers that are gone afterwards."""

    async def main():
        config = EnvConfig(name=ENVIRONMENT, **env)
        runner = EpisodeRunner(
            config,
            sampler,
            factory="",
            tokenizer=tokenizer,
            eos_ids=(EOS,),
            limit=LengthLimit(limit, "packing.row_length"),
            seed=5,
        )
        await runner.start()
        try:
            return await scenario(runner)
        finally:
            await runner.close()

    return asyncio.run(main())


def episodes(runner, tasks, **kwargs):
    return asyncio.gather(*(runner.run(task, PARAMS, task_index=7, group=3, index=i, **kwargs) for i, task in enumerate(tasks)))


def test_what_an_episode_becomes(tokenizer):
    sampler = ScriptedSampler(script)

    async def scenario(runner):
        tasks = [{"do": "answer", "turns": 3}, {"do": "jax"}, {"do": "forks"}, {"do": "answer", "max_tokens": 2}]
        done = await episodes(runner, tasks)
        again = await episodes(runner, reversed(tasks))
        return done, again

    (talk, jax, forks, short), again = with_runner(sampler, tokenizer, scenario, concurrency=2)
    assert talk.error is None and (talk.task_index, talk.index, talk.reward) == (7, 0, talk.metrics["letters"])
    (t,) = talk.trajectories
    assert t.temperature == 0.7 and t.turn[t.trainable].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (t.ids[t.trainable][3::4] == EOS).all() and (t.source[t.trainable] == Source.PLAIN).all()
    assert (
        (t.version[~t.trainable] == -1).all()
        and (t.turn[~t.trainable] == -1).all()
        and (t.policy_logp[~t.trainable] == 0).all()
    )
    seed = call_seed(5, "train", 3, 0, ((), 0))
    expected = -np.random.default_rng(seed).random(4, np.float32)
    np.testing.assert_array_equal(t.policy_logp[t.turn == 0], expected)
    np.testing.assert_array_equal(t.behaviour_logp[t.turn == 0], expected - 1)
    assert talk.metrics["chat/calls"] == 3 and [m["role"] for m in talk.messages] == ["text", "completion"] * 3

    assert jax.reward == 0.0, "a worker imported jax"
    assert [int(x.trainable.sum()) for x in forks.trajectories] == [4, 4, 4]
    assert [x.turn[x.trainable][0] for x in forks.trajectories] == [0, 1, 2]  # by chat, not by arrival
    assert all((x.version >= 0).sum() == 8 for x in forks.trajectories[1:])  # the shared turn keeps what it was sampled with
    assert short.error is None

    first = sampler.params[0]
    assert first.stop_token_ids == (EOS,) and first.stop_strings == ("#",) and first.temperature == 0.7
    assert 2 in {p.max_tokens for p in sampler.params} and sampler.most_running <= 2 * 2
    # Index, not order of arrival, decides what an episode draws.
    for a, b in zip([short, forks, jax, talk], again, strict=True):
        same = a.index == b.index
        assert [
            x.policy_logp.tolist() == y.policy_logp.tolist() for x, y in zip(a.trajectories, b.trajectories, strict=True)
        ] == [same] * len(a.trajectories)


class HeldSampler(ScriptedSampler):
    """Answers prompts that end with the letter w only after `go`."""

    def __init__(self, held_id: int):
        super().__init__(script)
        self.held_id = held_id
        self.go = asyncio.Event()

    async def generate(self, prompt_ids, params, priority=0):
        completion = await super().generate(prompt_ids, params, priority)
        if prompt_ids[-1] == self.held_id:
            await self.go.wait()
        return completion


def test_failures_cost_their_episode_only(tokenizer, tmp_path):
    sampler = HeldSampler(load_tokenizer(tokenizer).encode("w", start=True)[0])
    mark = tmp_path / "mark"
    innocent = {"do": "answer", "turns": 4, "then": "w", "mark": str(mark)}
    bad = {
        "raise": "raised",
        "nan": "raised",
        "text": "raised",
        "exit": "raised",
        "stubborn": "timeout",
        "wait": "timeout",
        "spin in a task": "hung",
        "regex": "hung",
        "die": "raised",
    }

    async def scenario(runner):
        waiting = asyncio.ensure_future(episodes(runner, [innocent] * 3))
        while len(sampler.prompts) < 3 * 5:
            await asyncio.sleep(0.05)
        failed = await asyncio.gather(
            *(runner.run({"do": do}, PARAMS, task_index=0, group=4, index=i) for i, do in enumerate(bad))
        )
        too_long = await runner.run({"do": "answer", "text": "x" * 300}, PARAMS, task_index=0, group=4, index=99)
        sampler.go.set()
        return await waiting, failed, too_long, runner.workers.num_killed

    good, failed, too_long, killed = with_runner(sampler, tokenizer, scenario, timeout_seconds=1.5)
    assert {do: failure_kind(e) for do, e in zip(bad, failed, strict=True)} == bad, [e.error for e in failed]
    assert all(e.trajectories == () and e.reward == 0.0 for e in failed)
    by_name = dict(zip(bad, failed, strict=True))
    assert "KeyError: 'no such tool'" in by_name["raise"].error and "misbehave.py" in by_name["raise"].error
    assert "finite" in by_name["nan"].error and "Outcome" in by_name["text"].error and "SystemExit" in by_name["exit"].error
    assert "worker.py" not in by_name["nan"].error + by_name["text"].error  # nothing of theirs is on that line
    assert "exit status 3" in by_name["die"].error and "env.timeout_seconds" in by_name["wait"].error
    assert failure_kind(too_long) == "too_long" and "packing.row_length = 200" in too_long.error

    assert killed == 3
    assert len(set(mark.read_text().split())) >= 2, "the innocent never started again: the test shows nothing"
    assert [e.error for e in good] == [None] * 3 and all(e.metrics["chat/calls"] == 5 for e in good)
    # What was answered is replayed and what was being generated goes on: five prompts each of the innocent, one of the others.
    sampled = [tuple(prompt) + (params.seed,) for prompt, params in zip(sampler.prompts, sampler.params, strict=True)]
    assert len(sampled) == len(set(sampled)) == 3 * 5 + len(bad)


def test_a_run_of_blocking_episodes_alone_ends(tokenizer):
    """Of so many tasks without another episode in between; so many of one task only if nothing else ever ended."""

    async def charge(numbers, ended):
        settings = workers.WorkerSettings(EnvConfig(name="e"), "", 0, tokenizer, (EOS,), LengthLimit(9, "k"))
        pool = workers.Workers(settings)
        pool._num_ended = ended
        for number in numbers:
            job = workers.Job(0, {"n": number}, 1, None, asyncio.get_running_loop().create_future())
            pool._charge(job, "hung", "blocked its worker for 30 s")
            assert (await job.result)["kind"] == "hung"
        return pool._broken

    limit = workers.BLOCKED_TASKS
    for numbers, ended, breaks in [
        (range(limit), 5, True),
        (range(limit - 1), 5, False),
        ([0] * 50, 5, False),
        ([0] * workers.BLOCKED_FROM_THE_START, 0, True),
        ([0] * (workers.BLOCKED_FROM_THE_START - 1), 0, False),
    ]:
        broken = asyncio.run(charge(numbers, ended))
        assert isinstance(broken, ConfigError) == breaks
        assert not breaks or "blocked its worker for 30 s" in str(broken) and broken.key == "env.name"


def test_an_episodes_clock_stands_while_others_hold_the_cpu():
    descriptor = Pulse.create()[1]
    settings = {"env": {"timeout_seconds": 10.0}, "limit": {"tokens": 9, "key": "k"}, "eos_ids": [2]}
    worker = Worker(None, Pulse(descriptor), None, None, settings)
    busy, idle, asking = (worker.jobs.setdefault(i, Job(i)) for i in range(3))
    asking.answers[((), 0)] = None
    for _ in range(2):
        busy.on_cpu_ns, idle.on_cpu_ns, asking.on_cpu_ns = 3_000_000_000, 1_000_000_000, 0
        worker.tick(5.0)
    assert (busy.used_seconds, idle.used_seconds, asking.used_seconds) == (8.0, 4.0, 0.0)


def test_sampler_errors_and_cancellation(tokenizer):
    def fail_on_long(prompt_ids, params):
        if len(prompt_ids) > 50:
            raise SamplerError("the server is gone: start it")
        return [70], "length"

    sampler = ScriptedSampler(fail_on_long, seconds=0.6)

    async def scenario(runner):
        with pytest.raises(SamplerError, match="start it"):
            await runner.run({"do": "answer", "text": "x" * 60}, PARAMS, task_index=0, group=0, index=0)
        running = asyncio.ensure_future(runner.run({"do": "answer"}, PARAMS, task_index=0, group=0, index=0))
        while not sampler.running:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0.01)
        assert sampler.running == 0
        assert not any(p.jobs for p in runner.workers._processes)
        # The policy takes longer than the timeout, which is for the environment's own time.
        episode = await runner.run({"do": "answer", "turns": 3}, PARAMS, task_index=0, group=0, index=1)
        assert episode.error is None and episode.metrics["chat/truncated"] == 3
        with pytest.raises(Exception, match="not JSON"):
            await runner.run({"do": {1, 2}}, PARAMS, task_index=0, group=0, index=2)

    with_runner(sampler, tokenizer, scenario, timeout_seconds=1.2)


PARENT = """
import asyncio, sys
sys.path[:0] = [{tests!r}, {root!r}]
from scripted import ScriptedSampler
from jaxrl.config import EnvConfig
from jaxrl.rollout.chat import LengthLimit
from jaxrl.rollout.episodes import EpisodeRunner
from jaxrl.rollout.protocol import SamplingParams

async def main():
    runner = EpisodeRunner(EnvConfig(name={environment!r}, workers=2), ScriptedSampler(lambda p, s: ([70], "length")), factory="",
                           tokenizer={tokenizer!r}, eos_ids=(2,), limit=LengthLimit(100, "packing.row_length"), seed=0)
    await runner.start()
    print(*(p.process.pid for p in runner.workers._processes), flush=True)
    # A worker that cannot run a line of Python and has started tools, and one that idles.
    await runner.run({{"do": "tools", "mark": {mark!r}}}, SamplingParams(4), task_index=0, group=0, index=0)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tools that detach themselves are lost elsewhere")
def test_killing_the_trainer_leaves_no_worker_and_no_tool(tokenizer, tmp_path):
    mark = tmp_path / "mark"
    code = PARENT.format(
        tests=str(HERE), root=str(HERE.parent.parent), environment=ENVIRONMENT, tokenizer=str(tokenizer), mark=str(mark)
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    supervisors = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(supervisors) == 2
    wait_until(lambda: mark.exists() and len(mark.read_text().split()) == 4)
    started = [*supervisors, *map(int, mark.read_text().split())]  # the worker and three tools
    assert all(alive(pid) for pid in started)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(alive(pid) for pid in started))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
