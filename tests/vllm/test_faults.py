"""What goes wrong, with a real server: nothing finished is lost, nothing hangs, and the message says what happened.

One server for all: it starts once, and twice more after it was killed. Faults that need none of that come from a second
trainer's fleet over the same server, which publishes what the first one did.
"""

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess

import pytest
from vllm_fleet import ARCHITECTURE, KEY, Generation, RealFleet, kill, needs_vllm, processes, sampler_config, servers, weights

from bridge.client import replica as replica_module
from bridge.client.errors import Mismatch
from bridge.client.replica import Attached
from bridge.client.transports.shm import SharedMemory
from jaxrl.models.architecture import Architecture
from jaxrl.rollout.protocol import SamplerError

pytestmark = needs_vllm
LIMIT = 240.0  # seconds of a test: two starts on a busy machine


class OnBucket:
    """A transport that does something before its second bucket goes out; every tensor is a bucket, so that is midway."""

    def __init__(self, transport, act):
        self._transport, self._act = transport, act
        self.name, self.staged = transport.name, transport.staged

    def begin(self, total_bytes, largest_unit):
        self._transport.begin(total_bytes, largest_unit)
        return 1

    def put(self, bucket, units, publish_id):
        if bucket == 1:
            self._act()
        return self._transport.put(bucket, units, publish_id)

    def close(self):
        self._transport.close()


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """(run, fleet, launch, files): runs a coroutine on the fleet's event loop."""
    folder = tmp_path_factory.mktemp("faults")
    files = folder / "files"
    files.mkdir()
    config = sampler_config(shared_folder=str(files), transport="shm")
    (launch,) = servers(folder, config)
    acts = []

    def link(link):
        link._transport = OnBucket(SharedMemory(link._settings.run_id), lambda: acts and acts.pop()())
        return link

    with asyncio.Runner() as runner:

        def run(test):
            async def limited():
                async with asyncio.timeout(LIMIT):
                    return await test

            return runner.run(limited())

        fleet = RealFleet([launch], config, folder, link=link)
        fleet.acts, fleet.launch, fleet.files, fleet.folder = acts, launch, files, folder
        try:
            run(fleet.start())
            yield run, fleet
        finally:
            runner.run(fleet.fleet.close())
            assert not processes(launch)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(replica_module, "BACK_OFF_SECONDS", 0.2)


def attached(setting, architecture=ARCHITECTURE, url=None, **settings) -> RealFleet:
    """Another trainer's fleet over the same server."""
    fleet = setting[1]
    url = url or fleet.fleet._replicas[0].name
    return RealFleet([Attached(url, KEY)], sampler_config(**settings), fleet.folder / "other", architecture)


async def still_serves(fleet: RealFleet, version: int) -> None:
    assert await Generation(fleet, [1, 2, 3], 8).versions() == {version}


def test_a_wrong_model_on_the_other_side(setting):
    run, fleet = setting
    wide = Architecture.from_hf(ARCHITECTURE.to_hf() | {"intermediate_size": 128})
    other = attached(setting, wide)

    async def test():
        running = Generation(fleet, [5], 300)
        await running.reach(5)
        try:
            await other.fleet.start()
            with pytest.raises(SamplerError, match=r"http://127.0.0.1:\d+: .*mlp\.gate_proj\.weight.*128"):
                await other.sampler.publish(weights(9, wide), 9, False)
        finally:
            await other.fleet.close()
        assert isinstance(other.fleet._replicas[0].failure, Mismatch)  # not tried again
        assert await running.versions() == {1}
        await still_serves(fleet, 1)

    run(test())


@pytest.mark.whole
def test_a_full_disk_on_the_shared_filesystem(setting):
    run, fleet = setting
    other = attached(setting, transport="file", shared_folder=str(fleet.files))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", fleet.files], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no filesystem may be mounted here: {mounted.stderr.decode().strip()}")

    async def test():
        running = Generation(fleet, [6], 300)
        await running.reach(5)
        try:
            await other.fleet.start()
            with pytest.raises(SamplerError, match=f"{re.escape(str(fleet.files))}.* has room for"):
                await other.sampler.publish(weights(1), 1, True)
            assert await running.versions() == {1}
            await still_serves(fleet, 1)
            subprocess.run(["mount", "-o", "remount,size=16m", fleet.files], check=True)

            def fill(room):
                (fleet.files / "others").write_bytes(bytes(shutil.disk_usage(fleet.files).free - room))

            (link,) = [replica._link for replica in other.fleet._replicas]
            plain = link._transport
            link._transport = OnBucket(plain, lambda: fill(4096))  # it fills up while the weights are written
            with pytest.raises(SamplerError, match=f"{re.escape(str(fleet.files))}"):
                await other.sampler.publish(weights(1), 1, True)
            await still_serves(fleet, 1)
            (fleet.files / "others").unlink()
            link._transport = plain
            assert (await other.sampler.publish(weights(1), 1, True)).version == 1
        finally:
            await other.fleet.close()

    try:
        run(test())
    finally:
        subprocess.run(["umount", fleet.files], check=True)


