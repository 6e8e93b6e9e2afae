"""Assigns trajectories to rows by marginal cost: the tokens a row does not hold yet.

The tree is walked in pre-order, largest subtree first. A subtree goes whole into the open row that
already holds most of its path, the fullest of those it fits; the price of a row is the path tokens it
would have to copy. What fits nowhere is taken apart. A trajectory is never split: all its terms are in
one row, so each (trajectory, position) is read once, whatever rows hold copies of its prefix.

There are two ways to take apart what would fit an empty row but no open one. `split` fills the gaps
of open rows first, at the price of more copied prefixes; the other starts a new row. Which needs
fewer rows depends on the sizes; the planner tries both.
"""

from dataclasses import dataclass

import numpy as np

from jaxrl.packing.demand import Demand
from jaxrl.packing.limits import RowLimits
from jaxrl.packing.tree import PrefixTree

# Rows considered at a time; the fullest is closed when there are more. It bounds the work per
# trajectory, and the gaps of this many rows hold all sizes there are.
MAX_OPEN_ROWS = 128


@dataclass(frozen=True)
class RowPlan:
    """A row to be built: its trajectories and tree nodes, in pre-order, and what they add up to."""

    members: tuple[int, ...]
    nodes: np.ndarray  # int64, ancestors included
    tokens: int
    reads: int
    terms: int
    segments: int


class _Row:
    """A row being filled. `children` holds its nodes and how many children of each it has."""

    __slots__ = ("free", "reads", "terms", "segments", "members", "children", "ends", "pieces")

    def __init__(self, row_length: int):
        self.free = row_length
        self.reads = 0
        self.terms = 0
        self.segments = 0
        self.members: list[int] = []
        self.children: dict[int, int] = {}
        self.ends: set[int] = set()
        self.pieces: set[int] = set()


