"""Whether trainer and sampler agree in a run, and if not, the likely cause.

Every step measures the difference over the tokens of its own version, at no cost. Where it is more than rounding, the next step
computes the log-probs of one batch before it trains, and from those the cause, the percentiles and the worst tokens are told: once
for each cause, and looked for again a while later.
"""

import logging
from collections.abc import Callable, Mapping

import numpy as np

from jaxrl.config import Config
from jaxrl.data import PackedRows
from jaxrl.metrics import names
from jaxrl.metrics.parity import compare, likely_cause, of_rows
from jaxrl.pipeline.batch import Batch

log = logging.getLogger(__name__)

# Mean |difference| in nats, twice what bf16 was seen to make on a small model; in float32 a guess that leaves room for TF32 products. A run
# warns late rather than of every model: `python -m jaxrl.parity` has the tight limits.
LIMIT_16_BIT, LIMIT = 0.08, 0.005
AGAIN = 50  # steps until an examination is repeated
WORST = 4  # tokens shown


class ParityWatch:
    """Of one run. decode: a token's text."""

    def __init__(self, config: Config, decode: Callable[[int], str]):
        coarse = any("16" in dtype for dtype in (config.model.dtype, config.sampler.dtype))
        self._limit, self._decode = LIMIT_16_BIT if coarse else LIMIT, decode
        self._suspected = False
        self._next = 0  # step at which to examine at the earliest
        self._told: set[str] = set()

    def note(self, metrics: Mapping[str, float]) -> None:
        """Takes in what a step measured; steps without a token of their own version say nothing."""
        if (mean := metrics.get(names.PARITY)) is not None:
            self._suspected = mean > self._limit

    def batch(self, batch: Batch, step: int) -> int:
        """Which of the rows of optimizer step `step`, counted from 1, is to be examined; -1: none."""
        if not self._suspected or step < self._next:
            return -1
        return next((i for i, rows in enumerate(batch.rows) if _is_current(rows, step).any()), -1)

    def examine(self, rows: PackedRows, logp: np.ndarray, step: int) -> str | None:
        """Logs, and returns, what is wrong with the tokens of the current version; None if that was said before. logp [R, U]:
        of every read, by the weights before the step."""
        self._next = step + AGAIN
        both = {name: x[_is_current(rows, step)[rows.terms.read >= 0]] for name, x in of_rows(rows, logp).items()}
        figures = compare(both["sampler"], both["trainer"])
        cause = likely_cause(both["sampler"], both["trainer"], both["trajectory"])
        kind = cause.partition(":")[0]
        if figures.mean <= self._limit or kind in self._told:
            return None
        self._told.add(kind)
        worst = np.argsort(-np.abs(both["sampler"] - both["trainer"]))[:WORST]
        tokens = ", ".join(
            f"{self._decode(int(both['target'][i]))!r} at {both['position'][i]} ({both['sampler'][i]:.3f} against {both['trainer'][i]:.3f})"
            for i in worst
        )
        text = (
            f"step {step}: sampler and trainer disagree by {figures.mean:.2g} nats a token (median {figures.p50:.2g}, 99% {figures.p99:.2g}, "
            f"worst {figures.max:.2g}; KL {figures.kl_k3:.2g}) on {figures.tokens} tokens that these weights sampled. Likely cause: {cause}. "
            f"Worst, sampler against trainer: {tokens}. `python -m jaxrl.parity CONFIG` looks closer"
        )
        log.warning("%s", text)
        return text


def _is_current(rows: PackedRows, step: int) -> np.ndarray:
    """[R, M]"""
    return (rows.terms.read >= 0) & (rows.terms.version == step - 1)
