"""Ways to a server: which is taken and why, and what is said when one has no room or cannot reach."""

import shutil
from collections import namedtuple

import pytest

from bridge.client.api import ServerApi
from bridge.client.segments import sweep
from bridge.client.transports.choose import choose, host_id, open_transport
from bridge.client.transports.file import SharedFiles
from bridge.client.transports.shm import SharedMemory
from jaxrl.rollout.protocol import SamplerError

HERE = {"host_id": host_id(), "device": "cpu", "uuid": None, "transports": ["shm", "file", "http"]}
THERE = HERE | {"host_id": "another"}


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
    assert choose("auto", state, folder)[0] == expected


def test_a_way_by_name_is_taken_or_refused_with_what_could_be():
    assert choose("http", HERE, None)[0] == "http"
    with pytest.raises(SamplerError, match='sampler.transport = "shm" needs trainer and server on one host'):
        choose("shm", THERE, None)
    with pytest.raises(SamplerError, match='sampler.transport = "cuda_ipc": the server has shm, file, http'):
        choose("cuda_ipc", HERE, None)

    with pytest.raises(SamplerError, match='sampler.transport = "nccl": the trainer cannot send by it; use'):
        open_transport("nccl", HERE | {"transports": ["nccl"]}, "ab.1", api=ServerApi("http://127.0.0.1:1", "key"))


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
