"""What a publish sends: the tensors of a checkpoint, bit for bit, with checksums that notice what changed on the way."""

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from bridge.client.transports.file import SharedFiles
from bridge.client.weights import Weights, checksum
from jaxrl.config import MeshConfig
from jaxrl.mesh import make_mesh
from jaxrl.models.decoder import Decoder, shardings
from jaxrl.models.hf import load_architecture, load_checkpoint, save_checkpoint

GOLDENS = Path(__file__).parent.parent / "data" / "models"
CASES = ["llama2", "llama_bias", "qwen2", "qwen3", "smollm2"]


def sent(weights: Weights) -> dict[str, np.ndarray]:
    """Tensor → its bytes, cut from the units as a server does it; checksums are compared on the way."""
    found = {}
    for unit in weights.units():
        data = np.asarray(unit.words).tobytes()
        for spec, offset, total in zip(unit.specs, unit.offsets, unit.checksums.tolist(), strict=True):
            tensor = data[offset : offset + spec.num_bytes]
            assert offset % 16 == 0 and checksum(tensor) == total, spec.name
            found[spec.name] = tensor
    return found


def saved(folder: Path, params, architecture, dtype: str) -> dict[str, bytes]:
    save_checkpoint(folder, params, architecture, dtype)
    return {name: value.tobytes() for name, value in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_tensors_are_those_of_a_checkpoint(tmp_path, case, dtype):
    architecture = load_architecture(GOLDENS / case)
    params = load_checkpoint(GOLDENS / case, architecture, None, "float32")
    weights = Weights(params, architecture, dtype)
    tensors = sent(weights)
    assert tensors == saved(tmp_path / "saved", params, architecture, dtype)
    manifest = weights.manifest()["tensors"]
    assert [spec["name"] for spec in manifest] == list(tensors)
    assert sum(unit.num_bytes for unit in weights.units()) == weights.num_bytes
    assert max(unit.num_bytes for unit in weights.units()) == weights.largest_unit
    on_host = Weights(jax.tree.map(np.asarray, params), architecture, dtype)
    assert sent(on_host) == tensors


def test_shards_are_gathered_unit_by_unit(tmp_path):
    architecture = load_architecture(GOLDENS / "qwen3")
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    placed = shardings(Decoder(architecture, mesh=mesh), mesh)["params"]
    params = load_checkpoint(GOLDENS / "qwen3", architecture, placed, "float32")
    weights = Weights(params, architecture, "float32")
    assert sent(weights) == saved(tmp_path / "saved", params, architecture, "float32")
    assert all(len(unit.words.devices()) == 1 for unit in weights.units())


def test_a_file_holds_the_tensors_and_nothing_else_that_has_their_names(tmp_path):
    architecture = load_architecture(GOLDENS / "qwen2")
    params = load_checkpoint(GOLDENS / "qwen2", architecture, None, "float32")
    weights = Weights(params, architecture, "bfloat16")
    transport = SharedFiles(tmp_path / "shared")
    transport.begin(weights.num_bytes, weights.largest_unit)
    source = transport.put(0, list(weights.units()), "id")
    tensors = {name: value.tobytes() for name, value in load_file(source["path"]).items() if not name.endswith(".padding")}
    assert tensors == sent(weights)
    transport.close()
    assert not (tmp_path / "shared").exists()


def test_the_checksum_is_its_equation_and_depends_on_the_order():
    assert checksum(b"") == 0
    assert checksum(b"\x01\0\0\0\x02\0\0\0\x03") == 1 * 1 + 3 * 2 + 5 * 3
    words = np.random.default_rng(0).integers(0, 2**32, 1001, dtype=np.uint32)
    total = sum((2 * i + 1) * int(w) for i, w in enumerate(words)) % 2**32
    assert checksum(words.tobytes()) == total
    swapped = words.copy()
    swapped[[3, 500]] = swapped[[500, 3]]
    flipped = words.copy()
    flipped[7] ^= 1 << 30
    assert checksum(swapped.tobytes()) != total != checksum(flipped.tobytes())
