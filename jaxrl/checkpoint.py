"""Checkpoints: the train state and what the host knows, one folder per step, by Orbax.

Writing is asynchronous. A checkpoint appears under its final name by one rename, after everything in it
is written: it is complete or invisible. It opens on any mesh: what to restore is described by shapes and
the shardings wanted, not by those saved.

The state may be donated to the next step as soon as `save` returns: on accelerators it has been copied
to the host by then; CPU buffers may be read in place, and are kept alive by JAX, which copies instead of
donating a buffer that someone else reads.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

_STATE, _HOST = "state", "host"
_METRIC = "reward"

# Orbax tells of every save and restore through this logger, and what fails in a thread of its own; that is raised here.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class CheckpointError(Exception):
    """A checkpoint cannot be written or read; the message names the folder and the fix."""


class Checkpoints:
    """The checkpoints of a run. Every process of the run calls every method, in the same order."""

    def __init__(self, folder: str | Path, keep: int, keep_best: bool, read_only: bool = False):
        """`keep`: most recent ones kept. `keep_best`: also the one with the highest metric. `read_only`:
        leaves the folder as it is, so that it can be read while the run that writes it goes on."""
        self._folder = Path(folder).absolute()
        policies: list[Any] = [checkpoint_managers.LatestN(keep)]
        if keep_best:
            best = checkpoint_managers.BestN(get_metric_fn=_metric, n=1, keep_checkpoints_without_metrics=False)
            policies.append(best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            best_fn=_metric,  # has the metric written beside the state
            save_decision_policy=_Always(),
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
        )
        try:
            self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=(_STATE, _HOST))
        except OSError as error:
            raise self._error("cannot open", error) from error

    def save(self, step: int, state: Any, host: Mapping[str, Any], metric: float | None = None) -> None:
        """Begins to save a pytree of arrays and a JSON-able dict under `step`; waits for the save before.

        Returns when the arrays may be donated. A step that is already saved is left as it is. `metric`:
        higher is better; None or NaN: never the best. Raises CheckpointError if this save cannot begin or
        the one before failed.
        """
        self.wait()
        if step in self.steps():
            return
        metrics = {_METRIC: float(metric)} if metric is not None and math.isfinite(metric) else None
        described = {"host": dict(host), "arrays": _describe(state)}
        args = ocp.args.Composite(**{_STATE: ocp.args.StandardSave(state), _HOST: ocp.args.JsonSave(described)})
        try:
            self._manager.save(step, args=args, metrics=metrics)
        except (OSError, ValueError) as error:
            raise self._error(f"cannot save step {step} in", error) from error

    def check(self) -> None:
        """Raises CheckpointError if a save in the background has failed; does not wait for one under way."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Until the save under way is complete. Raises CheckpointError if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # whatever the writing thread died of
            raise self._error("cannot save (free space, or fix the permissions) in", error) from error

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order: what a process that starts now would find."""
        return saved_steps(self._folder)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the highest metric; None if no checkpoint has one."""
        return self._manager.best_step()

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a step, on the shardings of `abstract`: a pytree of jax.ShapeDtypeStruct, see
        `abstract_state`. Raises CheckpointError naming an array that one of them lacks or has otherwise."""
        self._compare(step, self._arrays(step), _describe(abstract))
        return self._read(step, **{_STATE: ocp.args.StandardRestore(abstract)})[_STATE]

    def restore_part(self, step: int, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """Some fields of the state of a step, {field: pytree}, on the shardings of `abstract`; the others are
        not read. Raises CheckpointError as `restore` does."""
        arrays = {name: array for name, array in self._arrays(step).items() if name.split("/")[0] in abstract}
        self._compare(step, arrays, _describe(abstract))
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
        args = ocp.args.PyTreeRestore(item=dict(abstract), restore_args=restore_args, partial_restore=True)
        return self._read(step, **{_STATE: args})[_STATE]

    def fields(self, step: int) -> set[str]:
        """The fields of the state of a step that hold arrays."""
        return {name.split("/")[0] for name in self._arrays(step)}

    def _arrays(self, step: int) -> dict[str, str]:
        return self._read(step, **{_HOST: ocp.args.JsonRestore()})[_HOST]["arrays"]

    def _compare(self, step: int, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
        for name in [*saved, *(name for name in wanted if name not in saved)]:
            if saved.get(name) != wanted.get(name):
                problem = f"array {name} is {saved.get(name, 'missing')} there and {wanted.get(name, 'missing')} in this run"
                raise self._error(f"cannot restore step {step} from", problem)

    def host(self, step: int) -> dict[str, Any]:
        """The dict saved with a step."""
        return self._read(step, **{_HOST: ocp.args.JsonRestore()})[_HOST]["host"]

    def _read(self, step: int, **args: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**args))
        except (OSError, ValueError, KeyError) as error:
            raise self._error(f"cannot restore step {step} from", error) from error

    def close(self) -> None:
        """Waits for the save under way. Raises CheckpointError if it failed."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _error(self, what: str, error: Exception | str) -> CheckpointError:
        return CheckpointError(f"{what} {self._folder}: {error}")


def saved_steps(folder: str | Path) -> list[int]:
    """Steps of the complete checkpoints of a folder, in order; none if there is no such folder."""
    return sorted(ocp.utils.checkpoint_steps(folder)) if Path(folder).exists() else []


def abstract_state(state: Any, shardings: Any = None) -> Any:
    """What `restore` needs to know: shapes and dtypes of a pytree of arrays or of shapes, with other
    shardings (a pytree like it) or its own."""
    if shardings is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def _describe(state: Any) -> dict[str, str]:
    """Path, dtype and shape of every leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


class _Always:
    """Whoever calls `save` has decided."""

    def should_save(self, step, previous_steps, *, context) -> bool:
        return True


def _metric(metrics: Mapping[str, float]) -> float:
    return metrics[_METRIC]
