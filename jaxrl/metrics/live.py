"""The view of a run in progress on a terminal."""

import time
from collections.abc import Callable, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl.metrics import names
from jaxrl.metrics.progress import Progress, duration, rate

_BARS = "▁▂▃▄▅▆▇█"
_REFRESHES_PER_SECOND = 4


class LiveTracker:
    """Redraws one panel in place. Printed text and warnings appear above it."""

    def __init__(
        self,
        run_name: str,
        start_step: int,
        total_steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._view = View(run_name, Progress(start_step, total_steps, clock))
        self._live = Live(self._view, console=console, refresh_per_second=_REFRESHES_PER_SECOND)
        self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._view.log(step, metrics)

    def close(self) -> None:
        self._live.stop()


class View:
    """What the panel shows: the newest value of every watched metric, and the rewards so far."""

    def __init__(self, run_name: str, progress: Progress):
        self._run_name = run_name
        self._progress = progress
        self._latest: dict[str, float] = {}
        self._rewards: list[float] = []
        self._heldout: list[float] = []
        self._failed = 0.0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.log(step, metrics)
        self._latest |= metrics
        self._failed += metrics.get(names.FAILED, 0.0)
        if names.REWARD in metrics:
            self._rewards.append(metrics[names.REWARD])
        if names.HELDOUT in metrics:
            self._heldout.append(metrics[names.HELDOUT])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.max_width - 4
        yield Panel(
            Group(self._head(inner), self._curves(inner), self._figures()),
            title=Text(self._run_name, style="bold"),
            title_align="left",
            border_style="dim",
            width=options.max_width,
        )

    def _head(self, width: int) -> Table:
        """Step, bar, time to go; and how long the running step has taken so far."""
        p = self._progress
        left = p.seconds_left()
        times = "to go …" if left is None else f"to go {duration(left)}"
        if width >= 72:
            times += f" · {duration(p.clock() - p.started)} so far · this step {duration(p.clock() - p.last_step_at)}"
        count = f"step {p.step}/{p.total_steps}"
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        bar = ProgressBar(total=p.total_steps, completed=p.step, width=max(width - len(count) - len(times) - 2, 1))
        row.add_row(Text(count, style="bold"), bar, Text(times))
        return row

    def _curves(self, width: int) -> Table:
        rows = Table.grid(padding=(0, 1))
        rows.add_column(width=8, style="dim")
        rows.add_column(width=6, justify="right")
        rows.add_column(no_wrap=True)
        for label, values, style in (("reward", self._rewards, "green"), ("held-out", self._heldout, "cyan")):
            if values:
                rows.add_row(label, Text(f"{values[-1]:.3f}", style="bold"), Text(sparkline(values, width - 17), style=style))
        return rows

    def _figures(self) -> Table:
        """Two rows of four figures; a dash until there is one."""
        cells = [
            ("lag", self._figure(names.LAG_MEAN, "{:.2f}".format)),
            ("worst lag", self._figure(names.LAG_MAX, "{:.0f}".format)),
            ("parity", self._figure(names.PARITY, "{:.1e}".format)),
            ("failed", f"{self._failed:.0f}"),
            ("train tok/s", self._figure(names.TRAINER_RATE, rate)),
            ("sample tok/s", self._figure(names.SAMPLER_RATE, rate)),
            ("loss", self._figure(names.LOSS, "{:.3g}".format)),
        ]
        grid = Table.grid(padding=(0, 2))
        for first in range(0, len(cells), 4):
            alert = [label == "failed" and self._failed > 0 for label, _ in cells[first : first + 4]]
            grid.add_row(
                *(
                    Text.assemble((f"{label} ", "dim"), (value, "bold red" if bad else "bold"))
                    for (label, value), bad in zip(cells[first : first + 4], alert, strict=True)
                )
            )
        return grid

    def _figure(self, name: str, form: Callable[[float], str]) -> str:
        return form(self._latest[name]) if name in self._latest else "–"


def sparkline(values: list[float], width: int) -> str:
    """The whole series as at most `width` bars, each the mean of a stretch; the lowest bar is the least value."""
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    edges = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[int((m - low) / span * (len(_BARS) - 1) + 0.5)] if span else _BARS[0] for m in means)
