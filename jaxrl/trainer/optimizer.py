"""Optimizers as optax chains: clip by global norm, AdamW or Muon, learning rate by schedule and lag, correction of a delay.

Updates are to be added to the parameters.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from jaxrl.config import OptimizerConfig
from jaxrl.trainer.muon import muon


def make_schedule(peak: float, course: str, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Learning rate by optimizer update. Linear warm-up that ends at `peak` on update `warmup_steps`
    (the first update is already above 0), then `course`: constant, or linear or cosine to 0 at `total_steps`."""
    rest = max(total_steps - warmup_steps, 1)
    courses = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
    }
    if warmup_steps == 0:
        return courses[course]()
    warmup = optax.linear_schedule(peak / (warmup_steps + 1), peak, warmup_steps)
    return optax.join_schedules([warmup, courses[course]()], [warmup_steps])


def decay_mask(params):
    """True for matrices. Norm scales and biases do not decay; by name, for scanned layers stack
    vectors into matrices."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("scale", "bias"), params)


def parts(params):
    """ "muon" for the linear layers, "adamw" for the rest: embedding, head, norms and biases are not matrices that map hidden
    states to hidden states."""

    def one(path, _):
        names = [entry.key for entry in path]
        return "muon" if names[-1] in ("kernel", "lora_a", "lora_b") and "lm_head" not in names else "adamw"

    return jax.tree_util.tree_map_with_path(one, params)


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, placed: Any = None
) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), or Muon on the linear layers beside it. `placed`: the parameters' shardings. `update` takes `lag`, the mean
    lag of the step's tokens in policy versions, if `lag_scaling` is set."""
    adamw = optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decay_mask)
    core = adamw
    if config.kind == "muon":
        matrices = muon(schedule, config.momentum, config.weight_decay, placed)
        core = optax.partition({"muon": matrices, "adamw": adamw}, parts)
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm > 0 else []
    scale = [scale_by_lag(config.lag_scaling)] if config.lag_scaling > 0 else []
    optimizer = optax.chain(*clip, core, *scale)
    return correct_delay(optimizer, config.delay_correction) if config.delay_correction > 0 else optimizer


def like_params(opt_state: optax.OptState, values: Any, otherwise: Any) -> optax.OptState:
    """An optimizer state whose leaves are those of `values`, a tree like the parameters, wherever a leaf belongs to a
    parameter, and `otherwise` elsewhere. A leaf belongs to the parameter whose path its own path ends in."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(values)
    of_param = {tuple(entry.key for entry in path): value for path, value in leaves}

    def one(path, _):
        names = [entry.key for entry in itertools.takewhile(lambda e: isinstance(e, DictKey), reversed(path))]
        return of_param.get(tuple(reversed(names)), otherwise)

    return jax.tree_util.tree_map_with_path(one, opt_state)


def lag_factor(lag_scaling: float, lag: jax.Array) -> jax.Array:
    """1 / (1 + lag_scaling · lag): staleness-aware SGD (Zhang et al., arXiv:1511.05950 [t]) divides by the staleness."""
    return 1 / (1 + lag_scaling * lag)


def scale_by_lag(lag_scaling: float) -> optax.GradientTransformationExtraArgs:
    """Scales the whole update, as the learning rate would."""

    def update(updates, state, params=None, *, lag, **_):
        factor = lag_factor(lag_scaling, lag)
        return jax.tree.map(lambda u: (factor * u).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


class DelayState(NamedTuple):
    count: jax.Array  # int32 updates so far
    previous: optax.Updates  # the last update, uncorrected
    inner: optax.OptState


def correct_delay(inner: optax.GradientTransformation, strength: float) -> optax.GradientTransformationExtraArgs:
    """For gradients of parameters one update old: u_t + strength · (u_t − u_{t−1}), u the complete update of `inner`,
    learning rate and decay in it; the first one is left as it is. A correction for any optimizer [c]; 1 extrapolates by the
    whole delay."""
    inner = optax.with_extra_args_support(inner)

    def init(params):
        return DelayState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update(updates, state, params=None, **extra):
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        share = jnp.where(state.count > 0, strength, 0)
        corrected = jax.tree.map(lambda u, p: (u + share * (u - p)).astype(u.dtype), updates, state.previous)
        return corrected, DelayState(state.count + 1, updates, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
