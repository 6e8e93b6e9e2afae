"""How far trainer and sampler are apart on the same tokens, and what the difference looks like.

Both compute log-probs of the same ids by the same weights, so what differs is an error of one of them; its shape says which.
"""

from dataclasses import dataclass

import numpy as np

from jaxrl.data import PackedRows

# Where a difference is no longer rounding: the mean over tokens, in nats, by the coarser of the two dtypes.
MEAN_LIMIT = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 1e-2, "float64": 1e-9}
CORRELATED = 0.6  # |correlation| between difference and log-prob from which the temperature is suspected
APART = 10.0  # how many times the median trajectory's difference makes a trajectory stand out


def of_rows(rows: PackedRows, logp: np.ndarray) -> dict[str, np.ndarray]:
    """The loss terms of rows as both sides see them, each [n]. logp [R, U]: the trainer's, of every read."""
    used = rows.terms.read >= 0
    row, slot = np.nonzero(used)
    read = rows.terms.read[used]
    state = rows.reads.state[row, read]
    return {
        "sampler": rows.terms.policy_logp[used],
        "trainer": logp[row, read],
        "target": rows.reads.target[row, read],
        "position": rows.positions[row, state] + 1,
        "version": rows.terms.version[used],
        "trajectory": rows.trajectories.index[row, rows.terms.trajectory[row, slot]],
    }


@dataclass(frozen=True)
class Parity:
    """Figures over n tokens, in nats. difference = sampler's policy log-prob - trainer's log-prob."""

    tokens: int
    mean: float  # of |difference|
    p50: float
    p99: float
    max: float
    kl_k1: float  # mean difference: KL(sampler ‖ trainer) without bias
    kl_k3: float  # mean of exp(-d) - 1 + d: the same, never negative, less noise
    beyond_05: float  # share of tokens with |difference| > 0.5
    beyond_005: float  # share with |difference| > 0.05


def compare(sampler: np.ndarray, trainer: np.ndarray) -> Parity:
    """Both [n] log-probs, at least one. The estimators of KL: http://joschu.net/blog/kl-approx.html"""
    d = sampler.astype(np.float64) - trainer.astype(np.float64)
    size = np.abs(d)
    return Parity(
        tokens=len(d),
        mean=float(size.mean()),
        p50=float(np.median(size)),
        p99=float(np.quantile(size, 0.99)),
        max=float(size.max()),
        kl_k1=float(d.mean()),
        kl_k3=float((np.exp(-d) - 1 + d).mean()),
        beyond_05=float((size > 0.5).mean()),
        beyond_005=float((size > 0.05).mean()),
    )


def likely_cause(sampler: np.ndarray, trainer: np.ndarray, trajectory: np.ndarray) -> str:
    """What a difference beyond rounding comes from, by its shape. trajectory [n]: which one each token is of."""
    d, size = sampler - trainer, np.abs(sampler - trainer)
    by_trajectory = np.array([size[trajectory == i].mean() for i in np.unique(trajectory)])
    # The median belongs to rounding as long as most trajectories are right; float32 itself is good to 1e-6 of a log-prob.
    usual = max(float(np.median(by_trajectory)), 1e-6)
    outside = float((by_trajectory > APART * usual).mean())
    if outside > 0:
        return (
            f"wrong version or stale prefix: {outside:.0%} of the trajectories are more than {APART:g} times as far off as the "
            "median one; the sampler computed them, or a cached part of them, by other weights"
        )
    if d.std() > 0 and trainer.std() > 0 and abs(np.corrcoef(d, trainer)[0, 1]) > CORRELATED:
        return (
            "temperature: the difference grows with the log-prob itself; is sampling.temperature the same on both sides, and are "
            "the sampler's log-probs taken after it?"
        )
    if abs(d.mean()) < 0.5 * size.mean():
        return "precision: differences of both signs on all trajectories alike; compare the dtypes of trainer and sampler"
    return "other weights: all trajectories are off, to one side; was the last publish taken?"
