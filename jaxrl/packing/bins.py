"""Assigns trajectories to rows by marginal cost: the tokens a row does not hold yet.

A node whose subtree is too large for a row is taken apart: its children, largest first, go into the
open row that already holds most of their path, and then into new rows. What goes into a row together
is chosen by subset sums, so that rows fill up to a few tokens and a subtree is spread over as few rows
(copies of its prefix) as can be. A trajectory is never split: all its terms are in one row, so each
(trajectory, position) is read once, whatever rows hold copies of its prefix.

A subtree that would fit an empty row but no gap of an open one can go either way: `split` takes it
apart to fill the gaps, at the price of copied prefixes; otherwise it starts a new row. Which needs
fewer rows depends on the sizes, so the planner tries both.
"""

from bisect import insort
from dataclasses import dataclass

import numpy as np

from jaxrl.packing.demand import Demand
from jaxrl.packing.limits import RowLimits
from jaxrl.packing.tree import PrefixTree

# Rows considered at a time; the fullest is closed when there are more. It bounds the work per
# trajectory, and the gaps of this many rows hold all sizes there are.
MAX_OPEN_ROWS = 128

# Subset sums are taken over this many candidates, evenly spaced by size: 2^24 sums leave no gap worth
# closing. Room for more than 8 of the largest is filled largest first, the subset closes what is left.
SUBSET_CANDIDATES = 24
SUBSET_ROOM = 8

# A row that has refused this many units that its tokens would admit is out of terms, reads, segments
# or trajectories: the rest is not tried.
MAX_REFUSED = 8


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


class _Frame:
    """A node being taken apart: subtrees too large for any row, and units that fit one, largest first."""

    __slots__ = ("node", "large", "units")

    def __init__(self, node: int, large: list[int], units: list[int]):
        self.node, self.large, self.units = node, large, units


