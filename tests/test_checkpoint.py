"""A checkpoint is complete or invisible, equal bit by bit on any mesh, and apart from the next step's memory."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.checkpoint import CheckpointError, Checkpoints, abstract_state
from jaxrl.config import MeshConfig
from jaxrl.mesh import make_mesh
from jaxrl.trainer.state import TrainState

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
AXES = {"embed": ("tensor", "fsdp"), "up": ("fsdp", "tensor"), "norm": (), "lora": (None, "tensor")}


def shardings(mesh):
    """Of a TrainState like `make_state`'s."""
    params = {name: NamedSharding(mesh, PartitionSpec(*axes)) for name, axes in AXES.items()}
    whole = NamedSharding(mesh, PartitionSpec())
    opt_state = jax.tree.map(lambda _: whole, OPTIMIZER.init({name: jnp.zeros(()) for name in AXES}))
    adam = opt_state[1][0]._replace(mu=params, nu=params)
    return TrainState(whole, params, {"base": params["up"]}, (opt_state[0], (adam, *opt_state[1][1:])))


def make_state(mesh, seed=0, size=16):
    """Random bits in every leaf, in four dtypes."""

    def make(key):
        keys = jax.random.split(key, 5)
        params = {
            "embed": jax.random.normal(keys[0], (size, size)),
            "up": jax.random.normal(keys[1], (size, 2 * size), jnp.bfloat16),
            "norm": jax.random.normal(keys[2], (size,)),
            "lora": jax.random.normal(keys[3], (2, size)),
        }
        opt_state = OPTIMIZER.init(params)
        adam = opt_state[1][0]._replace(
            count=jnp.int32(7), mu=jax.tree.map(jnp.sin, params), nu=jax.tree.map(jnp.square, params)
        )
        frozen = {"base": jax.random.normal(keys[4], (size, size))}
        return TrainState(jnp.int32(7), params, frozen, (opt_state[0], (adam, *opt_state[1][1:])))

    return jax.jit(make, out_shardings=shardings(mesh))(jax.random.key(seed))


def to_host(state):
    return jax.tree.map(lambda x: np.array(x, copy=True), state)


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(fsdp=4, tensor=2))


def test_opens_on_another_mesh_bit_for_bit(tmp_path, mesh):
    state = make_state(mesh)
    host = {"step": 7, "data": {"next": 41, "live": [39, 40]}, "rng": 2**63, "fingerprint": "äb", "rate": 0.1}
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=False)
    checkpoints.save(7, state, host)
    checkpoints.close()
    layouts = [
        mesh,
        make_mesh(MeshConfig(data=2, context=2, tensor=2)),
        make_mesh(MeshConfig(fsdp=8)),
        make_mesh(MeshConfig(), jax.devices()[:1]),
    ]
    for layout in layouts:
        checkpoints = Checkpoints(tmp_path, keep=1, keep_best=False)
        wanted = shardings(layout)
        restored = checkpoints.restore(7, abstract_state(state, wanted))
        assert_same_bits(restored, state)
        for array, sharding in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert checkpoints.host(7) == host
        checkpoints.close()


@pytest.mark.parametrize("num_devices", [1, 8])
def test_does_not_share_memory_with_the_next_step(tmp_path, mesh, num_devices):
    """The state is donated to a step that overwrites it the moment save returns, again and again."""
    mesh = mesh if num_devices == 8 else make_mesh(MeshConfig(), jax.devices()[:1])
    state = make_state(mesh, size=256)
    spoil = jax.jit(lambda s: jax.tree.map(lambda x: (x + 1).astype(x.dtype), s), donate_argnums=0)
    saved, abstract = to_host(state), abstract_state(state)
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=False)
    checkpoints.save(1, state, {})
    for _ in range(20):
        state = spoil(state)
    jax.block_until_ready(state)
    checkpoints.wait()
    assert_same_bits(checkpoints.restore(1, abstract), saved)
    checkpoints.close()


def test_keeps_the_most_recent_and_the_best(tmp_path, mesh):
    state = make_state(mesh)
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=True)
    assert checkpoints.latest() is None and checkpoints.best() is None
    for step, metric in enumerate([0.1, 0.9, 0.3, None, float("nan"), 0.2]):
        checkpoints.save(step, state, {"step": step}, metric)
    checkpoints.save(5, state, {"step": "again"}, 0.2)  # saved already: left alone
    checkpoints.wait()
    assert checkpoints.steps() == [1, 4, 5] and checkpoints.best() == 1
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=True)  # knows the metrics of an earlier process
    assert checkpoints.best() == 1 and checkpoints.host(5) == {"step": 5}
    for step, metric in [(6, 0.95), (7, 0.0), (8, 0.0)]:
        checkpoints.save(step, state, {}, metric)
    checkpoints.wait()
    assert checkpoints.steps() == [6, 7, 8] and checkpoints.best() == 6
    checkpoints.close()


def test_without_best_only_the_most_recent_stay(tmp_path, mesh):
    state = make_state(mesh)
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=False)
    for step in range(4):
        checkpoints.save(step, state, {}, -step)
    checkpoints.close()
    assert Checkpoints(tmp_path, keep=2, keep_best=False).steps() == [2, 3]


SAVE_FOR_EVER = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from jaxrl.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2, keep_best=False)
step = checkpoints.latest() or 0
while True:
    step += 1
    checkpoints.save(step, {str(i): jnp.full((40000,), step * 100 + i) for i in range(20)}, {"step": step})
    print(step - 1, flush=True)  # complete
