"""Builds the planned rows: tokens in pre-order, one subtree_end per token, reads and loss terms.

Shapes: T tokens, S segments, U reads, M terms, N trajectories per row, R rows per batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from jaxrl.data import LossTerms, PackedRows, Reads, RowTrajectories, Segments, TrainingTrajectory
from jaxrl.packing.bins import RowPlan
from jaxrl.packing.limits import PackingError, RowLimits
from jaxrl.packing.optional import NO_OPTIONALS, OF_TABLE, Widths, padded_columns
from jaxrl.packing.planner import PackingStats, Plan, plan
from jaxrl.packing.tree import PrefixTree


def pack(
    trajectories: Sequence[TrainingTrajectory], limits: RowLimits, rows_per_batch: int
) -> tuple[list[PackedRows], PackingStats]:
    """Packs an optimizer step into batches of `rows_per_batch` rows (R), the last filled up with empty
    rows. Arguments and errors as of `plan`; also raises PackingError if a row is not built as planned.
    """
    planned = plan(trajectories, limits)
    rows = [build_row(planned, number) for number in range(len(planned.rows))]
    rows += [empty_row(limits, planned.widths)] * (-len(rows) % rows_per_batch)
    batches = [_stack(rows[first : first + rows_per_batch]) for first in range(0, len(rows), rows_per_batch)]
    return batches, planned.stats


def _stack(rows):
    """Nested dataclasses of [...] arrays -> the same of [R, ...] arrays."""
    if isinstance(rows[0], np.ndarray):
        return np.stack(rows)
    kind = type(rows[0])
    return kind(**{f.name: _stack([getattr(row, f.name) for row in rows]) for f in fields(kind)})


def _padded(values, size: int, fill, dtype) -> np.ndarray:
    out = np.full(size, fill, dtype)
    out[: len(values)] = values
    return out


def empty_row(limits: RowLimits, widths: Widths = NO_OPTIONALS) -> PackedRows:
    """A row of padding: arrays without the R axis. `widths`: of the optional arrays that the run's rows have."""
    none = np.zeros(0)
    return _row(
        limits,
        widths,
        {},
        tokens=(none, none, none, none),
        segments=(none, none, none, none),
        reads=(none, none, none),
        terms=(none,) * 8,
        trajectories=(none,) * 5,
    )


def empty_batch(limits: RowLimits, rows_per_batch: int, widths: Widths = NO_OPTIONALS) -> PackedRows:
    """Rows of padding, in the shapes and dtypes of every batch of a run."""
    return _stack([empty_row(limits, widths)] * rows_per_batch)


def _row(
    limits: RowLimits, widths: Widths, optional: Mapping[str, np.ndarray], *, tokens, segments, reads, terms, trajectories
) -> PackedRows:
    """Pads the columns of a row to its capacities. `optional`: columns of the fields in `widths`, by name."""
    T, S, U, M, N = limits.row_length, limits.segments, limits.reads, limits.terms, limits.trajectories
    i32, f32 = np.int32, np.float32
    subtree_end = np.arange(1, T + 1, dtype=i32)
    subtree_end[: len(tokens[2])] = tokens[2]
    return PackedRows(
        tokens=_padded(tokens[0], T, 0, i32),
        positions=_padded(tokens[1], T, 0, i32),
        subtree_end=subtree_end,
        predecessor=_padded(tokens[3], T, -1, i32),
        segments=Segments(*(_padded(c, S, fill, i32) for c, fill in zip(segments, (0, 0, -1, 0), strict=True))),
        # An unused read has temperature 1, so that dividing by it is harmless.
        reads=Reads(
            *(_padded(c, U, *how) for c, how in zip(reads, ((-1, i32), (-1, i32), (1, f32)), strict=True)),
            **padded_columns("reads", optional, widths, limits),
        ),
        terms=LossTerms(
            *(
                _padded(c, M, *how)
                for c, how in zip(
                    terms,
                    ((-1, i32), (-1, i32), (-1, i32), (0, f32), (0, f32), (0, f32), (0, f32), (-1, i32)),
                    strict=True,
                )
            ),
            **padded_columns("terms", optional, widths, limits),
        ),
        trajectories=RowTrajectories(
            *(
                _padded(c, N, *how)
                for c, how in zip(trajectories, ((-1, i32), (-1, i32), (-1, i32), (0, f32), (0, i32)), strict=True)
            )
        ),
        **padded_columns("tokens", optional, widths, limits),
    )


def build_row(planned: Plan, number: int) -> PackedRows:
    """Row `number` of a plan: arrays without the R axis. Raises PackingError, naming the row, if it
    comes out other than planned."""
    tree, row, limits = planned.tree, planned.rows[number], planned.limits
    members = [planned.trajectories[i] for i in row.members]
    length = (tree.end - tree.start)[row.nodes]
    offset = np.cumsum(length) - length

    tokens = _token_columns(planned, row, length, offset)
    optional = {name: _along_nodes(planned, row, name) for name in OF_TABLE["tokens"] if name in planned.widths}
    segments = _segment_columns(tree, row, length, offset)
    reads, terms = _read_and_term_columns(planned, row, offset, optional)
    built = {"tokens": len(tokens[0]), "reads": len(reads[0]), "terms": len(terms[0]), "segments": len(segments[0])}
    wanted = {name: getattr(row, name) for name in built}
    if built != wanted:
        raise PackingError(f"row {number} was planned with {wanted} and built with {built}")
    trajectories = (
        [t.trajectory_index for t in members],
        [t.episode_index for t in members],
        [t.group_index for t in members],
        [t.reward for t in members],
        [len(t.trajectory.ids) for t in members],
    )
    return _row(
        limits,
        planned.widths,
        optional,
        tokens=tokens,
        segments=segments,
        reads=reads,
        terms=terms,
        trajectories=trajectories,
    )


