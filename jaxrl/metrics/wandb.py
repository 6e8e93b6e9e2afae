"""Weights & Biases, for those who ask for it with `log.wandb`; the package is not a dependency.

A run of one folder is one W&B run: its id lies in RUN/wandb_id, and a start that goes on continues it. What was sent cannot
be taken back, so steps past the restored one are there twice; `step` is a metric of its own, not W&B's count of rows. Offline
mode is W&B's own: WANDB_MODE=offline, then `wandb sync`.
"""

import importlib.util
import tomllib
from collections.abc import Mapping
from pathlib import Path

from jaxrl.config import ConfigError

KEY = "log.wandb"


def check_installed() -> None:
    """Raises ConfigError if the package is not there."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(KEY, "the package wandb is not installed: pip install wandb, or leave the key out")


class WandbTracker:
    """Sends metrics to `project`, with RUN/config.toml as the run's config."""

    def __init__(self, project: str, run_dir: Path):
        check_installed()
        import wandb  # a second's worth of modules

        config, id_file = run_dir / "config.toml", run_dir / "wandb_id"
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                id=id_file.read_text() if id_file.exists() else None,
                resume="allow",
                dir=run_dir,
                config=tomllib.loads(config.read_text()) if config.exists() else None,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(KEY, f"{error}: run `wandb login`, set WANDB_MODE=offline, or leave the key out") from error
        id_file.write_text(self._run.id)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()
