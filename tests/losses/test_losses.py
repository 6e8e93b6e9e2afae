"""Each loss against its equation in numpy, and its gradient against finite differences, in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig
from jaxrl.data import LossTerms
from jaxrl.losses import LOSSES
from jaxrl.losses.aligned import add_sums, means

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.28, correction_cap=1.5, entropy_weight=0.03)


def make_terms(seed=0, num=64, unused=16):
    """Log-probs and terms with ratios well outside the clip range on both sides; the last slots are unused."""
    rng = np.random.default_rng(seed)
    logp, entropy = rng.uniform(-3, -0.1, num), rng.uniform(0, 2, num)
    policy = logp + rng.normal(0, 0.4, num)
    terms = LossTerms(
        read=np.where(np.arange(num) < num - unused, np.arange(num), -1).astype(np.int32),
        trajectory=np.zeros(num, np.int32),
        turn=np.zeros(num, np.int32),
        policy_logp=policy,
        behaviour_logp=policy + rng.normal(0, 0.4, num),
        advantage=rng.normal(0, 1, num),
        weight=rng.uniform(0.01, 0.02, num),
        version=np.zeros(num, np.int32),
        **dict.fromkeys(("returns", "old_value", "value_weight", "kl_weight"), np.zeros(0, np.float32)),
    )
    return logp, entropy, terms


def naive(name, logp, entropy, t, c=CONFIG):
    """The sum over used terms, one at a time."""
    total = 0.0
    for i in np.flatnonzero(t.read >= 0):
        r, advantage = np.exp(logp[i] - t.policy_logp[i]), t.advantage[i]
        w = min(np.exp(t.policy_logp[i] - t.behaviour_logp[i]), c.correction_cap)
        if name in ("grpo", "ppo_clip"):
            objective = w * min(r * advantage, np.clip(r, 1 - c.clip_low, 1 + c.clip_high) * advantage)
        elif name == "cispo":
            objective = w * min(r, 1 + c.clip_high) * advantage * logp[i]
        else:
            objective = logp[i]
        bonus = 0 if name == "sft" else c.entropy_weight * entropy[i]
        total -= t.weight[i] * (objective + bonus)
    return total


def naive_gradient(name, logp, entropy, t, step=1e-6):
    """Central differences in every logp and entropy; CISPO's ratio is held where it was."""

    def value(shift_logp, shift_entropy):
        if name != "cispo":
            return naive(name, logp + shift_logp, entropy + shift_entropy, t)
        total = 0.0
        for i in np.flatnonzero(t.read >= 0):
            w = min(np.exp(t.policy_logp[i] - t.behaviour_logp[i]), CONFIG.correction_cap)
            held = min(np.exp(logp[i] - t.policy_logp[i]), 1 + CONFIG.clip_high)
            objective = w * held * t.advantage[i] * (logp + shift_logp)[i]
            total -= t.weight[i] * (objective + CONFIG.entropy_weight * (entropy + shift_entropy)[i])
        return total

    units = np.eye(len(logp)) * step
    d_logp = [(value(u, 0) - value(-u, 0)) / (2 * step) for u in units]
    d_entropy = [(value(0, u) - value(0, -u)) / (2 * step) for u in units]
    return np.array(d_logp), np.array(d_entropy)


def evaluate(name, logp, entropy, terms):
    with jax.enable_x64(True):
        run = jax.value_and_grad(lambda x, e: LOSSES[name](x, e, terms, CONFIG), argnums=(0, 1), has_aux=True)
        (loss, sums), gradient = run(jnp.asarray(logp), jnp.asarray(entropy))
        return float(loss), {k: float(v) for k, v in sums.items()}, [np.asarray(g) for g in gradient]


@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_equation(name):
    logp, entropy, terms = make_terms()
    loss, _, gradient = evaluate(name, logp, entropy, terms)
    np.testing.assert_allclose(loss, naive(name, logp, entropy, terms), rtol=1e-12)
    for ours, expected in zip(gradient, naive_gradient(name, logp, entropy, terms), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_unused_slots_may_hold_nan(name):
    logp, entropy, terms = make_terms()
    unused = terms.read < 0
    floats = ("policy_logp", "behaviour_logp", "advantage", "weight")
    poisoned = {f: np.where(unused, np.nan, getattr(terms, f)) for f in floats}
    poison = replace(terms, **poisoned)
    clean = evaluate(name, logp, entropy, terms)
    dirty = evaluate(name, np.where(unused, np.nan, logp), np.where(unused, np.nan, entropy), poison)
    assert dirty[:2] == clean[:2]
    for a, b in zip(dirty[2], clean[2], strict=True):
        np.testing.assert_array_equal(a, b)
        assert not a[unused].any()


@pytest.mark.parametrize("name", ["grpo", "ppo_clip", "cispo"])
def test_metric_sums(name):
    logp, entropy, terms = make_terms()
    used = terms.read >= 0
    d = (logp - terms.policy_logp)[used]
    r, a = np.exp(d), terms.advantage[used]
    clipped = r > 1.28 if name == "cispo" else ((a > 0) & (r > 1.28)) | ((a < 0) & (r < 0.8))
    rho = np.exp(logp - terms.behaviour_logp)[used]
    expected = {
        "terms": used.sum(),
        "clip_fraction": clipped.sum(),
        "ratio": r.sum(),
        "correction": np.minimum(np.exp(terms.policy_logp - terms.behaviour_logp)[used], 1.5).sum(),
        "parity/logp_mean_abs": np.abs(d).sum(),
        "parity/logp_max": np.abs(d).max(),
        "kl": (r - 1 - d).sum(),
        "entropy": entropy[used].sum(),
        "importance": rho.sum(),
        "importance_squared": (rho**2).sum(),
    }
    _, sums, _ = evaluate(name, logp, entropy, terms)
    assert sums == pytest.approx(expected, rel=1e-12)
    logged = means(add_sums(sums, sums))
    assert logged["effective_sample_size"] == pytest.approx(rho.sum() ** 2 / (len(rho) * (rho**2).sum()))
    assert logged["parity/logp_max"] == sums["parity/logp_max"] and logged["terms"] == 2 * used.sum()
    assert logged["kl"] == pytest.approx((r - 1 - d).mean())


def test_clips_act_on_the_policy_ratio_not_on_the_correction():
    """An unchanged policy under lossy sampling: π/μ is far outside the clip range, nothing is clipped."""
    logp, entropy, terms = make_terms()
    unchanged = LossTerms(**{**terms.__dict__, "policy_logp": logp, "behaviour_logp": logp - 0.4})
    _, sums, _ = evaluate("grpo", logp, entropy, unchanged)
    assert sums["clip_fraction"] == 0
    assert sums["correction"] == pytest.approx(sums["terms"] * np.exp(0.4))
