"""The radix tree over all trajectories of a step.

A node is a maximal run of tokens on the same set of trajectories. It is found by divide and conquer:
one trajectory of a set, drawn at random, is the pivot; the length of its common prefix with each of
the others says where they leave it, and those that leave at the same place by the same token are the
next sets. A random pivot halves the set a trajectory is in, in expectation, whatever the shape of the
tree (the argument of multikey quicksort, Bentley & Sedgewick 1997), and no token is compared again
once it is known to be shared: O(n log n) comparisons over O(tokens) data, never n².
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Tokens compared at first, and the factor by which the next stretch grows: most pairs differ within a
# few tokens, a shared prompt takes three comparisons.
FIRST_STRETCH = 64
STRETCH_GROWTH = 16


@dataclass(frozen=True)
class PrefixTree:
    """Nodes in pre-order, largest subtree first among siblings. Arrays over nodes have shape [K].

    The tokens of node v are `ids[example[v]][start[v]:end[v]]` and positions start..end - 1; its subtree
    is nodes v..stop[v] - 1. `canonical` differs from v only where siblings begin with the same token id
    (kept apart by content or by min_shared): it is then the first of them, whose read of that token
    they share.
    """

    parent: np.ndarray  # int64, -1 at a root
    start: np.ndarray
    end: np.ndarray
    example: np.ndarray  # a trajectory that runs through the node
    stop: np.ndarray
    canonical: np.ndarray
    last: np.ndarray  # [n] the node in which each trajectory ends
    unique_tokens: int  # of the tree in which every common prefix is shared, min_shared = 1


def common_prefix(a: np.ndarray, b: np.ndarray, start: int) -> int:
    """Length of the common prefix of a and b, which agree on [0, start)."""
    limit = min(len(a), len(b))
    stretch = FIRST_STRETCH
    while start < limit:
        stop = min(start + stretch, limit)
        differs = a[start:stop] != b[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start = stop
        stretch *= STRETCH_GROWTH
    return limit


def _common_rows(a: np.ndarray, b: np.ndarray, start: int) -> int:
    """common_prefix of arrays [L, ...]: of their elements in a line, in whole rows."""
    size = a[0].size
    return common_prefix(a.ravel(), b.ravel(), start * size) // size


def build_tree(
    ids: Sequence[np.ndarray], keys: Sequence[tuple[np.ndarray, ...]] | None = None, min_shared: int = 1
) -> PrefixTree:
    """The prefix tree of n sequences, each of at least one token.

    ids: n integer arrays [L]. keys: for tokens that are more than their id (an image patch, a token with
    its routed experts), per sequence the same number of arrays [L, ...]: two tokens are merged only if
    id and every key agree.
    min_shared: a run shorter than this is copied into the branches that follow it instead.
    """
    parent, end, example, last = _grow(ids, keys)
    start = [end[p] if p >= 0 else 0 for p in parent]
    unique_tokens = sum(end) - sum(start)
    if min_shared > 1:
        parent, start, end, example, last = _copy_short_runs(parent, start, end, example, last, min_shared)
    parent, start, end, example, stop, last = _preorder(parent, start, end, example, last)
    canonical = np.arange(len(parent))
    if min_shared > 1 or keys is not None:
        first_of: dict[tuple[int, int], int] = {}
        for v, up in enumerate(parent.tolist()):
            if up >= 0:
                canonical[v] = first_of.setdefault((up, int(ids[example[v]][start[v]])), v)
    return PrefixTree(parent, start, end, example, stop, canonical, last, unique_tokens)


def _parted(members, position, ids, keys) -> tuple[list[int], list[list[int]]]:
    """Members by their token at `position`: those that are alone with it, and the sets that are not."""
    first: dict[object, int] = {}
    together: dict[object, list[int]] = {}
    for m in members:
        token = int(ids[m][position])
        key = token if keys is None else (token, *(column[position].tobytes() for column in keys[m]))
        other = first.setdefault(key, m)
        if other != m:
            together.setdefault(key, [other]).append(m)
    if not together:
        return list(first.values()), []
    return [m for key, m in first.items() if key not in together], list(together.values())


def _grow(ids, keys):
    """Nodes in an order in which parents come first: parent, end, example [K], and last [n]."""
    parent: list[int] = []
    end: list[int] = []
    example: list[int] = []
    last = [0] * len(ids)
    draw = random.Random(0).random  # the tree does not depend on the pivots, only the time does
    sets: list[tuple[list[int], int, int]] = []

    def branch_out(members, position, up):
        alone, together = _parted(members, position, ids, keys)
        for m in alone:
            last[m] = len(parent)
            parent.append(up)
            end.append(len(ids[m]))
            example.append(m)
        sets.extend((part, position, up) for part in together)

    branch_out(range(len(ids)), 0, -1)
    while sets:
        members, depth, up = sets.pop()
        pivot = members[int(draw() * len(members))]
        pivot_ids = ids[pivot]
        leaves_at: dict[int, list[int]] = {len(pivot_ids): [pivot]}
        for m in members:
            if m != pivot:
                shared = common_prefix(ids[m], pivot_ids, depth)
                if keys is not None:
                    shared = min(shared, *map(_common_rows, keys[m], keys[pivot], itertools.repeat(depth)))
                leaves_at.setdefault(shared, []).append(m)
        for cut in sorted(leaves_at):
            node = len(parent)
            parent.append(up)
            end.append(cut)
            example.append(pivot)
            going_on = []
            for m in leaves_at[cut]:
                if len(ids[m]) == cut:
                    last[m] = node
                else:
                    going_on.append(m)
            branch_out(going_on, cut, node)
            up = node
    return parent, end, example, last


def _copy_short_runs(parent, start, end, example, last, min_shared):
    """The tree in which no run shorter than min_shared is shared by trajectories that part after it."""
    branches = [0] * len(parent)
    for up in parent:
        if up >= 0:
            branches[up] += 1
    ends_here = set(last)
    new: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
    hangs_on = [(-1, 0)] * len(parent)  # new parent of a node's children, and where their tokens begin
    new_of = [-1] * len(parent)
    for v, up in enumerate(parent):
        new_parent, begin = hangs_on[up] if up >= 0 else (-1, 0)
        parts = branches[v] + (v in ends_here) > 1
        dissolved = parts and end[v] - begin < min_shared
        hangs_on[v] = (new_parent, begin)
        if not dissolved or v in ends_here:
            new_of[v] = len(new[0])
            for column, value in zip(new, (new_parent, begin, end[v], example[v]), strict=True):
                column.append(value)
            if not dissolved:
                hangs_on[v] = (new_of[v], end[v])
    return *new, [new_of[v] for v in last]


def _preorder(parent, start, end, example, last):
    """Renumbers nodes so that a subtree is a range, the largest subtree first among siblings."""
    num_nodes = len(parent)
    tokens = [e - s for s, e in zip(start, end, strict=True)]
    nodes = [1] * num_nodes
    for v in range(num_nodes - 1, -1, -1):
        if parent[v] >= 0:
            tokens[parent[v]] += tokens[v]
            nodes[parent[v]] += nodes[v]
    children: list[list[int]] = [[] for _ in range(num_nodes + 1)]
    for v in np.lexsort((example, -np.asarray(tokens))).tolist():
        children[parent[v]].append(v)
    number = [0] * num_nodes
    first = 0
    for v in children[-1]:
        number[v] = first
        first += nodes[v]
    for v in range(num_nodes):
        first = number[v] + 1
        for child in children[v]:
            number[child] = first
            first += nodes[child]
    order = np.empty(num_nodes, np.int64)
    number = np.asarray(number, np.int64)
    order[number] = np.arange(num_nodes)
    parent = np.asarray(parent, np.int64)[order]
    parent[parent >= 0] = number[parent[parent >= 0]]
    start, end, example, nodes = (np.asarray(column, np.int64)[order] for column in (start, end, example, nodes))
    return parent, start, end, example, np.arange(num_nodes) + nodes, number[np.asarray(last, np.int64)]
