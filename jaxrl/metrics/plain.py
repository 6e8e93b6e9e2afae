"""One line per step, for logs and pipes."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from jaxrl.metrics import names
from jaxrl.metrics.progress import Progress, duration, rate


class PlainTracker:
    """Prints the metrics that a person watches as one line per call of `log`."""

    def __init__(
        self, start_step: int, total_steps: int, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._progress = Progress(start_step, total_steps, clock)
        self._out = out if out is not None else sys.stdout

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.log(step, metrics)
        parts = [f"step {step}/{self._progress.total_steps}"]
        parts += [f"{label} {form(metrics[name])}" for name, label, form in _COLUMNS if name in metrics]
        if len(parts) == 1:
            return  # nothing that a person watches
        left = self._progress.seconds_left()
        if left is not None:
            parts.append(f"to go {duration(left)}")
        print(" | ".join(parts), file=self._out, flush=True)

    def close(self) -> None: ...


_COLUMNS = (
    (names.REWARD, "reward", "{:.3f}".format),
    (names.HELDOUT, "held-out", "{:.3f}".format),
    (names.LOSS, "loss", "{:.4g}".format),
    (names.LAG_MEAN, "lag", "{:.2f}".format),
    (names.PARITY, "parity", "{:.1e}".format),
    (names.FAILED, "failed", "{:.0f}".format),
    (names.TRAINER_RATE, "train tok/s", rate),
    (names.SAMPLER_RATE, "sample tok/s", rate),
)
