import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

from jaxrl.config import ConfigError, LoraConfig, MeshConfig
from jaxrl.mesh import make_mesh
from jaxrl.models.architecture import Architecture
from jaxrl.models.decoder import (
    Decoder,
    abstract_variables,
    head_matrix,
    init_variables,
    logical_axes,
    shardings,
    unstack_layers,
)
from jaxrl.models.hf import load_architecture, load_checkpoint
from jaxrl.models.rope import inverse_frequencies

# Every kind of parameter at once, in sizes that 2 × 2 × 2 divides.
FULL = Architecture.from_hf(
    dict(
        model_type="qwen3", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, attention_bias=True,
    )
)  # fmt: skip
FULL = dataclasses.replace(FULL, mlp_bias=True)
LORA = LoraConfig(rank=2)


def mesh_2x2x2():
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


@pytest.fixture(scope="module")
def full():
    """Variables of FULL with adapters that do something."""
    variables = init_variables(Decoder(FULL, lora=LORA), jax.random.key(3), None)
    return variables | {"lora": jax.tree.map(lambda x: x + 0.1, variables["lora"])}


@pytest.mark.parametrize("case", ["llama2", "llama3", "llama_bias", "smollm2", "qwen2", "qwen2_yarn", "qwen3", "qwen3_yarn"])
def test_logits_equal_transformers(goldens, ids, logits_of, case):
    architecture = load_architecture(goldens / case)
    params = load_checkpoint(goldens / case, architecture, None, "float32")
    golden = np.load(goldens / case / "logits.npy")
    assert np.abs(golden).max() > 2, "logits this small would hide an error"
    np.testing.assert_allclose(logits_of(Decoder(architecture), {"params": params}, ids), golden, rtol=0, atol=1e-4)


def test_stories260k_continues_as_transformers_does(stories, logits_of):
    architecture = load_architecture(stories)
    decoder = Decoder(architecture, scan_layers=False)
    variables = unstack_layers({"params": load_checkpoint(stories, architecture, None, "float32")})
    tokenizer = AutoTokenizer.from_pretrained(stories)
    goldens = json.loads((stories / "greedy.json").read_text())
    ids = np.zeros((len(goldens), 128), np.int32)
    lengths = np.array([golden["num_prompt"] for golden in goldens])
    for row, golden in enumerate(goldens):
        ids[row, : golden["num_prompt"]] = golden["ids"][: golden["num_prompt"]]
    rows = np.arange(len(goldens))
    for _ in range(100):
        ids[rows, lengths] = np.asarray(logits_of(decoder, variables, ids))[rows, lengths - 1].argmax(-1)
        lengths += 1
    for row, golden in enumerate(goldens):
        assert ids[row, : lengths[row]].tolist() == golden["ids"]
    text = tokenizer.decode(ids[0, : lengths[0]], skip_special_tokens=True)
    assert text.startswith("Once upon a time, there was a little girl named Lily. She loved to play outside in the park.")


def test_scanned_unrolled_and_rematerialised_layers_agree(causal, ids, full):
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))

    @jax.jit(static_argnums=0)
    def grad(decoder, variables):
        def loss(variables):
            return jnp.sum(jnp.sin(decoder.apply(variables, ids[:, :8], positions, causal(FULL))[0]))

        return jax.value_and_grad(loss)(variables)

    value, grads = jax.device_get(grad(Decoder(FULL, lora=LORA, scan_layers=False), unstack_layers(full)))
    for remat in ("dots", "full"):
        other_value, other = jax.device_get(grad(Decoder(FULL, lora=LORA, remat=remat), full))
        np.testing.assert_allclose(value, other_value, rtol=1e-6)
        unused = [path for path, g in jax.tree_util.tree_leaves_with_path(other) if not np.abs(g).max() > 0]
        assert [path[1].key for path in unused] == ["lm_head"]  # the head is the caller's
        for a, b in zip(jax.tree.leaves(unstack_layers(other)), jax.tree.leaves(grads), strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * max(np.linalg.norm(b), 1e-3)


def test_positions_not_offsets_turn_the_heads(causal, ids, full):
    hidden = jax.jit(lambda positions: Decoder(FULL).apply(full, ids[:1, :8], positions, causal(FULL))[0])
    plain, shifted, spread = (hidden(jnp.arange(8)[None] * step + start) for step, start in ((1, 0), (1, 9), (3, 0)))
    np.testing.assert_allclose(plain, shifted, atol=1e-5)  # only distances matter
    assert jnp.abs(plain - spread).max() > 1e-3


def test_cache_leads_with_the_layer_axis(causal, ids, full):
    cache = {"k": jnp.zeros((FULL.num_layers, 2, 8, FULL.num_kv_heads, FULL.head_dim))}
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))

    @jax.jit(static_argnums=0)
    def run(decoder, variables, cache):
        return decoder.apply(variables, ids[:, :8], positions, causal(FULL), cache)[1]

    scanned = run(Decoder(FULL), full, cache)
    unrolled = run(Decoder(FULL, scan_layers=False), unstack_layers(full), cache)
    listed = run(Decoder(FULL, scan_layers=False), unstack_layers(full), [{"k": row} for row in cache["k"]])
    assert (jnp.abs(scanned["k"]).max(axis=(1, 2, 3, 4)) > 0).all()
    assert isinstance(listed, list)
    np.testing.assert_allclose(unrolled["k"], scanned["k"], atol=1e-5)
    np.testing.assert_allclose(jnp.stack([one["k"] for one in listed]), scanned["k"], atol=1e-5)


