"""Draws against naive truncation written with sorts, and against the chi-squared distribution."""

import jax
import numpy as np
import pytest

from jaxrl.engine import sampling
from jaxrl.engine.sampling import Controls

draw = jax.jit(sampling.draw)

NUM_DRAWS = 20_000
VOCAB = 300
# Upper 1e-4 quantiles of the chi-squared distribution would depend on the degrees of freedom; the Wilson-Hilferty cube
# root of a chi-squared variable is close to normal, and 3.72 is the upper 1e-4 quantile of that.
NORMAL_QUANTILE = 3.72


def controls(num_rows, seeds=None, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    full = lambda value, dtype: np.full(num_rows, value, dtype)  # noqa: E731
    seeds = np.arange(num_rows, dtype=np.uint32) if seeds is None else seeds
    return Controls(
        full(temperature, np.float32), full(top_p, np.float32), full(top_k, np.int32), full(min_p, np.float32), seeds
    )


def naive_distribution(logits, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """The distribution tokens are drawn from, float64 [V]: sort, cut, renormalise."""
    p = np.exp(logits / temperature - np.max(logits / temperature))
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(p), bool)
    if top_k:
        keep[order[top_k:]] = False
    kept = np.where(keep, p, 0)
    kept /= kept.sum()
    before = np.concatenate([[0.0], np.cumsum(kept[order])[:-1]])
    keep[order[before >= top_p]] = False
    keep &= p >= min_p * p.max()
    kept = np.where(keep, p, 0)
    return kept / kept.sum()


def skewed_logits(vocab=VOCAB):
    return (np.random.default_rng(7).normal(size=vocab) * 2).astype(np.float32)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 12},
        {"top_k": 10_000},
        {"top_p": 0.8},
        {"top_p": 0.05},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_frequencies_follow_the_truncated_distribution(how):
    logits = skewed_logits()
    expected = naive_distribution(logits.astype(np.float64), **how)
    drawn = draw(np.tile(logits, (NUM_DRAWS, 1)), np.full(NUM_DRAWS, 5, np.int32), controls(NUM_DRAWS, **how))
    token = np.asarray(drawn.token)
    counts = np.bincount(token, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    # tokens too rare for the test are counted together
    rare = expected * NUM_DRAWS < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    mean = np.append(expected[~rare], expected[rare].sum()) * NUM_DRAWS
    observed, mean = observed[mean > 0], mean[mean > 0]
    chi2, freedom = ((observed - mean) ** 2 / mean).sum(), len(mean) - 1
    if freedom:
        z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
        assert z < NORMAL_QUANTILE, (chi2, freedom)
    # the two log-probs of what was drawn
    np.testing.assert_allclose(np.asarray(drawn.behaviour_logp), np.log(expected[token]), atol=1e-5)
    whole = naive_distribution(logits.astype(np.float64), temperature=how.get("temperature", 1.0))
    np.testing.assert_allclose(np.asarray(drawn.policy_logp), np.log(whole[token]), atol=1e-5)
    if how.keys() <= {"temperature"}:
        assert (np.asarray(drawn.behaviour_logp) == np.asarray(drawn.policy_logp)).all()


def test_a_wrong_distribution_fails_the_test_above():
    """The chi-squared bound notices a temperature that is off by a tenth."""
    logits = skewed_logits()
    drawn = draw(np.tile(logits, (NUM_DRAWS, 1)), np.full(NUM_DRAWS, 5, np.int32), controls(NUM_DRAWS, temperature=1.1))
    mean = naive_distribution(logits.astype(np.float64)) * NUM_DRAWS
    common = mean >= 5
    counts = np.bincount(np.asarray(drawn.token), minlength=VOCAB)
    chi2, freedom = ((counts - mean)[common] ** 2 / mean[common]).sum(), common.sum() - 1
    assert ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom)) > NORMAL_QUANTILE


def test_greedy_rows_take_the_first_peak_with_log_probs_at_temperature_one():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [40, 250]] = 3.0
    drawn = draw(logits, np.zeros(2, np.int32), controls(2, temperature=0.0, top_k=5))
    assert np.asarray(drawn.token).tolist() == [40, 0]
    np.testing.assert_allclose(drawn.policy_logp, [3 - np.log(2 * np.exp(3) + VOCAB - 2), -np.log(VOCAB)], rtol=1e-6)
    assert (np.asarray(drawn.behaviour_logp) == 0).all()


def test_a_row_does_not_depend_on_its_place_or_on_the_other_rows():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, VOCAB)).astype(np.float32) * 3
    position = np.arange(8, dtype=np.int32)
    mixed = Controls(
        np.array([1, 0, 0.5, 1, 1, 2, 1, 1], np.float32),
        np.array([1, 1, 0.9, 1, 0.5, 1, 1, 1], np.float32),
        np.array([0, 0, 0, 7, 9, 0, 0, 0], np.int32),
        np.array([0, 0, 0, 0, 0, 0.1, 0, 0], np.float32),
        np.arange(8, dtype=np.uint32),
    )
    once = draw(logits, position, mixed)
    order = rng.permutation(8)
    again = draw(logits[order], position[order], Controls(*(c[order] for c in mixed)))
    for a, b in zip(once, again, strict=True):
        assert (np.asarray(a)[order] == np.asarray(b)).all()
    plain = draw(logits[[0, 6, 7]], position[[0, 6, 7]], Controls(*(c[[0, 6, 7]] for c in mixed)))
    for a, b in zip(once, plain, strict=True):
        assert (np.asarray(a)[[0, 6, 7]] == np.asarray(b)).all()


def test_seed_and_position_change_the_draw():
    logits = np.zeros((64, VOCAB), np.float32)
    by_seed = draw(logits, np.zeros(64, np.int32), controls(64)).token
    by_position = draw(logits, np.arange(64, dtype=np.int32), controls(64, seeds=np.zeros(64, np.uint32))).token
    assert len(set(np.asarray(by_seed).tolist())) > 40 and len(set(np.asarray(by_position).tolist())) > 40


def test_extreme_logits_stay_finite():
    logits = np.full((3, VOCAB), -1e30, np.float32)
    logits[0, 3] = 0
    logits[1, :] = 1e4
    logits[2, 5:7] = 80
    for how in ({}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.5}):
        drawn = draw(logits, np.zeros(3, np.int32), controls(3, **how))
        assert np.asarray(drawn.token)[0] == 3 and np.asarray(drawn.token)[2] in (5, 6)
        assert np.isfinite(np.asarray(drawn.policy_logp)).all() and np.isfinite(np.asarray(drawn.behaviour_logp)).all()