class _Packer:
    def __init__(self, tree: PrefixTree, demand: Demand, limits: RowLimits, split: bool):
        self.limits, self.split, self.demand = limits, split, demand
        self.parent = tree.parent.tolist()
        self.stop = tree.stop.tolist()
        self.length = (tree.end - tree.start).tolist()
        self.path_length = tree.end.tolist()
        self.last = tree.last.tolist()
        by_node = np.argsort(tree.last, kind="stable")
        self.by_node = by_node.tolist()
        self.first_member = np.searchsorted(tree.last[by_node], np.arange(len(self.parent) + 1)).tolist()
        tokens = np.concatenate([[0], np.cumsum(tree.end - tree.start)])
        self.subtree_tokens = (tokens[tree.stop] - tokens[:-1]).tolist()
        self.terms_before = np.concatenate([[0], np.cumsum(np.asarray(demand.terms, np.int64)[by_node])]).tolist()
        # With a read slot for every token and temperature, reads cannot run out before tokens do.
        self.reads_bind = limits.reads < limits.row_length * demand.num_temperatures
        self.rows: list[_Row] = []
        self.open: list[_Row] = []
        self.rows_of: dict[int, list[_Row]] = {}  # open rows that hold a node

    def _new_segments(self, row: _Row, node: int) -> int:
        """Segments a trajectory that ends in `node` would add: its own, and the rest of one it parts."""
        children, parent = row.children, self.parent
        if node in children:
            return int(node not in row.ends and children[node] < 2)
        up = parent[node]
        while up >= 0 and up not in children:
            up = parent[up]
        return 1 + int(up >= 0 and children[up] == 1 and up not in row.ends)

    def _new_reads(self, row: _Row, i: int) -> int:
        demand = self.demand
        shared = sum(demand.piece_length[p] for p in demand.pieces[i] if p not in row.pieces)
        return demand.own_reads[i] + shared

    def _takes(self, row: _Row, i: int) -> bool:
        """Whether a trajectory fits in everything but tokens. Exact."""
        limits = self.limits
        return (
            row.terms + self.demand.terms[i] <= limits.terms
            and len(row.members) < limits.trajectories
            and (row.segments + 2 <= limits.segments or row.segments + self._new_segments(row, self.last[i]) <= limits.segments)
            and (not self.reads_bind or row.reads + self._new_reads(row, i) <= limits.reads)
        )

    def _takes_subtree(self, row: _Row, v: int) -> bool:
        """The same for all trajectories of a subtree. Never too generous; too strict costs a descent."""
        limits = self.limits
        first, stop = self.first_member[v], self.first_member[self.stop[v]]
        terms = self.terms_before[stop] - self.terms_before[first]
        return (
            row.terms + terms <= limits.terms
            and len(row.members) + stop - first <= limits.trajectories
            and row.segments + self.stop[v] - v + 1 <= limits.segments
            and (not self.reads_bind or row.reads + terms <= limits.reads)
        )

    def _search(self, node: int, tokens: int, takes, what: int) -> _Row | None:
        """The open row of least marginal cost for something that hangs on `node` and has this many
        tokens below it; the fullest among equals."""
        scanned = 0
        while True:
            rows = self.open if node < 0 else self.rows_of.get(node, ())
            if len(rows) > scanned:  # rows that hold a node hold its ancestors: no more, nothing new
                best = None
                for row in rows:
                    if row.free >= tokens and (best is None or row.free < best.free) and takes(row, what):
                        best = row
                if best is not None:
                    return best
                scanned = len(rows)
            if node < 0:
                return None
            tokens += self.length[node]
            node = self.parent[node]

    def _open_row(self) -> _Row:
        if len(self.open) == MAX_OPEN_ROWS:
            fullest = min(self.open, key=lambda row: row.free)
            self.open.remove(fullest)
            for node in fullest.children:
                self.rows_of[node].remove(fullest)
        row = _Row(self.limits.row_length)
        self.rows.append(row)
        self.open.append(row)
        return row

    def _add(self, row: _Row, i: int) -> None:
        node, children = self.last[i], row.children
        row.segments += self._new_segments(row, node)
        row.ends.add(node)
        row.terms += self.demand.terms[i]
        row.reads += self._new_reads(row, i)
        row.pieces.update(self.demand.pieces[i])
        row.members.append(i)
        count = 0
        while node >= 0 and node not in children:
            children[node] = count
            row.free -= self.length[node]
            self.rows_of.setdefault(node, []).append(row)
            count = 1
            node = self.parent[node]
        if node >= 0:
            children[node] += count

    def _place(self, i: int) -> None:
        row = self._search(self.last[i], 0, self._takes, i)
        self._add(self._open_row() if row is None else row, i)

    def _place_subtree(self, v: int) -> bool:
        tokens, up = self.subtree_tokens[v], self.parent[v]
        path = self.path_length[up] if up >= 0 else 0
        if path + tokens > self.limits.row_length:
            return False
        row = self._search(up, tokens, self._takes_subtree, v)
        if row is None:
            if self.split or not self._takes_subtree(_Row(self.limits.row_length), v):
                return False
            row = self._open_row()
        for k in range(self.first_member[v], self.first_member[self.stop[v]]):
            self._add(row, self.by_node[k])
        return True

    def fill(self) -> list[_Row]:
        v, num_nodes = 0, len(self.parent)
        # Trajectories that end inside a subtree being taken apart go after what continues them: by
        # then some row holds them already.
        waiting: list[tuple[int, int]] = []
        while v < num_nodes or waiting:
            if waiting and waiting[-1][0] == v:
                node = waiting.pop()[1]
                for k in range(self.first_member[node], self.first_member[node + 1]):
                    self._place(self.by_node[k])
            elif self._place_subtree(v):
                v = self.stop[v]
            else:
                if self.first_member[v] < self.first_member[v + 1]:
                    waiting.append((self.stop[v], v))
                v += 1
        return self.rows


def assign_rows(tree: PrefixTree, demand: Demand, limits: RowLimits, split: bool) -> list[RowPlan]:
    """Rows that together hold every trajectory of the tree once. Each trajectory must fit an empty row."""
    plans = []
    for row in _Packer(tree, demand, limits, split).fill():
        plans.append(
            RowPlan(
                members=tuple(sorted(row.members, key=lambda i: (tree.last[i], i))),
                nodes=np.array(sorted(row.children), np.int64),
                tokens=limits.row_length - row.free,
                reads=row.reads,
                terms=row.terms,
                segments=row.segments,
            )
        )
    return plans
