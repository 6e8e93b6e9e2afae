"""Schedules, what decays, the order of the chain; Muon, the correction of a delay, the learning rate by lag."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forest import make_architecture
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.checkpoint import Checkpoints, abstract_state
from jaxrl.config import LoraConfig, MeshConfig, OptimizerConfig
from jaxrl.mesh import make_mesh
from jaxrl.models.decoder import Decoder, abstract_variables
from jaxrl.trainer.optimizer import correct_delay, decay_mask, like_params, make_optimizer, make_schedule, parts


def test_schedules():
    constant = make_schedule(1.0, "constant", 4, 100)
    assert [float(constant(i)) for i in (0, 1, 4, 99)] == pytest.approx([0.2, 0.4, 1.0, 1.0])
    linear = make_schedule(2.0, "linear", 10, 110)
    assert [float(linear(i)) for i in (10, 60, 110)] == pytest.approx([2.0, 1.0, 0.0])
    cosine = make_schedule(2.0, "cosine", 0, 100)
    assert [float(cosine(i)) for i in (0, 50, 100)] == pytest.approx([2.0, 1.0, 0.0], abs=1e-6)


def test_norms_and_biases_do_not_decay():
    for lora in (None, LoraConfig(rank=2)):
        shapes = abstract_variables(Decoder(make_architecture(), lora=lora))
        mask = jax.tree_util.tree_leaves_with_path(decay_mask(shapes["params"]))
        assert {p[-1].key for p, decays in mask if decays} == {"kernel", "embedding"}
        assert {p[-1].key for p, decays in mask if not decays} == {"scale"}
        if lora is not None:
            assert all(jax.tree.leaves(decay_mask(shapes["lora"])))


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_two_updates_against_the_equations(clip_norm):
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, b1=0.9, b2=0.99, eps=1e-3, clip_norm=clip_norm)
    optimizer = make_optimizer(config, make_schedule(0.1, "constant", 0, 10))
    params = {"kernel": jnp.array([[1.0, -2.0]]), "bias": jnp.array([3.0])}
    gradients = [
        {"kernel": jnp.array([[3.0, 0.1]]), "bias": jnp.array([4.0])},
        {"kernel": jnp.array([[0.1, 0.2]]), "bias": jnp.array([0.3])},
    ]
    state = optimizer.init(params)
    expected = np.array([1.0, -2.0, 3.0])
    m = v = 0.0
    for step, tree in enumerate(gradients, start=1):
        updates, state = optimizer.update(tree, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        g = np.concatenate([np.ravel(tree["kernel"]), np.ravel(tree["bias"])])
        if clip_norm:
            g = g * min(1, clip_norm / np.linalg.norm(g))
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        direction = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.99**step)) + 1e-3)
        expected = expected - 0.1 * (direction + 0.5 * np.array([1, 1, 0]) * expected)
    np.testing.assert_allclose(np.concatenate([np.ravel(params["kernel"]), params["bias"]]), expected, rtol=1e-5)


MUON = OptimizerConfig(kind="muon", lr=0.1, weight_decay=0.5, momentum=0.9, clip_norm=0.0)
CONSTANT = make_schedule(0.1, "constant", 0, 10)


def test_muon_has_the_linear_layers():
    for tie, lora in ((True, None), (False, None), (True, LoraConfig(rank=2))):
        decoder = Decoder(replace(make_architecture(), tie_embeddings=tie), lora=lora)
        labels = jax.tree_util.tree_leaves_with_path(parts(abstract_variables(decoder)["lora" if lora else "params"]))
        names = {"/".join(e.key for e in path[-2:]): label for path, label in labels}
        rest = {name for name, label in names.items() if label == "adamw"}
        norms = {f"{n}/scale" for n in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")}
        assert rest == (set() if lora else norms | {"embed_tokens/embedding"} | (set() if tie else {"lm_head/kernel"}))
        assert len(names) - len(rest) == (14 if lora else 7)


def naive_muon(matrix, gradients):
    """Jordan's: Nesterov momentum, five quintic Newton–Schulz steps, one layer at a time; decoupled decay."""
    buffer = 0.0
    for g in gradients:
        buffer = 0.9 * buffer + g
        x = g + 0.9 * buffer
        x = x.T if x.shape[0] > x.shape[1] else x
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if g.shape[0] > g.shape[1] else x
        matrix = matrix - 0.1 * (0.2 * max(g.shape) ** 0.5 * x + 0.5 * matrix)
    return matrix