def best_subset(sizes: list[int], room: int) -> list[int]:
    """Indices of the sizes with the largest sum that is at most `room`."""
    mask = (1 << (room + 1)) - 1
    reached = [1]  # bit s of reached[k]: some of the first k sizes add up to s
    for size in sizes:
        reached.append((reached[-1] | reached[-1] << size) & mask)
    total = reached[-1].bit_length() - 1
    chosen = []
    for k in range(len(sizes) - 1, -1, -1):
        if not reached[k] >> total & 1:
            chosen.append(k)
            total -= sizes[k]
    return chosen[::-1]


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
        # Private to one trajectory: once that is placed, nobody looks for the node again.
        self.private = (np.diff(self.first_member) == 1) & (tree.stop == np.arange(1, len(self.parent) + 1))
        self.private = self.private.tolist()
        self.subtree_tokens = (tokens[tree.stop] - tokens[:-1]).tolist()
        self.terms_before = np.concatenate([[0], np.cumsum(np.asarray(demand.terms, np.int64)[by_node])]).tolist()
        # The shortest way into each subtree: what at least must fit of it.
        self.least_path = list(self.length)
        self.least_member = [-1] * len(self.parent)
        for v in range(len(self.parent) - 1, -1, -1):
            first, stop = self.first_member[v], self.stop[v]
            if first < self.first_member[v + 1]:
                self.least_member[v] = self.by_node[first]
                continue
            least, child = None, v + 1
            while child < stop:
                if least is None or self.least_path[child] < self.least_path[least]:
                    least = child
                child = self.stop[child]
            self.least_path[v] += self.least_path[least]
            self.least_member[v] = self.least_member[least]
        # With a read slot for every token and temperature, reads cannot run out before tokens do.
        self.reads_bind = limits.reads < limits.row_length * demand.num_temperatures
        self.empty = _Row(limits.row_length)
        self.rows: list[_Row] = []
        self.open: list[_Row] = []
        self.rows_of: dict[int, list[_Row]] = {}  # open rows that hold a node, unless it is private

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
        reads = self.demand.own_reads[i]
        for piece in self.demand.pieces.get(i, ()):
            if piece not in row.pieces:
                reads += self.demand.piece_length[piece]
        return reads

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
        if stop - first == 1:
            return self._takes(row, self.by_node[first])
        terms = self.terms_before[stop] - self.terms_before[first]
        return (
            row.terms + terms <= limits.terms
            and len(row.members) + stop - first <= limits.trajectories
            and row.segments + self.stop[v] - v + 1 <= limits.segments
            and (not self.reads_bind or row.reads + terms <= limits.reads)
        )

    def _search(self, node: int, tokens: int, takes, what: int) -> _Row | None:
        """The open row of least marginal cost for something that hangs on `node` and has this many
        tokens below it; the emptiest among equals, so that what follows can join it."""
        scanned = 0
        while True:
            rows = self.open if node < 0 else self.rows_of.get(node, ())
            if len(rows) > scanned:  # rows that hold a node hold its ancestors: no more, nothing new
                best = None
                for row in rows:
                    if row.free >= tokens and (best is None or row.free > best.free) and takes(row, what):
                        best = row
                if best is not None:
                    return best
                scanned = len(rows)
            if node < 0:
                return None
            tokens += self.length[node]
            node = self.parent[node]

    def _fullness(self, row: _Row) -> float:
        """Share of its scarcest resource that a row has used."""
        limits = self.limits
        return max(
            1 - row.free / limits.row_length,
            row.terms / limits.terms,
            row.reads / limits.reads,
            row.segments / limits.segments,
            len(row.members) / limits.trajectories,
        )

    def _open_row(self) -> _Row:
        if len(self.open) == MAX_OPEN_ROWS:
            fullest = max(self.open, key=self._fullness)
            self.open.remove(fullest)
            for node in fullest.children:
                if not self.private[node]:
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
        row.pieces.update(self.demand.pieces.get(i, ()))
        row.members.append(i)
        count = 0
        while node >= 0 and node not in children:
            children[node] = count
            row.free -= self.length[node]
            if not self.private[node]:
                self.rows_of.setdefault(node, []).append(row)
            count = 1
            node = self.parent[node]
        if node >= 0:
            children[node] += count

    def _place(self, i: int) -> None:
        row = self._search(self.last[i], 0, self._takes, i)
        self._add(self._open_row() if row is None else row, i)

    def _place_subtree(self, row: _Row, v: int) -> None:
        for k in range(self.first_member[v], self.first_member[self.stop[v]]):
            self._add(row, self.by_node[k])

    def _frame(self, node: int) -> _Frame:
        room = self.limits.row_length - (self.path_length[node] if node >= 0 else 0)
        frame = _Frame(node, [], [])
        child, stop = node + 1, self.stop[node] if node >= 0 else len(self.parent)
        while child < stop:
            fits = self.subtree_tokens[child] <= room and self._takes_subtree(self.empty, child)
            (frame.units if fits else frame.large).append(child)
            child = self.stop[child]
        frame.large.reverse()
        return frame

    def _missing(self, row: _Row, node: int) -> int:
        """Tokens of the path to `node` that a row does not hold."""
        missing = 0
        while node >= 0 and node not in row.children:
            missing += self.length[node]
            node = self.parent[node]
        return missing

    def _fill_row(self, row: _Row, frame: _Frame) -> None:
        """Moves units from a frame into a row, as many tokens of them as fit."""
        units, sizes = frame.units, self.subtree_tokens
        room = row.free - self._missing(row, frame.node)
        refused: list[int] = []  # fit by their tokens, not by something else

        def move(v: int) -> int:
            if self._takes_subtree(row, v):
                self._place_subtree(row, v)
                return sizes[v]
            refused.append(v)
            return 0

        first = 0
        if not row.members:  # a new row: the largest is the hardest to place later
            room -= move(units[0])
            first = 1
        while first < len(units) and sizes[units[-1]] <= room and len(refused) < MAX_REFUSED:
            if sizes[units[first]] * SUBSET_ROOM < room:
                room -= move(units[first])
                first += 1
                continue
            count = len(units) - first
            step = max(count / SUBSET_CANDIDATES, 1)
            at = [first + int(k * step) for k in range(min(count, SUBSET_CANDIDATES))]
            chosen = best_subset([sizes[units[k]] for k in at], room)
            if not chosen:  # the smallest fits, though no candidate does
                chosen, at = [0], [len(units) - 1]
            for k in reversed(chosen):
                room -= move(units.pop(at[k]))
        frame.units = units[first:]
        for v in refused:
            insort(frame.units, v, key=lambda v: -sizes[v])

    def _place_units(self, frame: _Frame) -> int | None:
        """Places at least one unit of a frame, or names one to take apart first."""
        smallest, largest = frame.units[-1], frame.units[0]
        row = self._search(frame.node, self.subtree_tokens[smallest], self._takes_subtree, smallest)
        if row is not None:
            left = len(frame.units)
            self._fill_row(row, frame)
            if len(frame.units) == left:  # the best by tokens were refused; the one searched for is not
                frame.units.remove(smallest)
                self._place_subtree(row, smallest)
            return None
        if self.split and self.stop[largest] - largest > 1:
            if self._search(frame.node, self.least_path[largest], self._takes, self.least_member[largest]) is not None:
                return frame.units.pop(0)
        self._fill_row(self._open_row(), frame)
        return None

    def fill(self) -> list[_Row]:
        stack = [self._frame(-1)]
        while stack:
            frame = stack[-1]
            if frame.large:
                stack.append(self._frame(frame.large.pop()))
            elif frame.units:
                apart = self._place_units(frame)
                if apart is not None:
                    stack.append(self._frame(apart))
            else:
                stack.pop()
                # Trajectories that end in the node go after what continues them: a row holds them by now.
                if frame.node >= 0:
                    for k in range(self.first_member[frame.node], self.first_member[frame.node + 1]):
                        self._place(self.by_node[k])
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
