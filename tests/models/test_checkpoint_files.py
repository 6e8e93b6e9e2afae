import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxrl.config import MeshConfig
from jaxrl.mesh import make_mesh
from jaxrl.models import stacking
from jaxrl.models.architecture import UnsupportedModelError
from jaxrl.models.decoder import Decoder, abstract_variables, shardings
from jaxrl.models.hf import load_architecture, load_checkpoint, save_checkpoint
from jaxrl.models.safetensors_files import INDEX, CheckpointFileError, TensorFiles


def file_tensors(folder) -> dict[str, np.ndarray]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.fixture
def copy(goldens, tmp_path):
    """A copy of a golden checkpoint that a test may spoil."""
    return lambda case: shutil.copytree(goldens / case, tmp_path / case)


def respoil(file, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("case", "dtype"), [("llama2", "float32"), ("llama_bias", "float16"), ("qwen3", "bfloat16"), ("qwen2_yarn", "bfloat16")]
)
@pytest.mark.parametrize("param_dtype", ["float32", "own"])
def test_round_trip_is_bit_exact(goldens, tmp_path, case, dtype, param_dtype):
    architecture = load_architecture(goldens / case)
    params = load_checkpoint(goldens / case, architecture, None, dtype if param_dtype == "own" else param_dtype)
    save_checkpoint(tmp_path / "out", params, architecture, dtype)
    before, after = file_tensors(goldens / case), file_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and value.tobytes() == after[name].tobytes(), name
    assert load_architecture(tmp_path / "out") == architecture


def test_written_in_several_files_with_an_index(goldens, stories, tmp_path):
    architecture = load_architecture(goldens / "llama3")
    params = load_checkpoint(goldens / "llama3", architecture, None, "float32")
    save_checkpoint(tmp_path / "out", params, architecture, "bfloat16", stories, max_shard_bytes=8_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 10_000 for file in files)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in file_tensors(tmp_path / "out").values())
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            assert {name for name, where in index["weight_map"].items() if where == file.name} == set(opened.keys())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (stories / "tokenizer.json").read_bytes()
    again = load_checkpoint(tmp_path / "out", architecture, None, "float32")
    jax.tree.map(np.testing.assert_array_equal, params, again)


def test_parameters_are_those_of_the_decoder(goldens):
    for case in ("llama_bias", "qwen2_yarn", "qwen3_yarn", "smollm2"):
        architecture = load_architecture(goldens / case)
        params = load_checkpoint(goldens / case, architecture, None, "bfloat16")
        expected = abstract_variables(Decoder(architecture, param_dtype=jnp.bfloat16))["params"]
        assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


def test_a_device_gets_its_shard_and_nothing_else_is_read(goldens, monkeypatch, tmp_path):
    architecture = load_architecture(goldens / "llama2")
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = shardings(Decoder(architecture), mesh)["params"]
    read = []
    original = TensorFiles.read

    def spy(self, name, index):
        read.append((name, original(self, name, index)))
        return read[-1][1]

    monkeypatch.setattr(TensorFiles, "read", spy)
    params = load_checkpoint(goldens / "llama2", architecture, placed, "float32")
    sharded_reads = len(read)
    whole = load_checkpoint(goldens / "llama2", architecture, None, "float32")
    for a, b, sharding in zip(*map(jax.tree.leaves, (params, whole, placed)), strict=True):
        assert a.sharding == sharding
        np.testing.assert_array_equal(a, b)
    for layer in range(architecture.num_layers):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        parts = [part.shape for tensor, part in read[:sharded_reads] if tensor == name]
        assert parts == [(16, 16)] * 4  # [32, 32] over tensor 2 and fsdp 2; the replicas of `data` share a read
    save_checkpoint(tmp_path / "out", params, architecture, "float32")
    before, after = file_tensors(goldens / "llama2"), file_tensors(tmp_path / "out")
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_tied_model_that_stores_its_head(copy):
    folder = copy("qwen3")
    architecture = load_architecture(folder)
    respoil(folder / "model.safetensors", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert "lm_head" not in load_checkpoint(folder, architecture, None, "float32")
    respoil(folder / "model.safetensors", lambda t: t.update({"lm_head.weight": t["lm_head.weight"] * 2}))
    with pytest.raises(CheckpointFileError, match="lm_head.weight.*differs.*tie_word_embeddings"):
        load_checkpoint(folder, architecture, None, "float32")


def test_rotary_buffers_of_old_checkpoints_are_ignored(copy):
    folder = copy("llama2")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    respoil(folder / "model.safetensors", lambda t: t.update(buffer))
    load_checkpoint(folder, load_architecture(folder), None, "float32")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"tensor model.layers.1.mlp.up_proj.weight missing from model.safetensors"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones(2)}), r"tensor model.layers.2.mlp.up_proj.weight in .*model.safetensors is no part"),
        (lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}), r"tensor model.norm.weight in .*model.safetensors has shape \[31\].*\[32\]"),
        (lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}), r"tensor model.norm.weight in .*model.safetensors is I8"),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)  # fmt: skip
