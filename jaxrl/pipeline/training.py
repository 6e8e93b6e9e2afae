"""The trainer's thread: one optimizer step over packed rows, its metrics by name, and what is kept of a bad one."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxrl.data import PackedRows
from jaxrl.metrics import names
from jaxrl.pipeline.batch import Batch
from jaxrl.trainer.state import TrainState
from jaxrl.trainer.step import Metrics, Trainer

# Off the policy, parity takes a forward pass of its own over one batch of rows: it is measured once in so many steps.
PARITY_EVERY = 10

NAMES = {
    "loss": names.LOSS,
    "gradient_norm": "optimizer/gradient_norm",
    "learning_rate": "optimizer/learning_rate",
    "terms": "tokens/terms",
    "ratio": "policy/ratio",
    "clip_fraction": "policy/clip_fraction",
    "correction": "policy/correction",
    "kl": "policy/kl",
    "kl_reference": "policy/kl_reference",
    "kept": "policy/kept",
    "entropy": "policy/entropy",
    "importance": "policy/importance",
    "effective_sample_size": names.SAMPLE_SIZE,
}


@dataclass(frozen=True)
class Trained:
    state: TrainState
    metrics: dict[str, float]
    bad_rows: Path | None = None  # set if the update was refused: the state is as it was


def parity_batch(batch: Batch, step: int) -> int:
    """Which of the rows of optimizer step `step`, counted from 1, parity is measured on by a forward pass of its own; -1: on
    none, for the step itself measures it, or it is not its turn, or no token is of the current version."""
    if batch.metrics["lag/max"] == 0 or step % PARITY_EVERY:
        return -1
    return next((i for i, rows in enumerate(batch.rows) if _is_current(rows, step).any()), -1)


def train(trainer: Trainer, state: TrainState, batch: Batch, step: int, parity_batch: int, folder: Path) -> Trained:
    """Optimizer step number `step`, counted from 1; waits for the device. `state` is donated."""
    parity = {} if parity_batch < 0 else _lagged_parity(trainer, state, batch.rows[parity_batch], step)
    state, raw = trainer.train_step(state, batch.rows)
    raw = jax.device_get(raw)
    if raw["nonfinite"]:
        return Trained(state, {}, dump_rows(folder, step, batch.rows, raw))
    metrics = {name: float(raw[key]) for key, name in NAMES.items() if key in raw}
    if not raw["terms"]:  # nothing to learn from: means over no terms would read as numbers
        return Trained(state, {name: value for name, value in metrics.items() if not name.startswith("policy/")})
    if "parity/logp_mean_abs" in raw:
        is_current = batch.metrics["lag/max"] == 0
        mean, most = (names.PARITY, "parity/logp_max") if is_current else ("policy/drift_mean_abs", "policy/drift_max_abs")
        metrics |= {mean: float(raw["parity/logp_mean_abs"]), most: float(raw["parity/logp_max"])}
    return Trained(state, metrics | parity)


def _lagged_parity(trainer: Trainer, state: TrainState, rows: PackedRows, step: int) -> dict[str, float]:
    """|trainer's - sampler's log-prob| over the tokens of the current version, in rows that hold older ones too."""
    logp = np.asarray(trainer.logprobs(state, rows))
    read = np.take_along_axis(logp, np.maximum(rows.terms.read, 0), axis=1)
    difference = np.abs(read - rows.terms.policy_logp)[_is_current(rows, step)]
    return {names.PARITY: float(difference.mean()), "parity/logp_max": float(difference.max())}


def _is_current(rows: PackedRows, step: int) -> np.ndarray:
    return (rows.terms.read >= 0) & (rows.terms.version == step - 1)


def dump_rows(folder: Path, step: int, batches: list[PackedRows], metrics: Metrics) -> Path:
    """FOLDER/nan_step_N.npz: the arrays of the first row whose loss is not finite, by name and with their R axis; all
    rows of its batch if only a gradient is not."""
    rows, row = batches[max(int(metrics["nonfinite_batch"]), 0)], int(metrics["nonfinite_row"])
    kept = jax.tree.map(lambda x: x if row < 0 else x[row : row + 1], rows)
    leaves, _ = jax.tree_util.tree_flatten_with_path(kept)
    path = folder / f"nan_step_{step}.npz"
    np.savez_compressed(path, **{jax.tree_util.keystr(where, simple=True, separator="."): x for where, x in leaves})
    return path
