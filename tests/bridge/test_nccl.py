"""Weights by NCCL: the trainer's side against peers that speak to the same library, a stand-in over host memory: who comes, in
which order bytes arrive, what is said when a peer stays away, leaves or dies, and what the next publish does."""

import asyncio
import base64
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from fake_server import KEY, FakeServer

from bridge.client import nccl
from bridge.client.api import ServerApi
from bridge.client.errors import ServerError
from bridge.client.publish import publish
from bridge.client.transports import nccl as transports_nccl
from bridge.client.transports.nccl import Nccl
from bridge.client.weights import TensorSpec, Unit, Weights, checksum
from jaxrl.models.hf import load_architecture, load_checkpoint
from jaxrl.rollout.protocol import SamplerError

HERE = Path(__file__).parent
QWEN3 = HERE.parent / "data" / "models" / "qwen3"
SIZES = {"F32": 4, "BF16": 2}

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

PEER = """
import sys, time
from bridge.client import nccl
nccl._path = lambda: sys.argv[1]
unique_id, size, rank = bytes.fromhex(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
group = nccl.Group(unique_id, size, rank)
while not group.ready():
    time.sleep(0.001)
print("joined", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-pthread", "-o", path, HERE / "nccl_stand_in.c"], check=True)
    return str(path)


@pytest.fixture(autouse=True)
def on_host(library, monkeypatch):
    """Everything as on GPUs, but for the memory and the library behind it."""
    monkeypatch.setattr(nccl, "_path", lambda: library)
    memory = SimpleNamespace(select_device=lambda device: None, new_stream=lambda: 0, is_done=lambda stream: True)
    monkeypatch.setattr(transports_nccl, "cuda", memory)
    nccl.library.cache_clear()
    yield
    nccl.library.cache_clear()


@pytest.fixture(scope="module")
def weights():
    architecture = load_architecture(QWEN3)
    return Weights(load_checkpoint(QWEN3, architecture, None, "float32"), architecture, "bfloat16")


def unit(words) -> Unit:
    words = jnp.asarray(words, jnp.uint32)
    spec = TensorSpec("x", (len(words),), "float32")
    return Unit((spec,), (0,), words, jnp.zeros(1, jnp.uint32))


def wait_for(group: nccl.Group, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not group.ready():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def member(transport: Nccl, rank: int) -> nccl.Group:
    group = transport.group
    return nccl.Group(base64.b64decode(group["unique_id"]), group["world_size"], rank)


def receive(group: nccl.Group, sizes: list[int]) -> bytes:
    area = np.zeros(sum(sizes), np.uint8)
    offset = 0
    for size in sizes:
        group.broadcast(area.ctypes.data + offset, size, 0)
        wait_for(group)
        offset += size
    return area.tobytes()


def together(*calls):
    """What each gives, side by side."""
    results = [None] * len(calls)

    def work(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_a_group_needs_everybody_and_every_member_gets_the_same_bytes_in_order():
    transport = Nccl(num_workers=2)
    assert transport.begin(96, 64) == 96 and transport.staged
    joining = threading.Thread(target=transport.meet)
    joining.start()
    first = member(transport, 2)
    time.sleep(0.2)
    assert joining.is_alive() and not first.ready()
    second = member(transport, 1)
    joining.join(10)
    wait_for(first), wait_for(second)
    for bucket in range(3):
        units = [unit(np.arange(16) + 1000 * bucket), unit(np.arange(8) + 7 + bucket)]
        source = transport.put(bucket, units, "id")
        assert source == {"sizes": [64, 32]}
        sent, *got = together(
            transport.meet, lambda s=source: receive(first, s["sizes"]), lambda s=source: receive(second, s["sizes"])
        )
        assert sent is None
        assert got[0] == got[1] == b"".join(np.asarray(u.words).astype("<u4").tobytes() for u in units)
    for left in (transport.close, first.abort, second.abort):
        left()


def member_id(transport):
    return transport.group["unique_id"]


def test_large_weights_are_not_kept_twice_and_a_bucket_holds_the_largest_unit():
    transport = Nccl(1)
    assert transport.begin(2**40, 2**31) == 2**31 and not transport.staged
    assert transport.begin(2**40, 4) == transports_nccl.BUCKET_BYTES
    transport.close()


@pytest.mark.parametrize(
    "workers, who", [(1, r"the server's worker \(rank 1\)"), (3, r"at least one of the server's 3 workers \(ranks 1 to 3\)")]
)
def test_members_that_stay_away_are_named_within_the_time(monkeypatch, workers, who):
    monkeypatch.setattr(transports_nccl, "MEET_SECONDS", 0.3)
    transport = Nccl(workers)
    transport.begin(64, 64)
    first = member_id(transport)
    began = time.monotonic()
    with pytest.raises(SamplerError, match=rf"^{who} did not join the trainer's NCCL group within 0.3 s"):
        transport.meet()
    assert time.monotonic() - began < 2
    with pytest.raises(SamplerError, match="was left"):
        transport.meet()
    transport.begin(64, 64)
    assert member_id(transport) != first
    transport.close()


def test_a_worker_that_takes_no_part_in_a_broadcast_is_named_and_the_group_is_left(monkeypatch):
    transport = Nccl(1)
    transport.begin(2**26, 2**26)
    there = member(transport, 1)
    transport.meet()
    monkeypatch.setattr(transports_nccl, "MEET_SECONDS", 0.3)
    transport.put(0, [unit(np.zeros(2**24))], "id")  # more than sockets hold
    with pytest.raises(SamplerError, match=r"the server's worker \(rank 1\) did not take part in a broadcast within 0.3 s"):
        transport.meet()
    assert transport._group is None
    there.abort()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_hangs_in_mid_broadcast_ends_it(library, monkeypatch, sign):
    transport = Nccl(1)
    transport.begin(2**26, 2**26)
    command = [sys.executable, "-c", PEER, library, base64.b64decode(member_id(transport)).hex(), "2", "1"]
    peer = subprocess.Popen(command, cwd=HERE.parents[1], stdout=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    try:
        transport.meet()
        assert peer.stdout.readline() == b"joined\n"
        monkeypatch.setattr(transports_nccl, "MEET_SECONDS", 2.0)
        transport.put(0, [unit(np.zeros(2**24))], "id")
        threading.Timer(0.3, peer.send_signal, (sign,)).start()
        began = time.monotonic()
        says = "remote process exited" if sign == signal.SIGKILL else r"rank 1\) did not take part in a broadcast within 2 s"
        with pytest.raises(SamplerError, match=says):
            transport.meet()
        assert time.monotonic() - began < 4
    finally:
        peer.kill()
        peer.communicate()
    transport.begin(64, 64)  # the next publish has a group of its own
    new = member(transport, 1)
    transport.meet()
    source = transport.put(0, [unit(np.arange(16))], "id")
    assert together(transport.meet, lambda: receive(new, source["sizes"]))[1] == np.arange(16, dtype="<u4").tobytes()
    transport.close(), new.abort()


def test_close_ends_who_waits():
    transport = Nccl(1)
    transport.begin(64, 64)
    threading.Timer(0.2, transport.close).start()
    began = time.monotonic()
    with pytest.raises(SamplerError, match="the NCCL group was left"):
        transport.meet()
    assert time.monotonic() - began < 2


class Worker(FakeServer):
    """A server whose `num_workers` ranks are threads. `away`: the first begins that it does not join; `refuses`: it says no to
    the first buckets instead of taking part."""

    def __init__(self, num_workers=1):
        super().__init__()
        self.num_workers, self.away, self.refuses = num_workers, 0, 0
        self.tensors: list[dict[str, bytes]] = []
        self.unique_ids: list[str] = []
        self.groups: list[nccl.Group] = []

    async def _publish(self, route, body):
        if route == "begin":
            if self.away:
                self.away -= 1
                return {"error": {"kind": "internal", "message": "no GPU is free"}}
            self.tensors = [{} for _ in range(self.num_workers)]
            if body["unique_id"] not in self.unique_ids[-1:]:
                self.groups = [self._join(body, 1 + i) for i in range(self.num_workers)]
                await asyncio.gather(*(asyncio.to_thread(wait_for, group) for group in self.groups))
            self.unique_ids.append(body["unique_id"])
        elif body.get("tensors"):
            if self.refuses:
                self.refuses -= 1
                return {"error": {"kind": "mismatch", "message": "a tensor was sent twice"}}
            assert route == "bucket"  # a commit may wait for generations, which no broadcast outlasts
            sizes = body["source"]["sizes"]
            areas = await asyncio.gather(*(asyncio.to_thread(receive, group, sizes) for group in self.groups))
            for area, tensors in zip(areas, self.tensors, strict=True):
                self._keep(area, body["tensors"], tensors)
            return {}
        return await super()._publish(route, body)

    def _join(self, body, rank):
        return nccl.Group(base64.b64decode(body["unique_id"]), body["world_size"], rank)

    def _keep(self, area, entries, tensors):
        specs = {t["name"]: t for t in self._open["manifest"]["tensors"]}
        for entry in entries:
            spec = specs[entry["name"]]
            size = int(np.prod(spec["shape"])) * SIZES[spec["dtype"]]
            data = area[entry["offset"] : entry["offset"] + size]
            assert checksum(data) == entry["checksum"]
            tensors[entry["name"]] = data


def run(body, **settings):
    async def main():
        async with Worker(**settings) as server:
            api = ServerApi(server.url, KEY)
            transport = Nccl(server.num_workers)
            try:
                await asyncio.wait_for(body(server, api, transport), 30)
            finally:
                await api.close()
                transport.close()
                for group in server.groups:
                    group.abort()

    asyncio.run(main())


async def send(api, weights, version, transport, timeout=20.0):
    return await publish(api, weights, version, in_flight=True, cache="recompute", transport=transport, timeout=timeout)


def expected(weights):
    return {
        spec.name: np.asarray(unit.words).tobytes()[offset : offset + spec.num_bytes]
        for unit in weights.units()
        for spec, offset in zip(unit.specs, unit.offsets, strict=True)
    }


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_publish_reaches_every_worker_bit_for_bit_and_keeps_its_group(weights, monkeypatch, num_workers):
    monkeypatch.setattr(transports_nccl, "BUCKET_BYTES", weights.largest_unit)  # several buckets

    async def body(server, api, transport):
        for version in (1, 2):
            await send(api, weights, version, transport)
            assert server.tensors == [expected(weights)] * num_workers and server.version == version
        assert len(set(server.unique_ids)) == 1 and not server.aborts

    run(body, num_workers=num_workers)


def test_a_server_that_refuses_ends_the_wait_for_it_and_is_met_in_a_new_group(weights):
    async def body(server, api, transport):
        server.away = 1
        began = time.monotonic()
        with pytest.raises(ServerError, match="no GPU is free"):
            await send(api, weights, 1, transport)
        assert time.monotonic() - began < 5
        server.refuses = 1
        await send(api, weights, 1, transport)  # told of damage, it sends all again
        assert server.tensors == [expected(weights)] and len(set(server.unique_ids)) == 2 and server.aborts == 1

    run(body)


def test_a_server_that_dies_in_mid_publish_costs_seconds_and_the_next_publish_goes_through(weights, monkeypatch):
    monkeypatch.setattr(transports_nccl, "BUCKET_BYTES", weights.largest_unit)

    async def body(server, api, transport):
        await send(api, weights, 1, transport)
        dying = server._keep

        def die(area, entries, tensors):
            server.groups[0].abort()
            server.drop()
            dying(area, entries, tensors)

        server._keep = die
        began = time.monotonic()
        with pytest.raises(ServerError) as raised:
            await send(api, weights, 2, transport)
        assert raised.value.kind == "unreachable" and time.monotonic() - began < 5
        del server._keep
        server._end()
        await send(api, weights, 2, transport)
        assert server.version == 2 and len(set(server.unique_ids)) == 2

    run(body)


def test_a_server_that_never_takes_part_costs_no_more_than_the_timeout(weights, monkeypatch):
    monkeypatch.setattr(transports_nccl, "MEET_SECONDS", 0.3)
    monkeypatch.setattr("bridge.client.publish.REASON_SECONDS", 0.2)

    async def body(server, api, transport):
        late = time.monotonic() + 1
        server._join = lambda body, rank: SimpleNamespace(ready=lambda: time.monotonic() > late, abort=lambda: None)
        with pytest.raises(SamplerError, match=r"the server's worker \(rank 1\) did not join"):
            await send(api, weights, 1, transport)
        assert server.version == -1

    run(body)
