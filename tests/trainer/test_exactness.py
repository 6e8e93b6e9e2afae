"""The exactness bar: packed rows give the loss and every gradient of the same trajectories one by one."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forest import CASES, make_architecture, make_config, make_forest, naive_step, pad, relative_errors, with_teachers

from jaxrl.config import AlgorithmConfig, LoraConfig, MeshConfig
from jaxrl.losses import LOSSES, needs_reference, step_coefficients
from jaxrl.losses.steps import StepTerms
from jaxrl.mesh import make_mesh
from jaxrl.models.decoder import Decoder, init_variables
from jaxrl.packing import RowLimits, pack
from jaxrl.trainer.coefficients import measured
from jaxrl.trainer.forward import read_rows, row_losses, row_terms
from jaxrl.trainer.placement import put_rows
from jaxrl.trainer.state import variables_of

CONFIG = make_config()
CONFIGS = {name: AlgorithmConfig(**case.keys) for name, case in CASES.items()}
STEP = 3  # the forest's tokens are of versions 0 to 2
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
    """The same rows with finite garbage in padding tokens and NaN in unused slots of reads and terms."""
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
    free = rows.reads.target < 0
    given = {f: getattr(rows.reads, f) for f in ("reference_logp", "proximal_logp", "teacher_logp")}
    given = {f: np.where(free.reshape(*free.shape, *(1,) * (x.ndim - 2)), np.nan, x) for f, x in given.items()}
    reads = replace(rows.reads, **{f: x.astype(np.float32) for f, x in given.items()})
    return replace(rows, tokens=tokens, positions=positions, terms=replace(rows.terms, **floats), reads=reads)


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


def terms_of(name, terms, coefficients=None):
    """The terms as the trainer makes them for this loss: without what its rows would not have."""
    case = CASES[name]
    loss = LOSSES[case.loss]
    without = {} if case.gives_proximal else {"proximal_logp": None}
    without |= {} if needs_reference(loss, CONFIGS[name]) else {"reference_logp": None}
    without |= {} if loss.needs_candidates else dict.fromkeys(("candidate_logp", "teacher_logp", "is_candidate"))
    weight = jnp.where(terms.used, weights_of(name, terms.weight), 0)
    return terms._replace(weight=weight, coefficients=coefficients or {}, **without)


def weights_of(name, weight):
    """One weight for all tokens where that is what the loss is defined with."""
    return 0 * weight + 0.015 if CASES[name].keys.get("normaliser") == "constant" else weight


def naive_losses(cases, decoder, variables, padded):
    """Each loss over all trainable tokens, trajectory by trajectory, [cases]."""
    x = naive_step(decoder, variables, padded, STEP)
    losses = []
    for name in cases:
        own = SimpleNamespace(**vars(x) | {"weight": weights_of(name, x.weight)})
        own.proximal = x.proximal if CASES[name].gives_proximal else None
        losses.append(CASES[name].equation(own, CONFIGS[name]))
    return jnp.stack(losses)


def packed_losses(cases, read, batches):
    """Each loss over rows of several microbatches [B, R, ...], [cases]. `read`: what the model says of a microbatch."""
    said = jax.lax.map(read, batches)
    # Rows of all microbatches: a loss is a sum over rows, wherever they are cut.
    said, rows = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), (said, batches))
    terms = row_terms(said, rows, STEP)
    whole = jax.tree.map(lambda x: jax.lax.stop_gradient(x).reshape(-1), measured(terms, rows))
    losses = []
    for name in cases:
        loss, config = LOSSES[CASES[name].loss], CONFIGS[name]
        solve = step_coefficients(loss, config)
        flat = solve(StepTerms(terms_of(name, whole.terms), whole.episode, whole.group, 16)) if solve else {}
        coefficients = {k: jnp.where(terms.used, x.reshape(terms.used.shape), 0) for k, x in flat.items()}
        losses.append(row_losses(terms_of(name, terms, coefficients), loss, config)[0].sum())
    return jnp.stack(losses)


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_packed_equals_one_by_one(dtype, adapters, request):
    """All losses in one compilation, on either side: one forward pass, and a backward pass batched over the losses. With
    adapters, where it is the parameters that differ, a few of them, and in float32 compiled as a run compiles them."""
    if dtype == "float32" and adapters:
        request.getfixturevalue("optimized")
    lora = LoraConfig(rank=4, alpha=8.0) if adapters else None
    cases = ("grpo", "gspo", "distill_forward", "sft") if adapters else tuple(CASES)
    forest = with_teachers(make_forest())
    with jax.enable_x64(dtype == "float64"):
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        decoder = Decoder(make_architecture(), jnp.dtype(dtype), jnp.dtype(dtype), "full", lora, mesh=mesh)
        variables = make_variables(decoder, mesh)
        trainable, frozen = (variables["lora"], variables["params"]) if adapters else (variables["params"], {})

        def gradients_of(losses, trainable):
            values, pullback = jax.vjp(losses, trainable)
            return values, jax.vmap(pullback)(jnp.eye(len(cases), dtype=values.dtype))[0]

        @jax.jit
        def packed(trainable, batches):
            def losses(trainable):
                def read(rows):
                    variables = variables_of(trainable, frozen)
                    return read_rows(variables, rows, decoder, CONFIG.attention, mesh, candidates=True)

                return packed_losses(cases, read, batches)

            return gradients_of(losses, trainable)

        @jax.jit
        def one_by_one(trainable, padded):
            return gradients_of(lambda t: naive_losses(cases, decoder, variables_of(t, frozen), padded), trainable)

        def placed(batches):
            return jax.tree.map(lambda *x: jnp.stack(x), *[put_rows(b, mesh) for b in batches])

        clean = batches_of(forest)
        losses, gradients = packed(trainable, placed(clean))
        dirty = packed(trainable, placed([poison(b) for b in clean]))
        jax.tree.map(np.testing.assert_array_equal, (losses, gradients), dirty)
        expected, references = one_by_one(trainable, {k: jnp.asarray(v) for k, v in pad(forest).items()})
        gradients, references = jax.tree.map(np.asarray, (gradients, references))
        worst = {}
        for i, name in enumerate(cases):
            errors = relative_errors(*(jax.tree.map(lambda x, i=i: x[i], tree) for tree in (gradients, references)))
            worst[name] = max(*errors.values(), abs(losses[i] / expected[i] - 1))
        print(f"{dtype} {'lora' if adapters else 'full'}: worst relative error {max(worst.values()):.1e}")
        assert all(e <= BAR[dtype] for e in worst.values()), {k: e for k, e in worst.items() if not e <= BAR[dtype]}
