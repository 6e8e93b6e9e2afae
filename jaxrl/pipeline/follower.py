"""What every process but 0 does: starts as process 0 does, then obeys its records until the last.

It holds its shards of the train state and computes. It locks, logs, samples and journals nothing; of the run's folder it
writes its share of each checkpoint.
"""

import json
import signal
from pathlib import Path

import jax

from jaxrl.checkpoint import Checkpoints
from jaxrl.config import Config, ConfigError, parse
from jaxrl.data import PackedRows
from jaxrl.packing.rows import empty_batch
from jaxrl.pipeline.run_folder import differences
from jaxrl.pipeline.setup import Parts, build
from jaxrl.pipeline.start import restore_or_start, saved_part
from jaxrl.pipeline.warm_start import follow_warm_start
from jaxrl.trainer.gather import gather
from jaxrl.trainer.processes import Action, Peers, Record
from jaxrl.trainer.state import TrainState


def follow(config: Config, peers: Peers) -> None:
    """Takes part in a run until process 0 ends it. SIGTERM and SIGINT ask process 0 to save and end. Raises ConfigError if
    this process was started with another config or does not see the run's folder, CheckpointError if it cannot save."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: peers.signalled(signal.Signals(number).name))
    parts = build(config)
    template = empty_batch(parts.limits, config.packing.rows)
    first, _ = peers.receive(template)
    if first.action is Action.STOP:
        return
    folder = Path(config.out) / config.name
    _check_same_run(first, config, folder, peers.index)
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep, config.checkpoint.keep_best)
    try:
        step = None if first.step < 0 else first.step
        state, _ = restore_or_start(parts, folder, checkpoints, step, lambda state: follow_warm_start(parts, state, peers))
        gather(state.frozen)
        gather(state.trainable)  # for the sampler that process 0 makes
        _obey(parts, state, checkpoints, peers, template)
    finally:
        checkpoints.close()


def _obey(parts: Parts, state: TrainState, checkpoints: Checkpoints, peers: Peers, template: PackedRows) -> None:
    trainer = parts.trainer
    while True:
        record, rows = peers.receive(template)
        match record.action:
            case Action.TRAIN:
                if record.examined >= 0:
                    trainer.logprobs(state, rows[record.examined])
                state, metrics = trainer.train_step(state, rows)
                jax.block_until_ready(metrics)  # or an error would show in a later record
            case Action.PUBLISH:
                gather(state.trainable)
            case Action.CHECKPOINT:
                checkpoints.save(record.step, saved_part(parts, state), {}, record.metric)
            case Action.STOP:
                return


def _check_same_run(first: Record, config: Config, folder: Path, process: int) -> None:
    other = parse(json.loads(first.detail))
    for key, there, here in differences(other, config):
        raise ConfigError(key, f"is {here!r} on process {process} and {there!r} on process 0: start every process alike")
    if not (folder / "config.toml").exists():
        raise ConfigError(
            "out", f"{folder.absolute()} is not there on process {process}: every process needs the folder that process 0 uses"
        )
