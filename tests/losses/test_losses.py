"""Each loss against its equation in numpy, and its gradient against finite differences, in float64: one compilation for all."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import CASES, per_episode

from jaxrl.config import AlgorithmConfig
from jaxrl.data import LossTerms, Reads
from jaxrl.losses import LOSSES, needs_reference, step_coefficients
from jaxrl.losses.aligned import ReadLogprobs, align
from jaxrl.losses.corrections import correction
from jaxrl.losses.old_policy import with_stages
from jaxrl.losses.recipes import RECIPES
from jaxrl.losses.steps import StepTerms
from jaxrl.losses.sums import add_sums, means

B, L, K, ROWS, SLOTS = 11, 7, 3, 3, 24
STEP = 5


def make_step(seed=0):
    """Trajectories [B, L] of ragged episodes, three of them forked, in three groups; ratios well outside every bound, on both
    sides."""
    rng = np.random.default_rng(seed)
    episode = np.array([0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 6])
    mask = np.arange(L) < rng.integers(2, L + 1, B)[:, None]
    policy = rng.uniform(-3, -0.5, (B, L))
    held = policy + rng.normal(0, 0.3, (B, 1)) + rng.normal(0, 0.3, (B, L))
    candidate = rng.uniform(-4, -0.5, (B, L, K))
    x = SimpleNamespace(
        xp=np, mask=mask, episode=episode, group=np.array([0, 0, 0, 1, 1, 1])[[*episode[:-2], 5, 5]] + (episode == 6),
        logp=held, held=held, entropy=rng.uniform(0, 2, (B, L)), policy=policy, behaviour=policy + rng.normal(0, 0.3, (B, L)),
        advantage=np.broadcast_to(rng.normal(0, 1, (B, 1)), (B, L)), weight=rng.uniform(0.01, 0.02, (B, L)),
        version=rng.integers(0, STEP + 1, (B, L)), reference=held + rng.normal(0, 0.5, (B, L)), proximal=held + rng.normal(0, 0.3, (B, L)),
        candidate=candidate, candidate_held=candidate, teacher=rng.uniform(-4, -0.5, (B, L, K)), is_candidate=rng.random((B, L, K)) < 0.8,
    )  # fmt: skip
    x.is_candidate[..., 0] = True
    x.lag = STEP - x.version
    return x


def rows_of(x, seed=1):
    """The tokens of `x` in any order over rows of loss terms with unused slots between; `place` leads back to [B, L]."""
    rng = np.random.default_rng(seed)
    token = np.flatnonzero(x.mask)
    assert len(token) < ROWS * SLOTS
    place = np.full(ROWS * SLOTS, -1)
    place[rng.permutation(ROWS * SLOTS)[: len(token)]] = token
    place = place.reshape(ROWS, SLOTS)

    def at(values, fill=0.0):
        values = np.asarray(values).reshape(B * L, *np.shape(values)[2:])
        return np.where((place >= 0).reshape(*place.shape, *(1,) * (values.ndim - 1)), values[place], fill)

    slots = np.broadcast_to(np.arange(SLOTS), place.shape)
    reads = Reads(
        *[slots] * 3, reference_logp=at(x.reference), proximal_logp=at(x.proximal),
        teacher_ids=np.where(at(x.is_candidate, False), 1, -1), teacher_logp=at(x.teacher),
    )  # fmt: skip
    terms = LossTerms(
        np.where(place >= 0, slots, -1), slots, slots, at(x.policy), at(x.behaviour), at(x.advantage), at(x.weight), at(x.version),
        **dict.fromkeys(("returns", "old_value", "value_weight", "kl_weight"), np.zeros((ROWS, 0))),
    )  # fmt: skip
    ids = [np.broadcast_to(i[:, None], (B, L)) for i in (x.episode, x.group)]
    return place, (at(x.logp), at(x.entropy), at(x.candidate)), reads, terms, [at(i, 99).astype(np.int32) for i in ids]


def without_optionals(reads, config, loss, gives_proximal):
    """The reads as the rows of such a run have them."""
    width_0 = np.zeros((ROWS, 0))
    reads = reads if needs_reference(loss, config) else replace(reads, reference_logp=width_0)
    return reads if gives_proximal else replace(reads, proximal_logp=width_0)


@jax.jit
def evaluate(values, reads, terms, ids):
    """{case: (loss, metric sums, gradients in values)} of the rows of a step."""

    def one(name):
        case = CASES[name]
        loss, config = LOSSES[case.loss], AlgorithmConfig(**case.keys)
        tables = without_optionals(reads, config, loss, case.gives_proximal)

        def aligned(values, coefficients):
            def of_row(values, tables, terms, coefficients):
                logp, entropy, candidates = values
                terms = replace(terms, weight=weights_of(case, terms.weight))
                said = ReadLogprobs(logp, entropy, candidates=candidates if loss.needs_candidates else None)
                return align(said, tables, terms, STEP, coefficients)

            return jax.vmap(of_row)(values, tables, terms, coefficients)

        def total(values, coefficients):
            losses, sums = jax.vmap(lambda a: loss.value(a, config))(aligned(values, coefficients))
            return losses.sum(), {k: x.max() if k.endswith("_max") else x.sum() for k, x in sums.items()}

        coefficients = {}
        if solve := step_coefficients(loss, config):
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aligned(values, {}))
            step = StepTerms(flat, *[i.reshape(-1) for i in ids], 8)
            coefficients = {k: x.reshape(ROWS, SLOTS) for k, x in solve(step).items()}
        (loss_sum, sums), gradients = jax.value_and_grad(total, has_aux=True)(values, coefficients)
        return loss_sum, sums, gradients

    return {name: one(name) for name in CASES}


@pytest.fixture(scope="module")
def results():
    with jax.enable_x64(True):
        _, *arguments = rows_of(make_step())
        return jax.tree.map(np.asarray, evaluate(*arguments))


def weights_of(case, weight):
    """One weight for all tokens where that is what the loss is defined with."""
    return 0 * weight + 0.015 if case.keys.get("normaliser") == "constant" else weight


def naive(name, x):
    case = CASES[name]
    changed = {"weight": weights_of(case, x.weight)} | ({} if case.gives_proximal else {"proximal": None})
    x = SimpleNamespace(**vars(x) | changed)
    return float(case.equation(x, AlgorithmConfig(**case.keys)))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_equation(name, results):
    x, (loss, _, gradients) = make_step(), results[name]
    place = rows_of(x)[0]
    np.testing.assert_allclose(loss, naive(name, x), rtol=1e-11)
    assert any(gradient.any() for gradient in gradients)
    for field, gradient in zip(("logp", "entropy", "candidate"), gradients, strict=True):
        if field == "candidate" and not LOSSES[CASES[name].loss].needs_candidates:
            assert not gradient.any()
            continue
        values, expected, step = getattr(x, field), np.zeros_like(gradient), 1e-6
        for at in np.argwhere(np.broadcast_to((place >= 0).reshape(*place.shape, *(1,) * (gradient.ndim - 2)), gradient.shape)):
            where = (*np.unravel_index(place[tuple(at[:2])], (B, L)), *at[2:])
            shift = np.zeros_like(values)
            shift[where] = step
            up, down = (naive(name, SimpleNamespace(**vars(x) | {field: values + s})) for s in (shift, -shift))
            expected[tuple(at)] = (up - down) / (2 * step)
        np.testing.assert_allclose(gradient, expected, atol=2e-9 * max(1, abs(float(loss))))


def test_unused_slots_may_hold_nan(results):
    place, values, reads, terms, ids = rows_of(make_step())

    def poison(x):
        if not x.size or x.dtype.kind != "f":
            return x
        return np.where((place < 0).reshape(*place.shape, *(1,) * (x.ndim - 2)), np.nan, x)

    dirty_terms = jax.tree.map(poison, terms)
    dirty_terms = replace(dirty_terms, read=terms.read, trajectory=terms.trajectory, turn=terms.turn)
    with jax.enable_x64(True):
        dirty = evaluate(jax.tree.map(poison, values), jax.tree.map(poison, reads), dirty_terms, ids)
    jax.tree.map(np.testing.assert_array_equal, results, jax.tree.map(np.asarray, dirty))
    for name, (_, _, gradients) in results.items():
        for gradient in gradients:
            assert not gradient[place < 0].any(), name


def test_metric_sums(results):
    x = make_step()
    d, a = (x.logp - x.policy)[x.mask], x.advantage[x.mask]
    r, rho = np.exp(d), np.exp(x.logp - x.behaviour)[x.mask]
    w = np.exp(x.policy - x.behaviour)[x.mask]
    current = x.lag[x.mask] == 0
    assert 0 < current.sum() < len(d)
    expected = {
        "terms": x.mask.sum(),
        "kept": x.mask.sum(),
        "clip_fraction": (((a > 0) & (r > 1.28)) | ((a < 0) & (r < 0.8))).sum(),
        "ratio": r.sum(),
        "correction": np.minimum(w, 1.3).sum(),
        "current": current.sum(),
        "parity/logp_mean_abs": np.abs(d[current]).sum(),
        "parity/logp_max": np.abs(d[current]).max(),
        "parity/kl_k1": -d[current].sum(),
        "parity/kl_k3": (np.exp(d) - 1 - d)[current].sum(),
        "parity/beyond_0.05": (np.abs(d[current]) > 0.05).sum(),
        "parity/beyond_0.5": (np.abs(d[current]) > 0.5).sum(),
        "drift": np.abs(d[~current]).sum(),
        "drift_max": np.abs(d[~current]).max(),
        "kl": (r - 1 - d).sum(),
        "entropy": x.entropy[x.mask].sum(),
        "importance": rho.sum(),
        "importance_squared": (rho**2).sum(),
        "lag": x.lag[x.mask].sum(),
    }
    sums = results["ppo"][1]
    assert sums == pytest.approx(expected, rel=1e-12)
    logged = means(add_sums(sums, sums))
    assert logged["effective_sample_size"] == pytest.approx(rho.sum() ** 2 / (len(rho) * (rho**2).sum()))
    assert logged["parity/logp_max"] == sums["parity/logp_max"] and logged["terms"] == 2 * x.mask.sum()
    assert logged["kl"] == pytest.approx((r - 1 - d).mean())
    assert logged["parity/logp_mean_abs"] == pytest.approx(np.abs(d[current]).mean())
    assert logged["drift"] == pytest.approx(np.abs(d[~current]).mean()) and logged["current"] == 2 * current.sum()
    to_reference = (x.reference - x.logp)[x.mask]
    assert results["kl_k3"][1]["kl_reference"] == pytest.approx((np.exp(to_reference) - 1 - to_reference).sum())
    # What a mask silences is counted, and stays in the denominators: the weights are as they were.
    inside = (w >= 0.7) & (w <= 1.3)
    assert results["icepop"][1]["kept"] == inside.sum() and 0 < inside.sum() < len(w)
    assert results["icepop"][1]["terms"] == len(w)
    vetoed = per_episode(x, np.where(np.exp(x.held - x.behaviour) < 0.4, 1, 0)) > 0
    assert results["veto"][1]["kept"] == (x.mask & ~vetoed).sum() and vetoed.any() and not vetoed.all()


def row_of(logp, policy, behaviour, advantage=1.0):
    n = len(logp)
    terms = LossTerms(
        np.arange(n), *[np.zeros(n, int)] * 2, policy, behaviour, np.full(n, advantage), np.full(n, 1 / n), np.zeros(n),
        **dict.fromkeys(("returns", "old_value", "value_weight", "kl_weight"), np.zeros(0)),
    )  # fmt: skip
    reads = Reads(*[np.zeros(n)] * 3, *[np.zeros(0)] * 2, np.zeros((n, 0)), np.zeros((n, 0)))
    return align(ReadLogprobs(jnp.asarray(logp), jnp.zeros(n)), reads, terms)


def test_clips_act_on_the_policy_ratio_not_on_the_correction():
    """An unchanged policy under lossy sampling: π/μ is far outside the clip range, nothing is clipped."""
    logp = np.linspace(-3, -0.1, 20)
    for name in ("grpo", "cispo", "sao"):
        _, sums = LOSSES[name].value(row_of(logp, logp, logp - 0.4), AlgorithmConfig(loss=name))
        assert sums["clip_fraction"] == 0
        assert sums["correction"] == pytest.approx(20 * np.exp(0.4), rel=1e-5)


def test_with_one_step_per_batch_the_decoupled_clip_never_fires():
    """p is π, however far π₀ is; what is stale is weighted by p/μ instead."""
    rng = np.random.default_rng(0)
    logp, policy = rng.uniform(-3, -0.1, (2, 200))
    keys = {k: v for k, v in RECIPES["decoupled_ppo"].items() if k != "loss"}
    a = row_of(logp, policy, policy)
    _, sums = LOSSES["ppo_clip"].value(a, AlgorithmConfig(**keys))
    _, coupled = LOSSES["ppo_clip"].value(a, AlgorithmConfig())
    assert sums["clip_fraction"] == 0 and coupled["clip_fraction"] > 50
    weight = np.exp(logp - policy)
    np.testing.assert_allclose(correction(a, AlgorithmConfig(**keys)), np.where(weight <= 5, weight, 0), rtol=1e-5)


def test_sampled_more_often_the_reverse_distillation_varies_less():
    """The gradient at one state from N samples of the policy: mean that of the KL, variance falling as 1/N."""
    rng = np.random.default_rng(0)
    policy, teacher = rng.dirichlet(np.ones(5), 2)
    # d/dz of KL(policy‖teacher) for logits z.
    exact = policy * (np.log(policy / teacher) - (policy * np.log(policy / teacher)).sum())
    spread = {}
    for n in (1, 8):
        drawn = rng.choice(5, (40_000, n), p=policy)
        advantage = np.log(teacher / policy)[drawn]
        score = np.eye(5)[drawn] - policy
        gradient = -(advantage[..., None] * score).mean(1)
        assert np.abs(gradient.mean(0) - exact).max() < 0.02
        spread[n] = gradient.var(0).sum()
    assert spread[1] / spread[8] == pytest.approx(8, rel=0.05)


def test_stages_of_a_partial_rollout_are_its_denominator():
    from test_advantages import make_trajectory

    trajectory = make_trajectory(4)
    version = np.array([-1, -1, -1, 3, 3, 4, 4], np.int32)
    trajectory = replace(trajectory, version=version)
    staged = with_stages(trajectory, [(3, np.full(7, -0.5, np.float32)), (4, np.full(7, -0.25, np.float32))])
    np.testing.assert_array_equal(staged.policy_logp, np.array([0, 0, 0, -0.5, -0.5, -0.25, -0.25], np.float32))
    with pytest.raises(ValueError, match="version 4"):
        with_stages(trajectory, [(3, np.zeros(7, np.float32))])


def test_a_recipe_of_every_name_is_a_config():
    from test_advantages import make_config

    for name, table in RECIPES.items():
        assert make_config(**table).algorithm, name
        assert name in CASES, f"{name} is compared with no equation"
