"""Schedules, what decays, and the order of the chain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forest import make_architecture

from jaxrl.config import LoraConfig, OptimizerConfig
from jaxrl.models.decoder import Decoder, abstract_variables
from jaxrl.trainer.optimizer import decay_mask, make_optimizer, make_schedule


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
