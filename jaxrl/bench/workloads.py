"""Prefix trees to measure attention on: the shapes that reinforcement learning leaves in a packed row.

A workload is a forest of nested segment lengths. Its shape is fixed, its lengths are drawn from a seed:
`workload(name, seed=i)` gives as many different forests as a measurement needs, and those with
`tokens` below 40,960 are the same trees scaled down. `layout` turns a forest into the arrays of a row.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

ROW = 40_960  # tokens for which the shapes below are written


class Tree(NamedTuple):
    """A segment of `length` tokens and the subtrees that continue it, in order."""

    length: int
    children: tuple["Tree", ...] = ()

    @property
    def total(self) -> int:
        """Tokens of the whole tree."""
        return self.length + sum(child.total for child in self.children)


class Layout(NamedTuple):
    """A forest as a packed row, in pre-order; padding fills it up."""

    subtree_end: np.ndarray  # [T] int32, exclusive; padding k + 1
    positions: np.ndarray  # [T] int32, from the root of the token's tree; padding 0
    pairs: int  # (query, key) pairs where the query sees the key; padding not counted


def _family(draw: np.random.Generator, prefix: int, num_leaves: int, shortest: int, longest: int) -> Tree:
    return Tree(prefix, tuple(Tree(int(n)) for n in draw.integers(shortest, longest + 1, num_leaves)))


def _nested(draw: np.random.Generator) -> Tree:
    """One system prompt, two tasks, two prompts each, four answers each."""

    def prompt() -> Tree:
        return _family(draw, int(draw.integers(2000, 4001)), 4, 100, 1500)

    return Tree(4000, tuple(Tree(int(draw.integers(3000, 5001)), (prompt(), prompt())) for _ in range(2)))


def _ragged(draw: np.random.Generator, depth: int = 0) -> Tree:
    """Uneven in depth, fan-out and length, down to segments of one token: what search and agents leave."""
    length = int(draw.choice((1, 7, 64, 300, 900, 2500)))
    num_children = draw.integers(2, 5) if depth < 5 else 0
    return Tree(length, tuple(_ragged(draw, depth + int(draw.integers(1, 4))) for _ in range(num_children)))


def _ragged_forest(draw: np.random.Generator) -> list[Tree]:
    """Ragged trees until nine tenths of a row are full."""
    forest: list[Tree] = []
    used = 0
    while used < 0.9 * ROW:
        tree = _ragged(draw)
        if used + tree.total <= ROW:
            forest.append(tree)
            used += tree.total
    return forest


_SHAPES: dict[str, Callable[[np.random.Generator], list[Tree]]] = {
    "fixed 5K+16x100": lambda draw: [_family(draw, 5000, 16, 100, 100) for _ in range(6)],
    "varied 5K+16x~100": lambda draw: [_family(draw, 5000, 16, 20, 180) for _ in range(6)],
    "medium-long 4K+8x~1K": lambda draw: [_family(draw, 4000, 8, 500, 1500) for _ in range(3)],
    "dominant 20K+16x~1K": lambda draw: [_family(draw, 20_000, 16, 200, 1800)],
    "depth-3 nested": lambda draw: [_nested(draw)],
    "ragged": _ragged_forest,
    "chain 40K": lambda draw: [Tree(ROW)],
}
WORKLOADS = tuple(_SHAPES)
VARIED = tuple(name for name in WORKLOADS if name not in ("fixed 5K+16x100", "chain 40K"))  # those a seed changes


def workload(name: str, seed: int = 0, tokens: int = ROW) -> list[Tree]:
    """The forest of a workload for a row of `tokens` tokens, which it fills to nine tenths or so.

    Equal arguments give equal trees. Fewer tokens than ROW scale every length down, to 1 at least.
    """
    draw = np.random.default_rng([WORKLOADS.index(name), seed])
    while True:  # lengths that overflow the row are drawn again: a few in a hundred
        forest = [_scaled(tree, tokens / ROW) for tree in _SHAPES[name](draw)]
        if sum(tree.total for tree in forest) <= tokens:
            return forest


def _scaled(tree: Tree, factor: float) -> Tree:
    return Tree(max(1, int(tree.length * factor)), tuple(_scaled(child, factor) for child in tree.children))


def layout(forest: list[Tree], tokens: int = ROW) -> Layout:
    """The row of `tokens` tokens that holds a forest. Raises ValueError if it does not fit."""
    used = sum(tree.total for tree in forest)
    if used > tokens:
        raise ValueError(f"a forest of {used} tokens does not fit a row of {tokens}")
    subtree_end = np.arange(1, tokens + 1, dtype=np.int32)
    positions = np.zeros(tokens, np.int32)

    def place(tree: Tree, start: int, depth: int) -> int:
        """Lays out a tree whose first token has this offset and position; returns its number of visible pairs."""
        subtree_end[start : start + tree.length] = start + tree.total
        positions[start : start + tree.length] = np.arange(depth, depth + tree.length)
        pairs = tree.length * depth + tree.length * (tree.length + 1) // 2
        start, depth = start + tree.length, depth + tree.length
        for child in tree.children:
            pairs += place(child, start, depth)
            start += child.total
        return pairs

    start, pairs = 0, 0
    for tree in forest:
        pairs += place(tree, start, 0)
        start += tree.total
    return Layout(subtree_end, positions, pairs)