def _along_nodes(planned: Plan, row: RowPlan, name: str) -> np.ndarray:
    """The field of the tokens of the row's nodes, in pre-order."""
    tree = planned.tree
    pieces = [getattr(planned.trajectories[tree.example[v]], name)[tree.start[v] : tree.end[v]] for v in row.nodes]
    return np.concatenate(pieces)


def _token_columns(planned: Plan, row: RowPlan, length, offset):
    """tokens, positions, subtree_end, predecessor, in pre-order."""
    tree, nodes = planned.tree, row.nodes
    tokens = np.concatenate([planned.trajectories[tree.example[v]].trajectory.ids[tree.start[v] : tree.end[v]] for v in nodes])
    at = np.arange(len(tokens))
    positions = at + np.repeat(tree.start[nodes] - offset, length)
    # The row's nodes are sorted in pre-order: a subtree ends where the first node outside it begins.
    ends = np.append(offset, len(tokens))[np.searchsorted(nodes, tree.stop[nodes])]
    predecessor = at - 1
    parent = tree.parent[nodes]
    up = np.searchsorted(nodes, parent)
    predecessor[offset] = np.where(parent < 0, -1, offset[up] + length[up] - 1)
    return tokens, positions, np.repeat(ends, length), predecessor


def _segment_columns(tree: PrefixTree, row: RowPlan, length, offset):
    """start, length, parent, depth. A segment of the row is a chain of tree nodes none of which but the
    last branches or ends a trajectory here: where only other rows do, it runs on."""
    nodes = row.nodes
    parent = tree.parent[nodes]
    branches = np.bincount(np.searchsorted(nodes, parent[parent >= 0]), minlength=len(nodes))
    last = branches >= 2
    last[np.searchsorted(nodes, tree.last[list(row.members)])] = True
    first = np.append(True, last[:-1])  # an only child follows its parent in pre-order
    segment_of = np.cumsum(first) - 1
    tops = np.flatnonzero(first)
    up = np.where(parent[tops] < 0, -1, segment_of[np.searchsorted(nodes, parent[tops])])
    depth: list[int] = []
    for p in up.tolist():
        depth.append(depth[p] + 1 if p >= 0 else 0)
    return offset[tops], np.add.reduceat(length, tops), up, depth


def _read_and_term_columns(planned: Plan, row: RowPlan, offset, optional: dict[str, np.ndarray]):
    """(state, target, temperature) of the reads, sorted by state; the columns of LossTerms. Puts the columns of the
    optional fields of both into `optional`."""
    tree = planned.tree
    slot_of = dict(zip(row.nodes.tolist(), offset.tolist(), strict=True))
    state, target, temperature, trajectory = [], [], [], []
    values: dict[str, list[np.ndarray]] = {
        name: [] for name in ("turn", "policy_logp", "behaviour_logp", "advantage", "weight", "version")
    }
    given: dict[str, list[np.ndarray]] = {
        name: [] for table in ("reads", "terms") for name in OF_TABLE[table] if name in planned.widths
    }
    for slot, i in enumerate(row.members):
        training = planned.trajectories[i]
        path = []
        node = int(tree.last[i])
        while node >= 0:
            path.append(node)
            node = int(tree.parent[node])
        path.reverse()
        position = np.flatnonzero(training.trajectory.trainable)
        shift = np.array([slot_of[v] for v in path]) - tree.start[path]
        on = np.searchsorted(tree.start[path], position - 1, side="right") - 1
        state.append(position - 1 + shift[on])
        target.append(training.trajectory.ids[position])
        temperature.append(np.full(len(position), training.trajectory.temperature, np.float32))
        trajectory.append(np.full(len(position), slot))
        for name, column in values.items():
            source = training if name in ("advantage", "weight") else training.trajectory
            column.append(getattr(source, name)[position])
        for name, column in given.items():
            column.append(getattr(training, name)[position])
    columns = np.concatenate(state), np.concatenate(target), np.concatenate(temperature)
    order = np.lexsort(columns[::-1])
    columns = [column[order] for column in columns]
    new = np.append(True, np.logical_or.reduce([column[1:] != column[:-1] for column in columns]))
    read = np.empty(len(order), np.int64)
    read[order] = np.cumsum(new) - 1
    terms = (read, np.concatenate(trajectory), *(np.concatenate(column) for column in values.values()))
    for name, column in given.items():
        whole = np.concatenate(column)
        optional[name] = whole[order][new] if name in OF_TABLE["reads"] else whole
    return tuple(column[new] for column in columns), terms
