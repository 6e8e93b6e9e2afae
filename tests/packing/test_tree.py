"""The radix tree against the trie of all prefixes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.packing import tree as tree_module
from jaxrl.packing.tree import build_tree, common_prefix

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=16)


def path_of(tree, node):
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parent[node])
    return path[::-1]


def node_sets(tree, num_sequences):
    """The sequences that run through each node."""
    on = [set() for _ in tree.parent]
    for i in range(num_sequences):
        for v in path_of(tree, int(tree.last[i])):
            on[v].add(i)
    return on


def check_preorder(tree):
    for v in range(len(tree.parent)):
        inside = [w for w in range(len(tree.parent)) if v in path_of(tree, w)]
        assert inside == list(range(v, tree.stop[v]))
        assert tree.start[v] == (tree.end[tree.parent[v]] if tree.parent[v] >= 0 else 0) < tree.end[v]


@settings(max_examples=150, deadline=None)
@given(SEQUENCES)
def test_nodes_are_the_maximal_runs(sequences):
    ids = [np.array(s, np.int32) for s in sequences]
    tree = build_tree(ids)
    check_preorder(tree)
    for i, sequence in enumerate(sequences):
        tokens = [ids[tree.example[v]][tree.start[v] : tree.end[v]] for v in path_of(tree, int(tree.last[i]))]
        assert np.concatenate(tokens).tolist() == sequence
    on = node_sets(tree, len(ids))
    prefixes = {}
    for i, s in enumerate(sequences):
        for n in range(1, len(s) + 1):
            prefixes.setdefault(tuple(s[:n]), set()).add(i)
    assert tree.unique_tokens == len(prefixes) == int((tree.end - tree.start).sum())
    # As many nodes as distinct sets of sequences on a path, so every run is maximal.
    assert sorted(map(sorted, on)) == sorted(sorted(s) for s in {frozenset(p) for p in prefixes.values()})
    assert (tree.canonical == np.arange(len(tree.parent))).all()


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.integers(2, 5))
def test_no_shared_run_is_shorter_than_min_shared(sequences, min_shared):
    ids = [np.array(s, np.int32) for s in sequences]
    tree = build_tree(ids, min_shared=min_shared)
    check_preorder(tree)
    assert tree.unique_tokens == build_tree(ids).unique_tokens
    on = node_sets(tree, len(ids))
    ends = set(tree.last.tolist())
    for i, sequence in enumerate(sequences):
        tokens = [ids[tree.example[v]][tree.start[v] : tree.end[v]] for v in path_of(tree, int(tree.last[i]))]
        assert np.concatenate(tokens).tolist() == sequence
    for v in range(len(tree.parent)):
        children = np.flatnonzero(tree.parent == v)
        if len(children):
            assert len(children) + (v in ends) > 1, "a run that is not maximal"
            assert tree.end[v] - tree.start[v] >= min_shared
        else:
            assert len({tuple(sequences[i]) for i in on[v]}) == 1


def test_siblings_that_begin_alike_point_to_the_first():
    tree = build_tree([np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), np.array([1, 2, 7])], min_shared=2)
    assert tree.parent.tolist() == [-1, 0, 0, 0]
    threes = [v for v in (1, 2, 3) if tree.end[v] == 4]  # the two that begin with the 3
    assert [int(tree.canonical[v]) for v in (1, 2, 3)] == [threes[0] if v in threes else v for v in (1, 2, 3)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(0, 40), st.integers(0, 40), st.integers(0, 300))
def test_common_prefix(shared, rest_a, rest_b, start):
    a = np.concatenate([np.zeros(shared, np.int32), np.full(rest_a, 1, np.int32)])
    b = np.concatenate([np.zeros(shared, np.int32), np.full(rest_b, 2, np.int32)])
    assert common_prefix(a, b, min(start, shared)) == shared


def test_time_is_not_quadratic(monkeypatch):
    """A caterpillar whose longest branches leave first, the worst case of a fixed pivot: 2,000
    sequences take some n log n comparisons, not n² / 2 = 2,000,000."""
    n = 2000
    spine = np.zeros(n, np.int32)
    ids = [np.concatenate([spine[: k + 1], np.full(2 * (n - k), 1 + k, np.int32)]) for k in range(n)]
    calls = 0

    def counted(a, b, start):
        nonlocal calls
        calls += 1
        return common_prefix(a, b, start)

    monkeypatch.setattr(tree_module, "common_prefix", counted)
    tree = build_tree(ids)
    assert len(tree.parent) == 2 * n - 1
    assert calls < 3 * n * np.log2(n)
