"""Weights by NCCL into a real server and into its workers' own code, over the stand-in for the library: what was sent generates; a
trainer that stays away, stops or leaves is told from within the time, and the next publish is met in a new group."""

import asyncio
import base64
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from test_server_publish import PROMPT, generate
from vllm_fleet import ARCHITECTURE, PYTHON, TOLERANCE, log_probs, needs_vllm, sampler_config, servers, weights

from bridge.client import nccl, process
from bridge.client.errors import ServerError
from bridge.client.publish import publish
from bridge.client.transports import nccl as transports_nccl
from bridge.client.transports.nccl import Nccl
from bridge.client.weights import TensorSpec, Unit, Weights
from jaxrl.rollout.protocol import SamplerError

pytestmark = [needs_vllm, pytest.mark.whole]
ROOT = Path(__file__).parents[2]
LIMIT = 240.0  # seconds, the start of the server included
SERVER_SECONDS = 4.0

# A worker's sources as a member: prints what it reads of each bucket, until one fails.
WORKER = """
import base64, json, sys
import torch
from jaxrl_bridge.errors import BridgeError
from jaxrl_bridge.sources import Sources
unique_id, world_size, rank = base64.b64decode(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sources = Sources(torch.device("cpu"))
specs = [{"name": "a", "shape": [3], "dtype": "F32"}, {"name": "b", "shape": [2, 4], "dtype": "BF16"}]
bucket = [{"name": "a", "offset": 0}, {"name": "b", "offset": 16}]
try:
    sources.join(unique_id, world_size, rank)
    sources.join(unique_id, world_size, rank)  # of the next publish: it stays
    for source in sys.stdin:
        a, b = sources.tensors("nccl", json.loads(source), specs, bucket)
        print(json.dumps([a.tolist(), b.float().tolist()]), flush=True)
except BridgeError as error:
    print(json.dumps([error.kind, str(error)]), flush=True)
    print(json.dumps(sources.nccl is None or sources.nccl.comm is None), flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so"
    source = ROOT / "tests" / "bridge" / "nccl_stand_in.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-pthread", "-o", path, source], check=True)
    return str(path)


@pytest.fixture(autouse=True)
def on_host(library, monkeypatch):
    monkeypatch.setattr(nccl, "_path", lambda: library)
    memory = SimpleNamespace(select_device=lambda device: None, new_stream=lambda: 0, is_done=lambda stream: True)
    monkeypatch.setattr(transports_nccl, "cuda", memory)
    nccl.library.cache_clear()
    yield
    nccl.library.cache_clear()


@pytest.fixture
def workers(library):
    """workers(transport) starts those that it counts on."""
    started = []

    def start(transport):
        group = transport.group
        for rank in range(1, group["world_size"]):
            command = [PYTHON, "-P", "-c", WORKER, group["unique_id"], str(group["world_size"]), str(rank)]
            environment = {
                "PYTHONPATH": str(ROOT / "bridge" / "server"),
                "VLLM_NCCL_SO_PATH": library,
                "JAXRL_BRIDGE_PUBLISH_TIMEOUT": "3",
                "PATH": "/usr/bin:/bin",
            }
            started.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started

    yield start
    for worker in started:
        worker.kill()
        worker.communicate()


def unit(values) -> Unit:
    """A float32 tensor of three, padded, and a bfloat16 one of eight."""
    words = np.zeros(8, np.uint32)
    words[:3] = np.asarray(values[:3], np.float32).view(np.uint32)
    words[4:] = np.asarray(jnp.asarray(values[3:], jnp.bfloat16)).view(np.uint32)
    specs = (TensorSpec("a", (3,), "float32"), TensorSpec("b", (2, 4), "bfloat16"))
    return Unit(specs, (0, 16), jnp.asarray(words), jnp.zeros(2, jnp.uint32))


def test_workers_read_the_same_tensors_and_one_that_is_killed_ends_the_group_for_all(workers):
    transport = Nccl(2)
    transport.begin(32, 32)
    first, second = workers(transport)
    transport.meet()
    for bucket in range(2):
        values = [0.5 + bucket, -1.25, 3.0, *range(8)]
        source = transport.put(bucket, [unit(values)], "id")
        for worker in (first, second):
            worker.stdin.write(f'{{"sizes": {source["sizes"]}}}\n')
            worker.stdin.flush()
        transport.meet()
        expected = f"[{values[:3]}, [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]]\n"
        assert first.stdout.readline() == second.stdout.readline() == expected
    first.kill(), first.wait()
    transport.put(2, [unit([0.0] * 11)] * 2, "id")
    second.stdin.write('{"sizes": [32, 32]}\n')
    second.stdin.flush()
    with pytest.raises(SamplerError, match="remote process exited"):
        for _ in range(3):  # a socket takes what the dead will not read
            transport.meet()
    assert "internal" in (said := second.stdout.readline()) and "remote process exited" in said
    assert second.stdout.readline() == "true\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory, library):
    """run(scenario) awaits scenario(api) within LIMIT."""
    environment = (f"VLLM_NCCL_SO_PATH={library}", f"JAXRL_BRIDGE_PUBLISH_TIMEOUT={SERVER_SECONDS}")
    with asyncio.Runner() as runner:
        (launch,) = servers(tmp_path_factory.mktemp("nccl"), sampler_config(environment=environment))
        server = runner.run(asyncio.wait_for(process.start(launch), LIMIT))
        yield lambda scenario: runner.run(asyncio.wait_for(scenario(server.api), LIMIT))
        runner.run(server.stop())


async def send(api, version, transport):
    sent = Weights(weights(version)["params"], ARCHITECTURE, "float32")
    options = {"in_flight": True, "cache": "recompute", "timeout": 60.0}
    return await publish(api, sent, version, transport=transport, **options)


async def serves(api, version):
    ids, logp, versions = await generate(api, f"nccl-{version}", 16)
    assert versions == {version}
    assert np.abs(np.array(logp) - log_probs(version, PROMPT, ids)).max() <= TOLERANCE


class Direct(Nccl):
    """Loads bucket by bucket, and goes wrong in the second: `wrong(self)` instead of its broadcast."""

    wrong = None

    def begin(self, total_bytes, largest_unit):
        super().begin(total_bytes, largest_unit)
        self.staged, self.bucket = False, -1
        return largest_unit

    def put(self, bucket, units, publish_id):
        self.bucket = bucket
        return super().put(bucket, units, publish_id)

    def meet(self):
        if self.bucket == 1 and self.wrong is not None:
            self.wrong()
        super().meet()


def test_a_server_serves_what_was_broadcast(run):
    async def scenario(api):
        assert "nccl" not in (state := await api.state())["transports"] and state["num_workers"] == 1 and state["nccl"] is None
        for transport, versions in [(Nccl(1), (1, 2)), (Direct(1), (3, 4))]:
            transport_ids = set()
            for version in versions:
                await send(api, version, transport)
                transport_ids.add(transport.group["unique_id"])
                await serves(api, version)
            assert len(transport_ids) == 1
            await asyncio.to_thread(transport.close)

    run(scenario)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda self: time.sleep(1.5 * SERVER_SECONDS), r"the trainer \(rank 0\) did not send a broadcast within 4 s"),
        (lambda self: self._group.abort(), "remote process exited"),
    ],
)
def test_a_trainer_that_stops_in_mid_publish_quarantines_until_the_next_group(run, wrong, says):
    async def scenario(api):
        version, transport = (await api.state())["version"] + 1, Direct(1)
        transport.wrong = lambda: wrong(transport)
        with pytest.raises(ServerError, match=says):
            await send(api, version, transport)
        assert "failed halfway" in (await api.state())["quarantined"]
        left, transport.wrong = transport.group["unique_id"], None
        await send(api, version, transport)
        assert (await api.state())["quarantined"] is None and transport.group["unique_id"] != left
        await serves(api, version)
        await asyncio.to_thread(transport.close)

    run(scenario)


def test_a_trainer_that_does_not_come_leaves_the_server_as_it_was(run):
    async def scenario(api):
        transport = Nccl(1)
        await send(api, version := (await api.state())["version"] + 1, transport)
        await asyncio.to_thread(transport.close)
        group = {"unique_id": base64.b64encode(nccl.new_unique_id()).decode(), "world_size": 2}
        manifest = Weights(weights(version)["params"], ARCHITECTURE, "float32").manifest()
        with pytest.raises(ServerError, match=r"the trainer \(rank 0\) did not join its NCCL group within 4 s") as raised:
            await api.begin(version + 1, manifest, "nccl", in_flight=True, cache="recompute", group=group)
        assert raised.value.kind == "timeout" and (await api.state())["quarantined"] is None
        await serves(api, version)

    run(scenario)
