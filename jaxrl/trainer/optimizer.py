"""AdamW as an optax chain: clip by global norm, Adam, decoupled decay on matrices, learning rate."""

import jax
import optax

from jaxrl.config import OptimizerConfig


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


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101); updates are to be added to the parameters."""
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm > 0 else []
    adamw = optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decay_mask)
    return optax.chain(*clip, adamw)
