"""The train state a run begins or goes on with: the same calls, in the same order, on every process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl.checkpoint import Checkpoints, abstract_state
from jaxrl.config import ConfigError
from jaxrl.pipeline.batch import refused_batch
from jaxrl.pipeline.data_order import fingerprint
from jaxrl.pipeline.setup import Parts, initial_variables
from jaxrl.trainer.state import TrainState

HostState = dict[str, Any]


def restore_or_start(
    parts: Parts, folder: Path, checkpoints: Checkpoints, step: int | None, warm_start: Callable[[TrainState], TrainState]
) -> tuple[TrainState, HostState | None]:
    """The train state and what the host knew: of the checkpoint of `step`, else of step 0, after `warm_start` if the
    config has one. Everything is compiled then, and has run at full size."""
    trainer = parts.trainer
    state, host = trainer.init(initial_variables(parts)), None
    if step is not None:
        host = checkpoints.host(step)
        if host["dataset"] != fingerprint(parts.environment.train):
            raise ConfigError(
                "env", f"{folder} holds a run on other task rows than these: give it back its rows, or choose another `name`"
            )
        abstract, frozen = abstract_state(saved_part(parts, state)), state.frozen
        del state
        restored = checkpoints.restore(step, abstract)
        state = replace(restored, frozen=frozen) if _base_is_elsewhere(parts) else restored
    elif parts.config.sft is not None:
        state = warm_start(state)
    state, _ = trainer.train_step(state, [refused_batch(parts.limits, parts.config.packing.rows)])
    return state, host


def saved_part(parts: Parts, state: TrainState) -> TrainState:
    """What a checkpoint holds of the state."""
    return replace(state, frozen={}) if _base_is_elsewhere(parts) else state


def _base_is_elsewhere(parts: Parts) -> bool:
    """A frozen base that came from a checkpoint's files is not saved again with every step."""
    return parts.config.model.lora is not None and parts.checkpoint is not None
