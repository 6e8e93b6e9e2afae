"""A publish over a real socket: what arrives, what is tried again, what is given up and how the server is left."""

import asyncio
import stat
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from fake_server import KEY, FakeServer
from safetensors.numpy import load_file

from bridge.client.api import ServerApi
from bridge.client.errors import Mismatch, ServerError
from bridge.client.publish import _buckets, publish
from bridge.client.transports.file import SharedFiles
from bridge.client.transports.http import Http
from bridge.client.transports.shm import SharedMemory
from bridge.client.weights import Weights, checksum
from jaxrl.models.hf import load_architecture, load_checkpoint
from jaxrl.rollout.protocol import SamplerError

QWEN3 = Path(__file__).parent.parent / "data" / "models" / "qwen3"
SIZES = {"F32": 4, "BF16": 2}


class Receiver(FakeServer):
    """Keeps the bytes of every tensor and compares checksums. `damage`: how many tensors it reads with a bit flipped;
    `stalls`: it never answers who sends a bucket."""

    def __init__(self):
        super().__init__()
        self.tensors: dict[str, bytes] = {}
        self.damage, self.stalls = 0, False
        self._area = bytearray()

    async def _answer(self, method, path, body, allowed, writer):
        if method == "PUT" and allowed:
            offset = int(parse_qs(urlsplit(path).query)["offset"][0])
            self._area[offset : offset + len(body)] = body
        await super()._answer(method, path, body, allowed, writer)

    async def _publish(self, route, body):
        if route == "begin":
            self.tensors.clear()
        elif body.get("tensors"):  # a bucket, or a commit with the last one
            while self.stalls:
                await asyncio.sleep(0.01)
            answer = self._read(body)
            if route == "bucket" or answer:
                return answer
        if route == "commit" and list(self.tensors) != [t["name"] for t in self._open["manifest"]["tensors"]]:
            return {"error": {"kind": "mismatch", "message": "tensors are missing"}}
        return await super()._publish(route, body)

    def _read(self, body):
        specs = {t["name"]: t for t in self._open["manifest"]["tensors"]}
        transport, source = self._open["transport"], body["source"]
        if transport == "file":
            tensors = load_file(source["path"])
        else:
            area = Path(source["path"]).read_bytes() if transport == "shm" else self._area
        for entry in body["tensors"]:
            spec = specs[entry["name"]]
            size = int(np.prod(spec["shape"])) * SIZES[spec["dtype"]]
            assert entry["offset"] % 16 == 0
            if transport == "file":
                data = tensors[entry["name"]].tobytes()
            else:
                data = bytes(area[entry["offset"] : entry["offset"] + size])
            if self.damage:
                self.damage -= 1
                data = bytes([data[0] ^ 1]) + data[1:]
            if checksum(data) != entry["checksum"]:
                return {"error": {"kind": "mismatch", "message": f"{entry['name']}: checksum"}}
            self.tensors[entry["name"]] = data
        return {}


@pytest.fixture(scope="module")
def weights():
    architecture = load_architecture(QWEN3)
    return Weights(load_checkpoint(QWEN3, architecture, None, "float32"), architecture, "bfloat16")


@pytest.fixture(scope="module")
def expected(weights):
    return {
        spec.name: np.asarray(unit.words).tobytes()[offset : offset + spec.num_bytes]
        for unit in weights.units()
        for spec, offset in zip(unit.specs, unit.offsets, strict=True)
    }


def run(body):
    """`body(server, api)` beside a receiver, within 30 s."""

    async def main():
        async with Receiver() as server:
            api = ServerApi(server.url, KEY)
            try:
                await asyncio.wait_for(body(server, api), 30)
            finally:
                await api.close()

    asyncio.run(main())


async def send(api, weights, version, transport, timeout=20.0):
    return await publish(api, weights, version, in_flight=True, cache="recompute", transport=transport, timeout=timeout)


def opened(name, folder, api):
    if name == "shm":
        return SharedMemory("ab.1", folder)
    if name == "file":
        return SharedFiles(folder / "files")
    loop = asyncio.get_running_loop()
    return Http(lambda *piece: asyncio.run_coroutine_threadsafe(api.put_data(*piece), loop).result())


