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
    logprobs: np.ndarray | None = None  # [R, U] before the step, of the rows that were to be examined


def train(trainer: Trainer, state: TrainState, batch: Batch, step: int, examined: int, folder: Path) -> Trained:
    """Optimizer step number `step`, counted from 1; waits for the device. `state` is donated. examined: of which of the batch's
    rows the log-probs are wanted as they are before the step, or -1."""
    logprobs = None if examined < 0 else np.asarray(trainer.logprobs(state, batch.rows[examined]))
    state, raw = trainer.train_step(state, batch.rows)
    raw = jax.device_get(raw)
    if raw["nonfinite"]:
        return Trained(state, {}, dump_rows(folder, step, batch.rows, raw))
    metrics = {name: float(raw[key]) for key, name in NAMES.items() if key in raw}
    if not raw["terms"]:  # nothing to learn from: means over no terms would read as numbers
        return Trained(state, {name: value for name, value in metrics.items() if not name.startswith("policy/")})
    current = raw.get("current", 0)
    if current:
        metrics |= {"parity/tokens": float(current)}
        metrics |= {key: float(value) for key, value in raw.items() if key.startswith("parity/")}
    if current < raw["terms"] and "drift" in raw:
        metrics |= {"policy/drift_mean_abs": float(raw["drift"]), "policy/drift_max_abs": float(raw["drift_max"])}
    return Trained(state, metrics, logprobs=logprobs)


def dump_rows(folder: Path, step: int, batches: list[PackedRows], metrics: Metrics) -> Path:
    """FOLDER/nan_step_N.npz: the arrays of the first row whose loss is not finite, by name and with their R axis; all
    rows of its batch if only a gradient is not."""
    rows, row = batches[max(int(metrics["nonfinite_batch"]), 0)], int(metrics["nonfinite_row"])
    kept = jax.tree.map(lambda x: x if row < 0 else x[row : row + 1], rows)
    leaves, _ = jax.tree_util.tree_flatten_with_path(kept)
    path = folder / f"nan_step_{step}.npz"
    np.savez_compressed(path, **{jax.tree_util.keystr(where, simple=True, separator="."): x for where, x in leaves})
    return path