def test_a_wrong_tensor_is_named(copy, change, says):
    folder = copy("llama2")
    respoil(folder / "model.safetensors", change)
    with pytest.raises(CheckpointFileError, match=says):
        load_checkpoint(folder, load_architecture(folder), None, "float32")


def test_an_untied_config_needs_a_head(copy):
    folder = copy("qwen3")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFileError, match="tensor lm_head.weight missing"):
        load_checkpoint(folder, load_architecture(folder), None, "float32")


def test_a_wrong_file_is_named(copy, tmp_path):
    folder = copy("qwen2_yarn")
    architecture = load_architecture(folder)
    third = folder / "model-00003-of-00005.safetensors"

    def fails(says):
        with pytest.raises(CheckpointFileError, match=says):
            load_checkpoint(folder, architecture, None, "float32")

    content = third.read_bytes()
    third.unlink()
    fails("no such file.*model-00003-of-00005.safetensors")
    third.write_bytes(content[:-100])
    fails("model-00003-of-00005.safetensors is not a readable")
    third.write_bytes(b"\xff" * 100)
    fails("model-00003-of-00005.safetensors is not a readable")
    third.write_bytes(content)
    load_checkpoint(folder, architecture, None, "float32")

    index = json.loads((folder / INDEX).read_text())
    name = next(n for n, where in index["weight_map"].items() if where == third.name)
    shutil.copyfile(folder / "model-00002-of-00005.safetensors", third)
    fails("is in both .*00002.* and .*00003")
    third.write_bytes(content)
    respoil(third, lambda t: t.pop(name))
    fails(f"tensor {name} is missing from .*00003")
    (folder / INDEX).write_text("{}")
    fails(f"{INDEX} is not an index")
    (folder / INDEX).unlink()
    fails("neither")


def test_a_wrong_config_is_named(tmp_path):
    with pytest.raises(CheckpointFileError, match="no such file.*config.json"):
        load_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointFileError, match="config.json is not JSON"):
        load_architecture(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        load_architecture(tmp_path)


def test_nothing_is_overwritten(goldens, copy):
    folder = copy("qwen3")
    architecture = load_architecture(folder)
    params = load_checkpoint(folder, architecture, None, "float32")
    with pytest.raises(CheckpointFileError, match="already holds a model"):
        save_checkpoint(folder, params, architecture, "float32")
    with pytest.raises(CheckpointFileError, match="int32"):
        save_checkpoint(folder / "new", params, architecture, "int32")


def test_put_and_at():
    tree: dict = {}
    stacking.put(tree, ("a", "b"), 1)
    stacking.put(tree, ("a", "c"), 2)
    assert tree == {"a": {"b": 1, "c": 2}} and stacking.at(tree, ("a", "c")) == 2