@pytest.mark.whole
def test_a_server_that_another_trainer_published_to_is_taken_back(setting):
    run, fleet = setting
    other = attached(setting)

    async def test():
        try:
            await other.start(version=2)
        finally:
            await other.fleet.close()
        await still_serves(fleet, 1)

    run(test())


class Proxy:
    """Between a trainer and its server. how: "pass", "never" (nothing passes any more) or "500" (its own answer)."""

    def __init__(self, port: int):
        self._port, self.how, self._open = port, "pass", set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    def turn(self, how):
        self.how = how
        for writer in self._open if how == "500" else ():
            writer.transport.abort()

    async def _connection(self, reader, writer):
        self._open.add(writer)
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._pump(reader, ours, writer), self._pump(theirs, writer, None))
        except ConnectionError:
            pass
        finally:
            self._open.discard(writer)
            ours.transport.abort()
            writer.transport.abort()

    async def _pump(self, reader, writer, client):
        while data := await reader.read(2**16):
            while self.how == "never":
                await asyncio.sleep(0.01)
            if self.how == "500" and client is not None:
                client.write(b"HTTP/1.1 500 Out Of Order\r\nContent-Length: 4\r\n\r\nsick")
                continue
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.mark.parametrize("how", ["500", "never"])
def test_a_server_that_answers_500_or_never(setting, how, monkeypatch):
    run, fleet = setting
    monkeypatch.setattr(replica_module, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(replica_module, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr("bridge.client.api.REPLY_SECONDS", 1.0)
    said = {"500": "answered 500", "never": "no state of it for 3 s|did not answer within 1 s"}[how]

    async def test():
        async with Proxy(int(fleet.fleet._replicas[0].name.rsplit(":")[-1])) as proxy:
            other = attached(setting, url=proxy.url)
            try:
                await other.start()
                whole = Generation(other, [7], 50)
                await whole.task
                cut = Generation(other, [8], 900)
                await cut.reach(20)
                proxy.turn(how)
                with pytest.raises(SamplerError, match=rf"(?s){proxy.url}.*({said})"):
                    await asyncio.wait_for(cut.task, 60)
                assert whole.num_tokens == 50 and cut.num_tokens >= 20  # what was sampled has been handed on
            finally:
                await other.fleet.close()
        await still_serves(fleet, 1)

    run(test())


def test_killed_twice_in_a_row_in_mid_generation(setting):
    """First the engine, under a server that lives and says so, then the server that starts in its place."""
    run, fleet = setting

    async def test():
        generations = [Generation(fleet, [10 + i], 600) for i in range(8)]
        for generation in generations:
            await generation.reach(10)
        await kill(fleet.launch, "EngineCore")
        while fleet.fleet.num_restarts == 0:
            await asyncio.sleep(0.05)
        await kill(fleet.launch)
        for generation in generations:
            assert await generation.versions() == {1}
        assert fleet.fleet.num_moved >= 8 and fleet.fleet.num_restarts == 2

    run(test())


@pytest.mark.whole
def test_killed_in_mid_transfer(setting, caplog):
    run, fleet = setting

    async def test():
        weights(3)  # made before, for that takes longer than the generations
        running = [Generation(fleet, [30 + i], 1900) for i in range(4)]
        for generation in running:
            await generation.reach(10)
        fleet.acts.append(lambda: os.kill(processes(fleet.launch)[0], signal.SIGKILL))
        with caplog.at_level(logging.WARNING):
            report = await fleet.publish(3)  # goes through, on the server that took the killed one's place
        assert report.version == 3 and not fleet.acts
        assert re.search(r"vLLM server at http://127.0.0.1:\d+ ended by signal 9", caplog.text)
        seen = [await generation.versions() for generation in running]
        assert {1, 3} in seen and all(versions <= {1, 3} for versions in seen)
        await still_serves(fleet, 3)

    run(test())
