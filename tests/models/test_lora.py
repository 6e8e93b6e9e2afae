import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.config import ConfigError, LoraConfig, MeshConfig
from jaxrl.mesh import make_mesh
from jaxrl.models.decoder import Decoder, abstract_variables, init_variables, shardings, unstack_layers
from jaxrl.models.hf import load_architecture, load_checkpoint
from jaxrl.models.peft import load_adapter, merge_lora, read_adapter_config, save_adapter
from jaxrl.models.safetensors_files import CheckpointFileError

GOLDEN = LoraConfig(rank=4, alpha=6, targets=("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def architecture(goldens):
    return load_architecture(goldens / "qwen3")


@pytest.fixture(scope="module")
def adapted(goldens, architecture):
    """The golden base with the golden adapter."""
    params = load_checkpoint(goldens / "qwen3", architecture, None, "float32")
    return {"params": params, "lora": load_adapter(goldens / "qwen3_adapter", architecture, GOLDEN, None, "float32")}


def test_logits_equal_peft(goldens, ids, logits_of, architecture, adapted):
    golden = np.load(goldens / "qwen3_adapter" / "logits.npy")
    assert np.abs(golden - np.load(goldens / "qwen3" / "logits.npy")).max() > 1, "the adapter must matter"
    decoder = Decoder(architecture, lora=GOLDEN)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    split = jax.device_put(adapted, shardings(decoder, mesh))
    merged = {"params": jax.jit(merge_lora, static_argnums=1)(adapted, GOLDEN)}
    variants = {
        "scanned": (decoder, adapted),
        "unrolled": (Decoder(architecture, lora=GOLDEN, scan_layers=False), unstack_layers(adapted)),
        "sharded": (decoder, split),
        "merged": (Decoder(architecture), merged),
    }
    for name, (variant, variables) in variants.items():
        np.testing.assert_allclose(logits_of(variant, variables, ids), golden, rtol=0, atol=1e-4, err_msg=name)


def test_merging_unrolled_layers_and_no_adapters(architecture, adapted):
    unrolled = merge_lora(unstack_layers(adapted), GOLDEN)
    stacked = unstack_layers({"params": merge_lora(adapted, GOLDEN)})["params"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), unrolled, stacked)
    assert merge_lora({"params": adapted["params"]}, None) is adapted["params"]


def test_an_untrained_adapter_changes_no_bit_and_only_adapters_get_gradients(architecture, adapted, ids, causal):
    decoder = Decoder(architecture, lora=LoraConfig(rank=2))
    lora = init_variables(decoder, jax.random.key(0), None)["lora"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(lora):
        is_b = path[-1].key == "lora_b"
        assert bool((leaf == 0).all()) == is_b
        if not is_b:  # uniform in ±1/sqrt(in), each layer its own
            bound = leaf.shape[1] ** -0.5
            assert 0.8 * bound < float(jnp.abs(leaf).max()) <= bound
            assert not bool((leaf[0] == leaf[1]).any())
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))

    @jax.jit(static_argnums=0)
    def hidden(decoder, variables):
        return decoder.apply(variables, ids[:, :8], positions, causal(architecture))[0]

    base = {"params": adapted["params"]}
    np.testing.assert_array_equal(hidden(decoder, base | {"lora": lora}), hidden(Decoder(architecture), base))

    @jax.jit
    def gradient(lora):
        return jax.grad(lambda lora: jnp.sum(jnp.sin(hidden(decoder, base | {"lora": lora}))))(lora)

    for path, g in jax.tree_util.tree_leaves_with_path(jax.device_get(gradient(lora))):
        assert (np.abs(g).max() > 0) == (path[-1].key == "lora_b")  # A's gradient passes through B, which is 0


def test_adapters_exist_for_the_targets_alone(architecture):
    lora = abstract_variables(Decoder(architecture, lora=LoraConfig(rank=3, targets=("up_proj",))))["lora"]
    assert jax.tree.map(lambda x: x.shape, lora) == {
        "layers": {"mlp": {"up_proj": {"lora_a": (2, 32, 3), "lora_b": (2, 3, 48)}}}
    }
    for targets in (("lm_head", "q_proj"), ()):
        with pytest.raises(ConfigError, match="model.lora.targets"):
            abstract_variables(Decoder(architecture, lora=LoraConfig(targets=targets)))


def test_adapter_files_round_trip_under_pefts_names(goldens, tmp_path, architecture, adapted):
    save_adapter(tmp_path / "out", adapted["lora"], architecture, GOLDEN, "qwen3")
    before = load_file(goldens / "qwen3_adapter" / "adapter_model.safetensors")
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and before[name].tobytes() == after[name].tobytes() for name in before)
    theirs = json.loads((goldens / "qwen3_adapter" / "adapter_config.json").read_text())
    ours = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    differs = {key for key in ours if ours[key] != (sorted(theirs[key]) if key == "target_modules" else theirs.get(key))}
    assert not differs
    config = read_adapter_config(tmp_path / "out")
    assert (config.rank, config.alpha, set(config.targets)) == (4, 6, set(GOLDEN.targets))
    with pytest.raises(CheckpointFileError, match="already holds an adapter"):
        save_adapter(tmp_path / "out", adapted["lora"], architecture, GOLDEN)


def test_adapters_load_onto_a_mesh(goldens, architecture, adapted):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = shardings(Decoder(architecture, lora=GOLDEN), mesh)["lora"]
    split = load_adapter(goldens / "qwen3_adapter", architecture, GOLDEN, placed, "float32")
    assert jax.tree.map(lambda x: x.sharding, split) == placed
    jax.tree.map(np.testing.assert_array_equal, split, adapted["lora"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_dora": True}, "use_dora = True is not implemented"),
        ({"use_rslora": True}, "use_rslora"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"use_variant_to_come": True}, "use_variant_to_come"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ],
)
def test_more_than_plain_lora_is_refused_by_name(goldens, tmp_path, fields, says):
    folder = shutil.copytree(goldens / "qwen3_adapter", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text()) | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFileError, match=says):
        read_adapter_config(folder)


def test_an_adapter_that_does_not_fit_is_refused_by_name(goldens, tmp_path, architecture):
    folder = shutil.copytree(goldens / "qwen3_adapter", tmp_path / "adapter")
    for change in ({"rank": 8}, {"alpha": 8}, {"targets": ("q_proj",)}):
        with pytest.raises(ConfigError, match=f"model.lora.{next(iter(change))}"):
            load_adapter(folder, architecture, GOLDEN.model_copy(update=change), None, "float32")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointFileError, match=f"tensor {name} missing"):
        load_adapter(folder, architecture, GOLDEN, None, "float32")
    save_file(tensors | {name: tensors[name][:-1].copy()}, file)
    with pytest.raises(CheckpointFileError, match=rf"tensor {name} in .*adapter_model.safetensors has shape \[31, 4\]"):
        load_adapter(folder, architecture, GOLDEN, None, "float32")
    save_file(tensors | {name.replace("v_proj", "k_proj"): tensors[name]}, file)
    with pytest.raises(ConfigError, match="model.lora.targets"):
        load_adapter(folder, architecture, GOLDEN, None, "float32")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(CheckpointFileError, match="no such file.*adapter_config.json"):
        read_adapter_config(folder)
