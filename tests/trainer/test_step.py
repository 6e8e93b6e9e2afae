"""The optimizer step: against one by one, NaN, donation, recompilation, adapters, SFT, bad layouts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forest import gspo, make_architecture, make_config, make_forest, naive_logprobs, naive_step, pad, ppo

from jaxrl.config import ConfigError, MeshConfig
from jaxrl.losses.advantages import supervised
from jaxrl.mesh import make_mesh
from jaxrl.metrics.names import PARITY
from jaxrl.models.decoder import init_variables
from jaxrl.packing import RowLimits, pack
from jaxrl.trainer.step import make_trainer

LR = 1e-3
CONFIG = make_config(
    algorithm={"entropy_weight": 0.05},
    optimizer={"lr": LR, "weight_decay": 0.1, "clip_norm": 0.5},
    sft={"data": "traces.jsonl", "lr": 1e-2, "steps": 20, "warmup_steps": 2},
)
LORA = make_config(model={"lora": {"rank": 4}}, optimizer={"lr": LR}, algorithm={"kl_weight": 0.1})
ACROSS_ROWS = make_config(
    pipeline={"mode": "async"},
    algorithm={
        "loss": "gspo",
        "clip_low": 0.1,
        "mask_level": "geometric",
        "mask_low": 0.97,
        "mask_high": 1.03,
        "kl_weight": 0.1,
    },
    optimizer={"lr": LR, "kind": "muon", "delay_correction": 1.0, "lag_scaling": 0.5, "clip_norm": 0.0},
)


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module")
def trainer():
    return make_trainer(CONFIG, make_architecture(), one_device())


@pytest.fixture(scope="module")
def variables(trainer):
    return init_variables(trainer.decoder, jax.random.key(0), trainer.mesh)


def batches_of(forest):
    return pack(forest, RowLimits.from_config(CONFIG.packing), CONFIG.packing.rows)[0]


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_step_is_adamw_on_the_gradient_of_the_trajectories_one_by_one(trainer, variables):
    forest = make_forest()
    state, metrics = trainer.train_step(trainer.init(variables), batches_of(forest))

    @jax.jit
    def one_by_one(params, padded):
        return jax.value_and_grad(lambda p: ppo(naive_step(trainer.decoder, {"params": p}, padded), CONFIG.algorithm))(params)

    loss, gradient = one_by_one(variables["params"], pad(forest))
    norm = float(optax.tree.norm(gradient))
    assert norm > 0.5, "the clip acts"
    for path, new in jax.tree_util.tree_flatten_with_path(state.trainable)[0]:
        old, g = variables["params"], gradient
        for key in path:
            old, g = old[key.key], g[key.key]
        g = np.asarray(g, np.float64) * 0.5 / norm
        decay = 0.0 if path[-1].key == "scale" else 0.1
        # After one update the moments, their bias corrected, are g and g².
        expected = np.asarray(old) - LR * (g / (np.abs(g) + 1e-8) + decay * np.asarray(old))
        np.testing.assert_allclose(new, expected, rtol=0, atol=1e-2 * LR, err_msg=jax.tree_util.keystr(path))
    assert int(state.step) == 1
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["gradient_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(metrics["learning_rate"]) == pytest.approx(LR)
    assert int(metrics["terms"]) == sum(int(t.trajectory.trainable.sum()) for t in forest)
    assert all(x.shape == () for x in metrics.values()) and int(metrics["nonfinite"]) == 0


def test_a_loss_that_sums_across_rows_and_a_reference():
    """Two steps of everything a step can have: sums of episodes that lie in several rows and microbatches, KL to the
    weights of step 0, Muon. The second step's loss is the equation's, its state all finite."""
    trainer = make_trainer(ACROSS_ROWS, make_architecture(), one_device())
    variables = init_variables(trainer.decoder, jax.random.key(0), trainer.mesh)
    forest, padded = make_forest(), pad(make_forest())
    batches = batches_of(forest)
    assert len(batches) > 1
    state, metrics = trainer.train_step(trainer.init(variables), batches)
    assert float(metrics["kl_reference"]) < 1e-10
    assert_same(state.reference, variables["params"])
    held = jax.tree.map(jnp.copy, state.trainable)
    state, metrics = trainer.train_step(state, batches)

    @jax.jit
    def one_by_one(params):
        x = naive_step(trainer.decoder, {"params": params}, padded)
        x.reference, _ = naive_logprobs(trainer.decoder, variables, padded)
        lag = jnp.where(x.mask, jnp.maximum(1 - padded["version"][:, 1:], 0), 0).sum() / x.mask.sum()
        return gspo(x, ACROSS_ROWS.algorithm), lag

    loss, lag = one_by_one(held)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-4)
    assert 0 < float(metrics["kept"]) < 1 and float(metrics["kl_reference"]) > 0
    assert float(metrics["learning_rate"]) == pytest.approx(LR / (1 + 0.5 * float(lag))) and float(lag) > 0
    assert_same(state.reference, variables["params"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_nothing_recompiles_and_donation_spares_what_the_caller_holds(trainer, variables):
    first = trainer.init(variables)
    batches = batches_of(make_forest())
    state, _ = trainer.train_step(first, batches)
    before = trainer._reinforce.accumulate._cache_size()
    for count in (1, 2, 5):
        state, _ = trainer.train_step(state, (batches * 3)[:count])
    assert trainer._reinforce.accumulate._cache_size() == before and int(state.step) == 4
    assert all(x.is_deleted() for x in jax.tree.leaves(first.trainable))
    assert not any(x.is_deleted() for x in jax.tree.leaves(variables))
    with pytest.raises(ValueError, match="at least one batch"):
        trainer.train_step(state, [])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_leaves_the_state_as_it_was(trainer, variables, value):
    batches = batches_of(make_forest())
    state, _ = trainer.train_step(trainer.init(variables), batches)
    before = jax.tree.map(np.array, state)
    weight = batches[1].terms.weight.copy()
    weight[0, 0] = value
    assert batches[1].terms.read[0, 0] >= 0
    bad = [batches[0], replace(batches[1], terms=replace(batches[1].terms, weight=weight))]
    state, metrics = trainer.train_step(state, bad)
    assert_same(state, before)
    assert [int(metrics[k]) for k in ("nonfinite", "nonfinite_batch", "nonfinite_row")] == [1, 1, 0]
    state, metrics = trainer.train_step(state, batches)
    assert int(state.step) == 2 and [int(metrics[k]) for k in ("nonfinite", "nonfinite_batch")] == [0, -1]


def test_logprobs_and_parity(trainer, variables):
    """What `logprobs` returns are the log-probs one by one; as policy log-probs they give ratios of 1."""
    forest, padded = make_forest(), pad(make_forest())
    logp, _ = jax.jit(lambda v, p: naive_logprobs(trainer.decoder, v, p))(variables, padded)
    parted = []
    for t, row in zip(forest, np.asarray(logp), strict=True):
        own = np.concatenate([[0], row])[: len(t.trajectory.ids)].astype(np.float32)
        parted.append(replace(t, trajectory=replace(t.trajectory, policy_logp=own, behaviour_logp=own)))
    state, batches = trainer.init(variables), batches_of(parted)
    for b in batches:
        ours, used = np.asarray(trainer.logprobs(state, b)), b.terms.read >= 0
        of_terms = np.take_along_axis(ours, np.maximum(b.terms.read, 0), axis=1)
        np.testing.assert_allclose(of_terms[used], b.terms.policy_logp[used], atol=1e-5)
        assert not ours[b.reads.target < 0].any()
    _, metrics = trainer.train_step(state, batches)
    assert float(metrics[PARITY]) < 1e-5 and float(metrics["parity/logp_max"]) < 1e-4
    assert float(metrics["clip_fraction"]) == 0 and abs(float(metrics["kl"])) < 1e-6
    for name in ("ratio", "correction", "effective_sample_size"):
        assert float(metrics[name]) == pytest.approx(1, abs=1e-5), name


def test_sft_step_learns_and_reinforcement_starts_anew(trainer, variables):
    batches = batches_of(supervised([t.trajectory for t in make_forest()]))
    state, losses = trainer.init(variables), []
    for _ in range(15):
        state, metrics = trainer.sft_step(state, batches)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0] and set(metrics) >= {"terms", "entropy", "loss"}
    again = trainer.init(trainer.variables(state))
    assert int(again.step) == 0
    assert_same(again.trainable, state.trainable)


def test_adapters_train_alone():
    trainer = make_trainer(LORA, make_architecture(), one_device())
    variables = init_variables(trainer.decoder, jax.random.key(0), trainer.mesh)
    base = jax.tree.map(np.array, variables["params"])
    state = trainer.init(variables)
    num_adapter = sum(x.size for x in jax.tree.leaves(variables["lora"]))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) <= 2 * num_adapter + 8
    state, metrics = trainer.train_step(state, batches_of(make_forest()))
    assert_same(state.frozen, base)
    assert float(metrics["gradient_norm"]) > 0
    assert state.reference == {} and float(metrics["kl_reference"]) < 1e-10, "the reference is the base, which the start equals"
    assert all(np.any(np.asarray(x)) for p, x in jax.tree_util.tree_leaves_with_path(state.trainable) if p[-1].key == "lora_b")
    assert set(trainer.variables(state)) == {"params", "lora"}
    with pytest.raises(ValueError, match="lora"):
        trainer.init({"params": variables["params"]})


@pytest.mark.parametrize(
    ("mesh", "tables", "key"),
    [
        ({"data": 4}, {}, "packing.rows"),
        ({"data": 1, "context": 4}, {"packing": {"row_length": 42}}, "packing.row_length"),
        ({"data": 1, "context": 4}, {"packing": {"reads": 30}}, "packing.reads"),
        ({"data": 1, "tensor": 4}, {}, "mesh.tensor"),
        ({"data": 1, "expert": 2}, {}, "mesh.expert"),
    ],
)
def test_a_layout_that_cannot_be_is_an_error_before_anything_compiles(mesh, tables, key):
    mesh = MeshConfig(**mesh)
    num_devices = mesh.data * mesh.context * mesh.tensor * mesh.expert
    with pytest.raises(ConfigError) as error:
        make_trainer(make_config(**tables), make_architecture(), make_mesh(mesh, jax.devices()[:num_devices]))
    assert error.value.key == key


def test_rows_of_another_shape_are_refused(trainer, variables):
    rows = jax.tree.map(lambda x: x[:1], batches_of(make_forest())[0])
    with pytest.raises(ValueError, match="packing.rows"):
        trainer.logprobs(trainer.init(variables), rows)


def test_bfloat16_parameters_accumulate_in_float32():
    config = make_config(model={"param_dtype": "bfloat16", "dtype": "bfloat16"})
    trainer = make_trainer(config, make_architecture(), one_device())
    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(trainer._reinforce.zero).gradients)} == {jnp.dtype("float32")}
