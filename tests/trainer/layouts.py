"""One optimizer step on a mesh, and what it has to agree with: the same step on one device."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
from forest import make_architecture, make_config, make_forest, relative_errors

from jaxrl.config import MeshConfig
from jaxrl.mesh import make_mesh
from jaxrl.models.decoder import Decoder, init_variables
from jaxrl.packing import RowLimits, pack
from jaxrl.trainer.step import make_trainer

AXES = ("data", "fsdp", "context", "tensor")
LR = 1e-3
CONFIG = make_config(
    model={"remat": "none"},  # compiles faster
    packing={"rows": 8, "row_length": 40},
    algorithm={"entropy_weight": 0.05},
    optimizer={"lr": LR},
)
ARCHITECTURE = make_architecture(heads=8, kv_heads=8)  # so that `tensor` can be 8

# Sums across rows, a reference and Muon: what else a step can have.
ACROSS_ROWS = make_config(
    packing={"rows": 8},
    algorithm={
        "loss": "gspo",
        "clip_low": 0.1,
        "mask_level": "geometric",
        "mask_low": 0.97,
        "mask_high": 1.03,
        "kl_weight": 0.1,
    },
    optimizer={"lr": LR, "kind": "muon"},
)


def make_batches():
    """Two batches of 8 rows, the second mostly padding."""
    forest = [t for seed in range(4) for t in make_forest(seed)]
    forest = [replace(t, trajectory_index=i) for i, t in enumerate(forest)]
    return pack(forest, RowLimits.from_config(CONFIG.packing), CONFIG.packing.rows)[0]


@cache
def make_variables():
    """The same numpy variables on every process and for every mesh."""
    return jax.tree.map(np.asarray, init_variables(Decoder(ARCHITECTURE), jax.random.key(0), None))


def step_on(layout: dict[str, int], batches, config=CONFIG):
    """Loss, gradients and the parameters after AdamW, as pytrees of global arrays."""
    num_devices = int(np.prod(list(layout.values())))
    trainer = make_trainer(config, ARCHITECTURE, make_mesh(MeshConfig(**layout), jax.devices()[:num_devices]))
    state, update = trainer.init(make_variables()), trainer._reinforce
    totals = update.zero()
    coefficients = [{}] * len(batches)
    if update.measure is not None:
        coefficients = update.coefficients([update.measure(state, trainer._put(rows)) for rows in batches], batches)
    for rows, own in zip(batches, coefficients, strict=True):
        totals = update.accumulate(state, totals, trainer._put(rows), own)
    state, metrics = update.apply(state, totals)
    return {"loss": metrics["loss"], "gradients": totals.gradients, "after": state.trainable}


def compare(result, reference) -> tuple[float, float]:
    """Worst relative error of loss and gradients, which is that of an SGD step too, and worst absolute
    error of the parameters after AdamW in units of the learning rate."""
    errors = relative_errors({k: result[k] for k in ("loss", "gradients")}, {k: reference[k] for k in ("loss", "gradients")})
    difference = jax.tree.map(
        lambda a, b: float(np.max(np.abs(np.asarray(a) - np.asarray(b)))), result["after"], reference["after"]
    )
    return max(errors.values()), max(jax.tree.leaves(difference)) / LR
