"""What each trajectory asks of a row beside tokens: loss terms, and reads it may share.

A read is (state, target, temperature), so trajectories that train the same token of a tree node read
it once. The trained stretches of all trajectories are cut, per node and temperature, at each other's
ends: the pieces between two cuts are read by a trajectory whole or not at all, and the reads of any
set of trajectories are the lengths of the union of their pieces, exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.packing.tree import PrefixTree

# Masks scanned together: enough to outweigh the call, few enough to stay in the cache.
MASKS_AT_ONCE = 64


@dataclass(frozen=True)
class TrainedRuns:
    """Maximal runs of trainable tokens of n trajectories: run k is positions begin[k]..end[k] - 1 of
    trajectory owner[k]; runs are sorted by owner and position."""

    owner: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    def counts(self, num_trajectories: int) -> np.ndarray:
        """[n] trainable tokens."""
        return np.bincount(self.owner, self.end - self.begin, num_trajectories).astype(np.int64)


@dataclass(frozen=True)
class Demand:
    """Per trajectory; lists, because the bin packer reads them one at a time."""

    terms: list[int]
    own_reads: list[int]  # reads no other trajectory can share
    pieces: dict[int, list[int]]  # pieces that another trajectory reads too, where there are any
    piece_length: list[int]
    num_temperatures: int


def trained_runs(masks: Sequence[np.ndarray]) -> TrainedRuns:
    """masks: bool [L] each, False at position 0."""
    owners, begins, ends = [], [], []
    for base in range(0, len(masks), MASKS_AT_ONCE):
        part = masks[base : base + MASKS_AT_ONCE]
        starts = np.cumsum([0] + [len(mask) for mask in part[:-1]])
        # The False at every position 0 keeps runs of neighbours apart; the last may end at the last token.
        flat = np.concatenate([*part, np.zeros(1, bool)])
        edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
        owner = np.searchsorted(starts, edges[0::2], side="right") - 1
        owners.append(owner + base)
        begins.append(edges[0::2] - starts[owner])
        ends.append(edges[1::2] - starts[owner])
    return TrainedRuns(np.concatenate(owners), np.concatenate(begins), np.concatenate(ends))


def _runs_by_node(runs: TrainedRuns, tree: PrefixTree):
    """Runs cut at node borders: owner, node, begin, end."""
    leaf = tree.last[runs.owner]
    whole = runs.begin >= tree.start[leaf]
    cut: list[tuple[int, int, int, int]] = []
    parent, start = tree.parent, tree.start
    current, node = -1, -1
    for k in np.flatnonzero(~whole).tolist()[::-1]:
        owner, begin, end = int(runs.owner[k]), int(runs.begin[k]), int(runs.end[k])
        if owner != current:
            current, node = owner, int(tree.last[owner])
        while start[node] >= end:
            node = int(parent[node])
        while True:
            cut.append((owner, node, max(begin, int(start[node])), min(end, int(tree.end[node]))))
            if start[node] <= begin:
                break
            node = int(parent[node])
    rest = np.array(cut, np.int64).reshape(-1, 4).T
    columns = (runs.owner[whole], leaf[whole], runs.begin[whole], runs.end[whole])
    return tuple(np.concatenate(pair) for pair in zip(columns, rest, strict=True))


def _merge_first_tokens(tree: PrefixTree, owner, node, begin, end):
    """Siblings that begin with the same token read it from the same state: that first token of a run
    is handed to the first of the siblings."""
    first_of = np.bincount(tree.canonical, minlength=len(tree.parent))
    twin = (begin == tree.start[node]) & (first_of[tree.canonical[node]] > 1)
    rest = np.where(twin, begin + 1, begin)
    keep = rest < end
    return (
        np.concatenate([owner[twin], owner[keep]]),
        np.concatenate([tree.canonical[node[twin]], node[keep]]),
        np.concatenate([begin[twin], rest[keep]]),
        np.concatenate([begin[twin] + 1, end[keep]]),
    )


def demand_of(runs: TrainedRuns, tree: PrefixTree, temperatures: np.ndarray) -> Demand:
    """temperatures: float [n]."""
    num = len(temperatures)
    owner, node, begin, end = _merge_first_tokens(tree, *_runs_by_node(runs, tree))
    values, temperature = np.unique(temperatures, return_inverse=True)
    span = int(tree.end.max()) + 1
    place = (node * len(values) + temperature[owner]) * span
    cuts = np.unique(np.concatenate([place + begin, place + end]))
    first, stop = np.searchsorted(cuts, place + begin), np.searchsorted(cuts, place + end)
    piece_length = np.diff(cuts, append=cuts[-1:])
    depth = np.cumsum(np.bincount(first, minlength=len(cuts)) - np.bincount(stop, minlength=len(cuts)))  # readers of a piece

    count = stop - first
    piece = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())
    reader = np.repeat(owner, count)
    alone = depth[piece] == 1
    own_reads = np.bincount(reader[alone], piece_length[piece[alone]], num).astype(np.int64)
    pieces: dict[int, list[int]] = {}
    for i, p in zip(reader[~alone].tolist(), piece[~alone].tolist(), strict=True):
        pieces.setdefault(i, []).append(p)
    return Demand(runs.counts(num).tolist(), own_reads.tolist(), pieces, piece_length.tolist(), len(values))
