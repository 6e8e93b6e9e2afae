"""Where the numbers of a run go: one tracker interface, several backends.

A pipeline calls `log(step, metrics)` whenever it has numbers for a step; a step may be logged in several
calls (training, then a held-out evaluation). On resume every backend drops what lies past the restored
step, so a killed run reads like one that was never killed.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxrl.config import LogConfig
from jaxrl.metrics import names
from jaxrl.metrics.jsonl import JsonlTracker, cut

__all__ = ["Tracker", "Trackers", "check_trackers", "cut", "make_trackers", "names"]


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step. Names are slash-separated (`reward/mean`), see `names`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Trackers:
    """Several trackers as one, in order."""

    members: tuple[Tracker, ...]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self.members:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self.members:
            tracker.close()


def check_trackers(log: LogConfig) -> None:
    """Raises ConfigError if a tracker needs a package that is not installed."""
    if log.wandb:
        from jaxrl.metrics.wandb import check_installed

        check_installed()


def make_trackers(log: LogConfig, run_dir: str | Path, start_step: int, total_steps: int) -> Trackers:
    """The trackers of a run that goes on from the checkpoint of `start_step`, or begins (-1).

    Metrics of later steps, left by a process that was killed, are cut. What a person watches is the live
    view on a terminal, and one line per step anywhere else.
    """
    run_dir = Path(run_dir)
    cut(run_dir / "metrics.jsonl", start_step)
    members: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl")]
    if log.tensorboard:
        from jaxrl.metrics.tensorboard import TensorBoardTracker  # imports a second's worth of modules

        members.append(TensorBoardTracker(run_dir / "tensorboard", start_step))
    if log.wandb:
        from jaxrl.metrics.wandb import WandbTracker

        members.append(WandbTracker(log.wandb, run_dir))
    if log.live and sys.stdout.isatty():
        from jaxrl.metrics.live import LiveTracker

        members.append(LiveTracker(run_dir.name, start_step, total_steps))
    else:
        from jaxrl.metrics.plain import PlainTracker

        members.append(PlainTracker(start_step, total_steps))
    return Trackers(tuple(members))
