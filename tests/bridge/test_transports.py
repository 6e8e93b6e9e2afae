"""Ways to a server: which is taken and why, and what is said when one has no room or cannot reach."""

import asyncio
import json
import logging
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_server import KEY, FakeServer

from bridge.client.api import ServerApi
from bridge.client.segments import sweep
from bridge.client.transports import choose as module
from bridge.client.transports.choose import choose, host_id, open_transport
from bridge.client.transports.file import SharedFiles
from bridge.client.transports.shm import SharedMemory
from jaxrl.rollout.protocol import SamplerError

HERE = {"host_id": host_id(), "device": "cpu", "uuid": None, "transports": ["shm", "file", "http"]}
THERE = HERE | {"host_id": "another"}
GPU = {"device": "cuda", "uuid": "GPU-0000000a-0000", "nccl": 22907, "transports": ["cuda_ipc", "nccl", "shm", "file", "http"]}
URL, TUNNEL = "https://there", "http://127.0.0.1:1"


@pytest.fixture
def gpus(monkeypatch):
    """A trainer on GPU 0 of three: server's is the one that `find` says; 0 and 1 are peers, 2 is alone."""

    def set(server: int | None):
        monkeypatch.setattr(module.jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(module.jax, "local_devices", lambda: [SimpleNamespace(local_hardware_id=0)])
        monkeypatch.setattr(module.cuda, "find", lambda uuid: {"0000000a0000": server}[uuid])
        monkeypatch.setattr(module.cuda, "are_peers", lambda reader, owner: (reader, owner) == (1, 0))
        monkeypatch.setattr(module.nccl, "version", lambda: 22907)

    return set


@pytest.mark.parametrize(
    "state, folder, expected",
    [
        (HERE, None, "shm"),
        (HERE, "/shared", "shm"),
        (HERE | {"device": "cuda", "uuid": "GPU-00"}, None, "shm"),  # this process has no GPU
        (THERE, "/shared", "file"),
        (THERE, None, "http"),
    ],
)
def test_the_quickest_way_that_reaches_is_taken(state, folder, expected):
    assert choose("auto", state, folder, URL)[0] == expected


@pytest.mark.parametrize(
    "server, state, url, expected",
    [
        (0, HERE, URL, "cuda_ipc"),
        (1, HERE, URL, "cuda_ipc"),
        (2, HERE, URL, "shm"),
        (None, HERE, URL, "shm"),  # a GPU that the trainer does not see
        (None, THERE, URL, "nccl"),
        (None, THERE, TUNNEL, "file"),
        (None, THERE | {"nccl": 22800}, URL, "file"),
    ],
)
def test_with_gpus_on_both_sides_memory_goes_before_the_network_and_that_before_a_disk(gpus, server, state, url, expected):
    gpus(server)
    assert choose("auto", GPU | {key: state[key] for key in ("host_id", "nccl") if key in state}, "/shared", url)[0] == expected


def test_a_way_by_name_is_taken_or_refused_with_what_could_be():
    assert choose("http", HERE, None, URL)[0] == "http"
    with pytest.raises(SamplerError, match='sampler.transport = "shm" needs trainer and server on one host'):
        choose("shm", THERE, None, URL)
    with pytest.raises(SamplerError, match='sampler.transport = "cuda_ipc": the server has shm, file, http'):
        choose("cuda_ipc", HERE, None, URL)
    with pytest.raises(SamplerError, match="sampler.shared_folder = '/shared' .* JAXRL_BRIDGE_FILES"):
        choose("file", HERE | {"transports": ["shm", "http"]}, "/shared", URL)
    with pytest.raises(SamplerError, match='sampler.transport = "nccl": it goes from GPU to GPU'):
        choose("nccl", THERE | {"transports": ["nccl"]}, None, URL)


def test_nccl_wants_one_version_on_both_sides(gpus):
    gpus(None)
    assert choose("nccl", GPU | {"host_id": "another"}, None, TUNNEL)[0] == "nccl"
    with pytest.raises(SamplerError, match="the server has NCCL 22800, the trainer 22907: they must be the same"):
        choose("nccl", GPU | {"host_id": "another", "nccl": 22800}, None, URL)


class Elsewhere(FakeServer):
    """Sees of every folder what lies in `files`; None: it may read none."""

    def __init__(self, files):
        super().__init__()
        self.files, self.extra_state = files, THERE

    async def _answer(self, method, path, body, allowed, writer):
        if path != "/bridge/probe" or not allowed:
            return await super()._answer(method, path, body, allowed, writer)
        asked = json.loads(body)
        if self.files is None:
            message = "it is not under a folder of JAXRL_BRIDGE_FILES"
            return self._json(writer, {"error": {"kind": "bad_request", "message": message}}, 400)
        file = self.files / Path(asked["path"]).name
        self._json(writer, {"shared": file.exists() and file.read_text() == asked["token"]})


def opened(name, folder, files):
    """The transport's name, or what was raised."""

    async def main():
        async with Elsewhere(files) as server:
            api = ServerApi(server.url, KEY)
            try:
                return (await open_transport(name, await api.state(), "ab.1", api=api, shared_folder=str(folder))).name
            except SamplerError as error:
                return error
            finally:
                await api.close()

    return asyncio.run(asyncio.wait_for(main(), 20))


def test_a_folder_is_taken_for_shared_when_the_server_reads_there_what_was_written(tmp_path, caplog):
    folder, other = tmp_path / "shared", tmp_path / "other"
    other.mkdir()
    caplog.set_level(logging.WARNING)
    assert opened("auto", folder, folder) == opened("file", folder, folder) == "file"
    assert not caplog.records and not list(folder.iterdir())
    for files, reason in [(other, "reads something else from"), (None, "not under a folder of JAXRL_BRIDGE_FILES")]:
        caplog.clear()
        assert opened("auto", folder, files) == "http"
        (warning,) = caplog.messages
        assert reason in warning and "sampler.shared_folder" in warning and "JAXRL_BRIDGE_FILES" in warning
        error = str(opened("file", folder, files))
        assert reason in error and "sampler.shared_folder" in error and "JAXRL_BRIDGE_FILES" in error
        assert not list(folder.iterdir())
    (tmp_path / "full").touch()
    assert "cannot be written: File exists" in str(opened("file", tmp_path / "full", other))


def test_shared_memory_without_room_says_so_before_anything_is_made(tmp_path):
    with pytest.raises(SamplerError, match=rf"{tmp_path} has room for .* GB, the weights are 1000000000\.00 GB: enlarge it"):
        SharedMemory("ab.1", tmp_path).begin(10**18, 1)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_room_says_so(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10))
    with pytest.raises(SamplerError, match="has room for .* sampler.shared_folder"):
        SharedFiles(tmp_path / "files").begin(11, 11)
    assert SharedFiles(tmp_path / "files").begin(10, 10) >= 10


def test_a_file_that_cannot_be_written_names_its_folder_and_leaves_no_part(tmp_path):
    transport = SharedFiles(tmp_path / "files")
    transport.begin(0, 0)
    shutil.rmtree(tmp_path / "files")
    with pytest.raises(SamplerError, match=rf"weights could not be written to {tmp_path}/files: No such file"):
        transport.put(0, [], "id")


def test_a_sweep_takes_what_the_dead_left_and_nothing_else(tmp_path):
    gone, other = "jaxrl-ab.999999999-weights", "jaxrl-cd.1-weights"
    own, foreign = "jaxrl-ab.2-weights", "somebody-else"
    for name in (gone, other, own, foreign, "jaxrl-gateway-999999999-x"):
        (tmp_path / name).touch()
    sweep("ab.2", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other, own, foreign])
