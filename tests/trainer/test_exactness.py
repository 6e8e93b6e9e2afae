"""The exactness bar: packed rows give the loss and every gradient of the same trajectories one by one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forest import make_architecture, make_config, make_forest, naive_losses, pad, relative_errors

from jaxrl.config import LoraConfig, MeshConfig
from jaxrl.losses import LOSSES
from jaxrl.mesh import make_mesh
from jaxrl.models.decoder import Decoder, init_variables
from jaxrl.packing import RowLimits, pack
from jaxrl.trainer.forward import row_logprobs, row_losses
from jaxrl.trainer.placement import put_rows
from jaxrl.trainer.state import variables_of

CONFIG = make_config(algorithm={"clip_high": 0.28, "correction_cap": 1.3, "entropy_weight": 0.05})
BAR = {"float32": 1e-5, "float64": 1e-12}


def make_variables(decoder, mesh):
    """Random variables; LoRA's second factors, which start at 0, are drawn too."""
    variables = init_variables(decoder, jax.random.key(0), mesh)
    if decoder.lora is None:
        return variables
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return variables | {
        "lora": jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape, x.dtype), variables["lora"])
    }


def batches_of(forest, config=CONFIG):
    return pack(forest, RowLimits.from_config(config.packing), config.packing.rows)[0]


def poison(rows, seed=1):
    """The same rows with finite garbage in padding tokens and NaN in unused term slots."""
    rng = np.random.default_rng(seed)
    rows = jax.tree.map(np.array, rows)
    offsets = np.arange(rows.tokens.shape[1])
    is_token = np.zeros(rows.tokens.shape, bool)
    for r in range(len(is_token)):
        for start, length in zip(rows.segments.start[r], rows.segments.length[r], strict=True):
            is_token[r] |= (offsets >= start) & (offsets < start + length)
    assert not is_token.all()
    tokens = np.where(is_token, rows.tokens, rng.integers(0, 64, rows.tokens.shape)).astype(np.int32)
    positions = np.where(is_token, rows.positions, rng.integers(0, 500, rows.tokens.shape)).astype(np.int32)
    unused = rows.terms.read < 0
    floats = {
        f: np.where(unused, np.nan, getattr(rows.terms, f)).astype(np.float32)
        for f in ("policy_logp", "behaviour_logp", "advantage", "weight")
    }
    return replace(rows, tokens=tokens, positions=positions, terms=replace(rows.terms, **floats))


def test_the_forest_is_a_hard_one():
    forest = make_forest()
    batches = batches_of(forest)
    assert len(batches) >= 2, "several microbatches"
    placed = sum(int(b.segments.length.sum()) for b in batches)
    assert placed < sum(len(t.trajectory.ids) for t in forest), "tokens are shared"
    reads = sum(int((b.reads.target >= 0).sum()) for b in batches)
    terms = sum(int((b.terms.read >= 0).sum()) for b in batches)
    assert terms == sum(int(t.trajectory.trainable.sum()) for t in forest) and reads < terms, "a read has several terms"
    rows_of = {}
    for i, b in enumerate(batches):
        for r, n in np.argwhere(b.trajectories.index >= 0):
            rows_of.setdefault(int(b.trajectories.group[r, n]), set()).add((i, int(r)))
    assert max(map(len, rows_of.values())) >= 2, "a tree is cut over two rows"


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_packed_equals_one_by_one(dtype, adapters, request):
    if dtype == "float32":  # as a run compiles it
        request.getfixturevalue("optimized")
    lora = LoraConfig(rank=4, alpha=8.0) if adapters else None
    algorithm, forest = CONFIG.algorithm, make_forest()
    with jax.enable_x64(dtype == "float64"):
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        decoder = Decoder(make_architecture(), jnp.dtype(dtype), jnp.dtype(dtype), "full", lora, mesh=mesh)
        variables = make_variables(decoder, mesh)
        trainable, frozen = (variables["lora"], variables["params"]) if adapters else (variables["params"], {})

        # A weight per loss, as an argument: every loss in one compilation, on either side.
        @jax.jit
        def packed(trainable, rows, chosen):
            def total(trainable):
                logp, entropy = row_logprobs(variables_of(trainable, frozen), rows, decoder, CONFIG.attention, mesh)
                losses = {name: row_losses(logp, entropy, rows, loss, algorithm)[0].sum() for name, loss in LOSSES.items()}
                return sum(chosen[name] * x for name, x in losses.items()), losses

            (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(trainable)
            return losses, gradients

        @jax.jit
        def one_by_one(trainable, padded, chosen):
            def total(trainable):
                losses = naive_losses(decoder, variables_of(trainable, frozen), padded, algorithm)
                return sum(chosen[name] * x for name, x in losses.items()), losses

            (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(trainable)
            return losses, gradients

        clean = batches_of(forest)
        batches = [put_rows(b, mesh) for b in clean]
        dirty = [put_rows(poison(b), mesh) for b in clean]
        padded = {k: jnp.asarray(v) for k, v in pad(forest).items()}
        worst = 0.0
        for name in LOSSES:
            chosen = {other: np.float32(other == name) for other in LOSSES}
            parts = [packed(trainable, b, chosen) for b in batches]
            losses, gradients = jax.tree.map(lambda *x: sum(x), *parts)
            expected, reference = one_by_one(trainable, padded, chosen)
            errors = relative_errors(gradients, reference) | {"loss": abs(losses[name] / expected[name] - 1)}
            worst = max(worst, *errors.values())
            assert all(e <= BAR[dtype] for e in errors.values()), (name, {k: e for k, e in errors.items() if e > BAR[dtype]})
            for a, b in zip(parts, [packed(trainable, b, chosen) for b in dirty], strict=True):
                jax.tree.map(np.testing.assert_array_equal, a, b)
        print(f"{dtype} {'lora' if adapters else 'full'}: worst relative error {worst:.1e}")