def test_bfloat16_activations_stay_near_float32(goldens, ids, logits_of):
    architecture = load_architecture(goldens / "qwen3")
    params = load_checkpoint(goldens / "qwen3", architecture, None, "bfloat16")
    out = logits_of(Decoder(architecture, dtype=jnp.bfloat16), {"params": params}, ids)
    golden = np.load(goldens / "qwen3" / "logits.npy")
    assert out.dtype == jnp.bfloat16
    assert np.sqrt(np.mean((np.asarray(out, np.float32) - golden) ** 2)) < 0.03 * golden.std()


def test_no_parameter_is_replicated_by_accident():
    """On 2 × 2 × 2 (data, fsdp, tensor): matrices split four ways, low-rank factors and biases two ways, norms whole."""
    mesh = mesh_2x2x2()
    decoder = Decoder(FULL, lora=LORA)
    shapes = jax.tree_util.tree_leaves_with_path(abstract_variables(decoder))
    placed = jax.tree.leaves(shardings(decoder, mesh))
    names = jax.tree.leaves(logical_axes(decoder), is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    assert len(shapes) == len(placed) == len(names)
    for (path, leaf), sharding, axes in zip(shapes, placed, names, strict=True):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        assert len(axes) == leaf.ndim and None not in axes, f"{path} has dimensions without a logical name: {axes}"
        ways = int(np.prod(leaf.shape) / np.prod(sharding.shard_shape(leaf.shape)))
        expected = 1 if path.endswith("scale") else 2 if "bias" in path or "lora" in path else 4
        assert ways == expected, f"{path} {leaf.shape} is split {ways} ways by {sharding.spec}"


def test_sharded_equals_whole(ids, full, logits_of):
    mesh = mesh_2x2x2()
    decoder = Decoder(FULL, lora=LORA)
    split = init_variables(decoder, jax.random.key(3), mesh)
    assert jax.tree.map(lambda x: x.sharding, split) == shardings(decoder, mesh)
    jax.tree.map(np.testing.assert_array_equal, full["params"], split["params"])
    tokens = np.repeat(ids[:, :8], 2, axis=0)
    out = logits_of(decoder.clone(mesh=mesh), split | {"lora": jax.tree.map(lambda x: x + 0.1, split["lora"])}, tokens)
    np.testing.assert_allclose(out, logits_of(decoder, full, tokens), rtol=0, atol=1e-5)


def test_a_size_the_mesh_does_not_divide_is_an_error_that_names_it():
    odd = dataclasses.replace(FULL, vocab_size=63)
    with pytest.raises(ConfigError, match=r"mesh.tensor.*embed_tokens/embedding.*63"):
        shardings(Decoder(odd), mesh_2x2x2())


def test_head_matrix(goldens):
    for case, tied in (("qwen3", True), ("llama2", False)):
        architecture = load_architecture(goldens / case)
        assert architecture.tie_embeddings == tied
        params = load_checkpoint(goldens / case, architecture, None, "float32")
        head = head_matrix(params, architecture)
        assert head.shape == (architecture.hidden_size, architecture.vocab_size)
        np.testing.assert_array_equal(head, params["embed_tokens"]["embedding"].T if tied else params["lm_head"]["kernel"])


def test_scaled_frequencies_lie_between_stretched_and_plain(goldens):
    for case in ("llama3", "qwen2_yarn", "qwen3_yarn"):
        rope = load_architecture(goldens / case).rope
        scaled, _ = inverse_frequencies(rope, 32)
        plain, _ = inverse_frequencies(dataclasses.replace(rope, kind="default"), 32)
        assert np.all(scaled <= plain * (1 + 1e-12)) and np.all(scaled >= plain / rope.factor * (1 - 1e-12))
        assert scaled[-1] < plain[-1]
