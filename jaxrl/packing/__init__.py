"""Prefix-tree packing: the trajectories of a step become rows that hold every shared token once.

limits (capacities) < tree (radix tree) < demand (reads and terms) < bins (which row) < planner < rows
(the arrays). `weights` folds the denominators of a step into per-token weights beforehand.
"""

from jaxrl.packing.limits import PackingError, RowLimits, misfit
from jaxrl.packing.planner import PackingStats, Plan, plan
from jaxrl.packing.rows import pack
from jaxrl.packing.weights import fold_weights

__all__ = ["PackingError", "PackingStats", "Plan", "RowLimits", "fold_weights", "misfit", "pack", "plan"]