@pytest.mark.parametrize("layout", [{}, {"data": 2, "fsdp": 2}], ids=["one device", "fsdp"])
def test_muon_against_the_equations_layer_by_layer(layout):
    """On a mesh a matrix is whole on one device, and no device has more than its share of the layers."""
    rng = np.random.default_rng(0)
    mesh = make_mesh(MeshConfig(**layout), jax.devices()[: 4 if layout else 1])
    stacks = {"wide": rng.normal(size=(3, 4, 6)), "tall": rng.normal(size=(3, 8, 4))}
    params = {name: {"kernel": jnp.asarray(x, jnp.float32)} for name, x in stacks.items()}
    gradients = [jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params) for _ in range(2)]
    cut = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(None, "fsdp")), params)
    optimizer = make_optimizer(MUON, CONSTANT, cut)

    def two(params, gradients):
        state = optimizer.init(params)
        for g in gradients:
            updates, state = optimizer.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params

    run = jax.jit(two, in_shardings=(cut, [cut, cut]), out_shardings=cut).lower(params, gradients).compile()
    for name, layers in run(*jax.device_put((params, gradients), (cut, [cut, cut]))).items():
        for i, layer in enumerate(layers["kernel"]):
            expected = naive_muon(stacks[name][i], [np.asarray(g[name]["kernel"][i], np.float64) for g in gradients])
            np.testing.assert_allclose(layer, expected, rtol=2e-4, atol=2e-5)
    products = set(re.findall(r"f32\[([\d,]+)\][^=]* dot\(", run.as_text()))
    assert products == ({"4,4", "4,6", "4,8"} if layout else {"3,4,4", "3,4,6", "3,4,8"})


def test_the_state_of_muon_is_saved_and_opens_on_another_mesh(tmp_path):
    params = {"mlp": {"kernel": jnp.ones((3, 4, 4))}, "norm": {"scale": jnp.ones(4)}}
    optimizer = make_optimizer(MUON.model_copy(update={"delay_correction": 1.0}), CONSTANT)
    _, state = jax.jit(optimizer.update)(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    mesh = make_mesh(MeshConfig(data=1, fsdp=4), jax.devices()[:4])
    cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "fsdp"), ()))
    placed = like_params(state, {"mlp": {"kernel": cut}, "norm": {"scale": whole}}, whole)
    assert sum(x is cut for x in jax.tree.leaves(placed)) == 2  # momentum and the last update
    checkpoints = Checkpoints(tmp_path, 1, False)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    restored = checkpoints.restore(1, abstract_state(state, placed))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_the_delay_correction_extrapolates_complete_updates():
    optimizer = correct_delay(optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1)), 0.5)
    x, state, previous = 2.0, optimizer.init(jnp.zeros(())), None
    for g in (1.0, -3.0, 0.25):
        u = -0.1 * (g + 0.5 * x)
        expected = x + u + (0.5 * (u - previous) if previous is not None else 0.0)
        updates, state = optimizer.update(jnp.asarray(g), state, jnp.asarray(x))
        x, previous = x + float(updates), u
        assert x == pytest.approx(expected)


def test_the_delay_correction_recovers_half_of_what_a_delay_costs():
    """AdamW on a small classifier, every gradient one update old: mean loss over 30 updates and three seeds."""

    def course(seed, delay, strength):
        keys = jax.random.split(jax.random.key(seed), 5)
        x = jax.random.normal(keys[0], (256, 8))
        label = jnp.argmax(jnp.tanh(x @ jax.random.normal(keys[1], (8, 16))) @ jax.random.normal(keys[2], (16, 4)), -1)
        params = {"a": 0.3 * jax.random.normal(keys[3], (8, 32)), "b": 0.3 * jax.random.normal(keys[4], (32, 4))}

        def loss(p):
            return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ p["a"]) @ p["b"], label).mean()

        optimizer = correct_delay(optax.adamw(0.03, b1=0.9, b2=0.95), strength)

        def step(carry, _):
            params, before, state = carry
            updates, state = optimizer.update(jax.grad(loss)(before if delay else params), state, params)
            return (optax.apply_updates(params, updates), params, state), loss(params)

        return jax.lax.scan(step, (params, params, optimizer.init(params)), None, length=30)[1].mean()

    run = jax.jit(lambda seed: (course(seed, 0, 0.0), course(seed, 1, 0.0), course(seed, 1, 1.0)))
    on_time, late, corrected = np.mean([run(seed) for seed in range(3)], axis=0)
    assert late > 1.02 * on_time
    assert late - corrected >= 0.5 * (late - on_time)


def test_the_learning_rate_falls_with_the_lag():
    config = OptimizerConfig(lr=0.1, lag_scaling=0.5, weight_decay=0.3)
    plain, scaled = (make_optimizer(c, CONSTANT) for c in (config.model_copy(update={"lag_scaling": 0.0}), config))
    params, gradient = {"kernel": jnp.ones((2, 2))}, {"kernel": jnp.full((2, 2), 0.25)}
    expected, _ = plain.update(gradient, plain.init(params), params)
    updates, _ = scaled.update(gradient, scaled.init(params), params, lag=3.0)
    np.testing.assert_allclose(updates["kernel"], expected["kernel"] / 2.5, rtol=1e-6)