"""


def test_a_process_killed_while_saving_leaves_whole_checkpoints_only(tmp_path):
    rng = np.random.default_rng(0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {str(i): jax.ShapeDtypeStruct((40000,), jnp.int32, sharding=sharding) for i in range(20)}
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(3):
            complete = int(process.stdout.readline())
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.wait()
        process.stdout.close()
        checkpoints = Checkpoints(tmp_path, keep=2, keep_best=False)
        assert checkpoints.latest() >= complete
        for step in checkpoints.steps():
            for name, array in checkpoints.restore(step, abstract).items():
                np.testing.assert_array_equal(array, step * 100 + int(name))
            assert checkpoints.host(step) == {"step": step}
        checkpoints.close()


def test_leftovers_of_a_save_are_not_listed(tmp_path, mesh):
    state = make_state(mesh)
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=False)
    checkpoints.save(1, state, {})
    checkpoints.close()
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=False)
    assert checkpoints.steps() == [1] and checkpoints.latest() == 1
    checkpoints.save(2, state, {})
    checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_reader_leaves_the_save_of_another_process_alone(tmp_path, mesh):
    state = make_state(mesh)
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=False)
    checkpoints.save(1, state, {"step": 1})
    checkpoints.wait()
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    reader = Checkpoints(tmp_path, keep=1, keep_best=False, read_only=True)
    assert reader.steps() == [1] and reader.host(1) == {"step": 1}
    part = reader.restore_part(1, {"trainable": abstract_state(state).trainable})
    assert set(part) == {"trainable"}
    assert_same_bits(part["trainable"], state.trainable)
    reader.close()
    assert (tmp_path / "2.orbax-checkpoint-tmp").exists()
    checkpoints.close()


def test_another_model_is_an_error_that_names_the_array_and_the_folder(tmp_path, mesh):
    state = make_state(mesh)
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=False)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    wider = abstract_state(make_state(mesh, size=32))
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path}: array trainable/embed is float32\[16, 16\] there and float32\[32, 32\] in"
    ):
        checkpoints.restore(1, wider)
    abstract = abstract_state(state)
    fewer = dataclasses.replace(abstract, trainable={k: v for k, v in abstract.trainable.items() if k != "lora"})
    with pytest.raises(CheckpointError, match="array trainable/lora is float32.* there and missing in"):
        checkpoints.restore(1, fewer)
    half = dataclasses.replace(abstract, step=jax.ShapeDtypeStruct((), jnp.int8, sharding=abstract.step.sharding))
    with pytest.raises(CheckpointError, match="array step is int32.* int8"):
        checkpoints.restore(1, half)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        checkpoints.restore(2, abstract_state(state))
    checkpoints.close()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=str(tmp_path / "file" / "checkpoints")):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1, keep_best=False)


FULL_DISK = """
import resource, signal, sys, time, jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from jaxrl.checkpoint import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = Checkpoints(sys.argv[1], keep=3, keep_best=True)
state = {"a": jax.random.normal(jax.random.key(0), (1 << 18,))}
checkpoints.save(1, state, {"step": 1}, 0.5)
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
failures = 0
try:
    checkpoints.save(2, state, {"step": 2}, 0.5)
    for _ in range(600):  # goes on training, and looks now and then
        checkpoints.check()
        time.sleep(0.1)
except CheckpointError as error:
    assert sys.argv[1] in str(error), error
    failures += 1
assert checkpoints.steps() == [1], checkpoints.steps()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpoints.save(2, state, {"step": 2}, 0.5)
checkpoints.save(3, state, {"step": 3}, 0.5)
checkpoints.close()
print(failures)
"""


def test_a_full_disk_is_an_error_that_names_the_folder_and_the_run_can_go_on(tmp_path):
    """A real limit on the size of a file stands in for the disk's."""
    folder = str(tmp_path / "checkpoints")
    done = subprocess.run([sys.executable, "-c", FULL_DISK, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "1"
    assert Checkpoints(folder, keep=3, keep_best=True).steps() == [1, 2, 3]


TWO_PROCESSES = """
import json, sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
folder, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl.checkpoint import *
from jaxrl.config import MeshConfig
from jaxrl.mesh import make_mesh
whole = np.arange(64, dtype=np.float32).reshape(8, 8)

def state_on(mesh, spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return {"a": jax.make_array_from_callback((8, 8), sharding, lambda i: whole[i])}

state = state_on(make_mesh(MeshConfig(fsdp=4)), ("fsdp",))
checkpoints = Checkpoints(folder, keep=1, keep_best=True)
checkpoints.save(1, state, {"step": 1}, 0.5)
checkpoints.save(2, state, {"step": 2}, 0.1)
checkpoints.wait()
assert checkpoints.steps() == [1, 2], checkpoints.steps()
other = state_on(make_mesh(MeshConfig(data=2, tensor=2)), (None, "tensor"))
restored = checkpoints.restore(2, abstract_state(other))
for shard in restored["a"].addressable_shards:
    np.testing.assert_array_equal(shard.data, whole[shard.index])
print(json.dumps(checkpoints.host(2)))
checkpoints.close()
"""


def test_two_processes_save_and_restore_together(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", TWO_PROCESSES, str(tmp_path / "checkpoints"), str(port)]
    both = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for i in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert json.loads(out.splitlines()[-1]) == {"step": 2}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    alone = Checkpoints(tmp_path / "checkpoints", keep=1, keep_best=True)
    restored = alone.restore(1, {"a": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)})
    np.testing.assert_array_equal(restored["a"], np.arange(64).reshape(8, 8))
    alone.close()
