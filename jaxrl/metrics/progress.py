"""How far a run is and how long it still takes, from the times at which its steps were logged."""

import time
from collections import deque
from collections.abc import Callable, Mapping

from jaxrl.metrics import names

_WINDOW = 20  # steps: long enough to smooth over evaluations, short enough to follow growing completions


class Progress:
    """Follows the calls of a tracker's `log`. A step is done when its training reward is logged."""

    def __init__(self, start_step: int, total_steps: int, clock: Callable[[], float] = time.monotonic):
        self.step = max(start_step, 0)
        self.total_steps = total_steps
        self.clock = clock
        self.started = clock()
        self.last_step_at = self.started
        self._done = deque([], maxlen=_WINDOW + 1)  # (step, time): the first step compiles, so time runs from its end

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if names.REWARD in metrics:
            self.step = step
            self.last_step_at = self.clock()
            self._done.append((step, self.last_step_at))

    def seconds_left(self) -> float | None:
        """None before two steps are done."""
        if len(self._done) < 2:
            return None
        (first, began), (last, ended) = self._done[0], self._done[-1]
        return (ended - began) / (last - first) * (self.total_steps - self.step)


def duration(seconds: float) -> str:
    """59 s, 4:05, 1:02:03."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def rate(value: float) -> str:
    """950, 1.2k, 34k, 1.2M."""
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.{1 if value < 10 * scale else 0}f}{unit}"
    return f"{value:.0f}"