@pytest.mark.parametrize("name", ["shm", "file", "http"])
def test_every_tensor_arrives_bit_for_bit_and_nothing_is_left(tmp_path, monkeypatch, weights, expected, name):
    module = {"shm": SharedMemory, "file": SharedFiles, "http": Http}[name].__module__
    monkeypatch.setattr(f"{module}.BUCKET_BYTES", weights.largest_unit)  # several buckets
    if name == "http":
        monkeypatch.setattr(f"{module}.PIECE_BYTES", 4096)

    async def body(server, api):
        transport = opened(name, tmp_path, api)
        for version in (1, 2):
            report = await send(api, weights, version, transport)
            assert server.tensors == expected and server.version == report.version == version
            assert report.seconds > 0 and not server.aborts
            for path in tmp_path.glob("jaxrl-*"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
        if name != "http":
            assert any(tmp_path.rglob("*"))
        transport.close()
        assert not list(tmp_path.rglob("*"))

    run(body)


def test_buckets_hold_whole_units_up_to_the_limit(weights):
    limit = 2 * weights.largest_unit
    sizes = [[unit.num_bytes for unit in bucket] for bucket in _buckets(weights, limit)]
    assert sum(map(sum, sizes)) == weights.num_bytes
    assert all(sum(bucket) <= limit for bucket in sizes)
    assert all(sum(a) + b[0] > limit for a, b in zip(sizes, sizes[1:], strict=False))


def test_a_tensor_damaged_once_is_sent_again_and_one_damaged_always_is_named(tmp_path, weights, expected):
    async def body(server, api):
        transport = SharedMemory("ab.1", tmp_path)
        server.damage = 1
        await send(api, weights, 1, transport)
        assert server.tensors == expected and server.aborts == 1
        assert [begun["force"] for begun in server.publishes] == [False, True]
        server.damage = 1000
        with pytest.raises(ServerError, match=rf"^vLLM server {server.url}: model\.embed_tokens\.weight: checksum$") as raised:
            await send(api, weights, 2, transport)
        assert raised.value.kind == "mismatch" and not isinstance(raised.value, Mismatch)  # another try may go through
        assert server.version == 1 and server.aborts == 3
        transport.close()

    run(body)


def test_a_server_that_does_not_answer_costs_no_more_than_the_timeout(tmp_path, weights):
    async def body(server, api):
        transport = SharedMemory("ab.1", tmp_path)
        await send(api, weights, 1, transport)
        server.stalls = True
        began = time.monotonic()
        with pytest.raises(SamplerError, match=f"{server.url} did not take version 2 by shm within 0.5 s"):
            await send(api, weights, 2, transport, timeout=0.5)
        assert time.monotonic() - began < 5 and server.aborts == 1 and server.version == 1
        transport.close()

    run(body)


def test_a_transport_that_fails_is_named_and_the_old_version_stays(tmp_path, weights):
    class Full(SharedMemory):
        def put(self, bucket, units, publish_id):
            raise SamplerError(f"{tmp_path} is full")

    async def body(server, api):
        with pytest.raises(SamplerError, match="is full"):
            await send(api, weights, 1, Full("ab.1", tmp_path))
        assert server.version == -1 and server.aborts == 1 and len(server.publishes) == 1

    run(body)


def test_a_server_that_refuses_at_begin_is_not_asked_again(tmp_path, weights):
    async def body(server, api):
        server.version = 7
        with pytest.raises(ServerError, match="version 3 is not above 7"):
            await send(api, weights, 3, SharedMemory("ab.1", tmp_path))
        assert server.version == 7 and not server.aborts and len(server.publishes) == 1

    run(body)


def test_the_event_loop_goes_on_while_bytes_are_copied(tmp_path, weights):
    class Slow(SharedMemory):
        def put(self, bucket, units, publish_id):
            time.sleep(0.5)
            return super().put(bucket, units, publish_id)

    async def body(server, api):
        transport = Slow("ab.1", tmp_path)
        publishing = asyncio.create_task(send(api, weights, 1, transport))
        turns = 0
        while not publishing.done():
            await asyncio.sleep(0.01)
            turns += 1
        await publishing
        assert turns > 10
        transport.close()

    run(body)
