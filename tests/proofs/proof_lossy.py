"""Lossy sampling: what it costs uncorrected, and that the exact correction takes it back.

A policy of one table, logits [position, token before, token], learns by the project's own loss which token follows which. Its
sampler is lossy: at every position it drafts one token d, the likeliest one of the policy at step 0, accepts it with
probability p(d)^α, and else draws from p without d. So μ(d) = p(d)^α, μ(x) = (1 − p(d)^α) p(x) / (1 − p(d)).

From the same start, five seeds each: lossless; corrected (the loss is told μ, by token or by "sequence"); uncorrected (it is told p,
as if sampling were lossless). What is compared is the expected reward of the policy itself after training, computed exactly. The
update is plain gradient descent: Adam would hide how large a gradient is.

make verify-lossy
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.config import AlgorithmConfig
from jaxrl.losses import LOSSES
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.corrections import LOG_RHO

VOCABULARY, LENGTH, TASKS, GROUP, STEPS, SEEDS, LR = 8, 4, 32, 32, 200, 5, 10.0
ALPHAS = (0.3, 0.5)
NOISE = 0.02  # of a reward in [0, 1]: lossless runs of one start that draw other tokens differ by as much
ALGORITHMS = {
    level: AlgorithmConfig(loss="grpo", scale_by_std=False, correction_cap=1e6, correction_level=level)
    for level in ("sequence", "token")
}


def lossy(logp, draft, alpha):
    """log μ [B, V] of the power rule for drafts [B]; lossless at α = 1."""
    accepted = alpha * _at(logp, draft)[:, None]
    others = logp + jnp.log1p(-jnp.exp(accepted)) - jnp.log1p(-jnp.exp(accepted / alpha))
    return jnp.where(jnp.arange(VOCABULARY) == draft[:, None], accepted, others)


def _at(x, index):
    return jnp.take_along_axis(x, index[..., None], -1)[..., 0]


def sample(table, drafts, first, alpha, key):
    """Answers to the tokens `first` [B]: the token before each, the token, its policy and behaviour log-prob, all [B, L]."""

    def one(before, at):
        position, key = at
        logp = jax.nn.log_softmax(table[position, before])
        mu = lossy(logp, drafts[position, before], alpha)
        token = jax.random.categorical(key, mu)
        return token, (before, token, _at(logp, token), _at(mu, token))

    _, columns = jax.lax.scan(one, first, (jnp.arange(LENGTH), jax.random.split(key, LENGTH)))
    return [column.T for column in columns]


def follows(before):
    return (5 * before + 3) % VOCABULARY


def expected_reward(table):
    """Share of the tokens that follow the rule, over the policy's own answers to every first token."""
    p, tokens = jax.nn.softmax(table, -1), jnp.arange(VOCABULARY)
    reach, total = jnp.full(VOCABULARY, 1 / VOCABULARY), 0.0
    for position in range(LENGTH):
        total += jnp.sum(reach * p[position, tokens, follows(tokens)])
        reach = reach @ p[position]
    return total / LENGTH


def loss(table, before, token, policy, behaviour, advantage, algorithm):
    logp_all = jax.nn.log_softmax(table[jnp.arange(LENGTH)[None], before])
    ones = jnp.ones(token.size)
    terms = Aligned(
        used=ones > 0,
        logp=_at(logp_all, token).ravel(),
        entropy=-jnp.sum(jnp.exp(logp_all) * logp_all, -1).ravel(),
        policy_logp=policy.ravel(),
        behaviour_logp=behaviour.ravel(),
        advantage=jnp.repeat(advantage, LENGTH),
        weight=ones / ones.size,
        lag=0 * ones,
        coefficients={LOG_RHO: jnp.repeat((policy - behaviour).sum(1), LENGTH)},
    )
    return LOSSES[algorithm.loss].value(terms, algorithm)[0]


@functools.partial(jax.jit, static_argnames=("level", "is_told"))
def train(seed, draws, alpha, level, is_told):
    """Expected reward after training from start `seed`, with the random numbers `draws`."""
    start = jax.random.normal(jax.random.key(seed), (LENGTH, VOCABULARY, VOCABULARY))
    drafts = jnp.argmax(start, -1)
    optimizer = optax.sgd(LR)

    def one(carry, step):
        table, state = carry
        key_first, key = jax.random.split(jax.random.fold_in(jax.random.key(draws), step))
        first = jnp.repeat(jax.random.randint(key_first, (TASKS,), 0, VOCABULARY), GROUP)
        before, token, policy, behaviour = sample(table, drafts, first, alpha, key)
        of_group = (token == follows(before)).mean(-1).reshape(TASKS, GROUP)
        advantage = (of_group - of_group.mean(1, keepdims=True)).ravel()
        told = behaviour if is_told else policy
        gradient = jax.grad(loss)(table, before, token, policy, told, advantage, ALGORITHMS[level])
        update, state = optimizer.update(gradient, state)
        return (optax.apply_updates(table, update), state), None

    (table, _), _ = jax.lax.scan(one, (start, optimizer.init(start)), jnp.arange(STEPS))
    return expected_reward(table)


def rewards(alpha: float, level: str = "sequence", is_told: bool = True, draws: int = 1000) -> np.ndarray:
    """[seeds]"""
    return np.array([float(train(seed, draws + seed, alpha, level, is_told)) for seed in range(SEEDS)])


def main() -> int:
    lossless = rewards(1.0)
    rows = {"lossless": lossless, "lossless, other draws": rewards(1.0, draws=2000)}
    for alpha in ALPHAS:
        rows[f"α = {alpha}, corrected by sequence"] = rewards(alpha, draws=3000)
        rows[f"α = {alpha}, corrected by token"] = rewards(alpha, "token", draws=3000)
        rows[f"α = {alpha}, uncorrected"] = rewards(alpha, is_told=False, draws=3000)
    print(f"{'reward after training':36} {'mean':>6} {'less lossless, seed by seed':>30}")
    failures = []
    for name, row in rows.items():
        difference = row - lossless
        print(f"{name:36} {row.mean():6.3f} {' '.join(f'{d:+.3f}' for d in difference):>38}")
        if "sequence" in name or "other draws" in name:
            failures += [name] if np.abs(difference).max() > 2 * NOISE or abs(difference.mean()) > NOISE else []
        elif "uncorrected" in name:
            failures += [name] if difference.mean() > -3 * NOISE or (difference > -NOISE).any() else []
    print(
        json.dumps(
            {"failures": failures, **{name: round(float(row.mean()), 4) for name, row in rows.items()}}, ensure_ascii=False
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
