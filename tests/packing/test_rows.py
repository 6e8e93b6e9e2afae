"""The row contract over random forests, decoded back token by token."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from forests import check_contract, forests, make_trajectory, naive_unique_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config import PackingConfig
from jaxrl.packing import PackingError, RowLimits, pack, plan
from jaxrl.packing.bins import assign_rows
from jaxrl.packing.demand import demand_of, trained_runs
from jaxrl.packing.rows import build_row
from jaxrl.packing.tree import build_tree

WIDE = RowLimits(row_length=512, reads=512, terms=1024, segments=128, trajectories=64)


def totals(batches):
    return {
        "tokens": sum(int(np.sum(b.segments.length)) for b in batches),
        "reads": sum(int(np.sum(b.reads.state >= 0)) for b in batches),
        "terms": sum(int(np.sum(b.terms.read >= 0)) for b in batches),
        "segments": sum(int(np.sum(b.segments.length > 0)) for b in batches),
    }


@settings(max_examples=120, deadline=None)
@given(forests(), st.integers(1, 3))
def test_one_wide_row_holds_every_prefix_once(trajectories, rows_per_batch):
    batches, stats = pack(trajectories, WIDE, rows_per_batch)
    check_contract(batches, trajectories, WIDE)
    assert stats.num_rows == 1 and len(batches) == 1 and batches[0].tokens.shape == (rows_per_batch, 512)
    assert stats.unique_tokens == stats.placed_tokens == naive_unique_tokens(trajectories)
    assert stats.logical_tokens == sum(len(t.trajectory.ids) for t in trajectories)
    assert totals(batches) == {
        "tokens": stats.placed_tokens,
        "reads": stats.reads,
        "terms": stats.terms,
        "segments": stats.segments,
    }


@st.composite
def tight_limits(draw, trajectories):
    """Limits that the largest trajectory just about fits, one of them at least often binding."""
    longest = max(len(t.trajectory.ids) for t in trajectories)
    trained = max(int(t.trajectory.trainable.sum()) for t in trajectories)
    return RowLimits(
        row_length=longest + draw(st.integers(0, 30)),
        reads=trained + draw(st.sampled_from([0, 3, 60])),
        terms=trained + draw(st.sampled_from([0, 5, 200])),
        segments=draw(st.sampled_from([1, 2, 3, 6, 40])),
        trajectories=draw(st.sampled_from([1, 2, 5, 40])),
        min_shared=draw(st.sampled_from([1, 1, 2, 4])),
    )


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_tight_rows_keep_every_bound_and_the_contract(data):
    trajectories = data.draw(forests())
    limits = data.draw(tight_limits(trajectories))
    rows_per_batch = data.draw(st.integers(1, 3))
    batches, stats = pack(trajectories, limits, rows_per_batch)
    check_contract(batches, trajectories, limits)
    assert len(batches) == -(-stats.num_rows // rows_per_batch)
    assert totals(batches)["tokens"] == stats.placed_tokens
    assert stats.unique_tokens == naive_unique_tokens(trajectories) <= stats.placed_tokens


@settings(max_examples=80, deadline=None)
@given(st.data(), st.booleans())
def test_both_ways_to_take_trees_apart_keep_the_bounds(data, split):
    trajectories = data.draw(forests(min_size=4))
    limits = data.draw(tight_limits(trajectories))
    tree = build_tree([t.trajectory.ids for t in trajectories], min_shared=limits.min_shared)
    runs = trained_runs([t.trajectory.trainable for t in trajectories])
    demand = demand_of(runs, tree, np.array([t.trajectory.temperature for t in trajectories], np.float32))
    rows = assign_rows(tree, demand, limits, split)
    assert sorted(i for row in rows for i in row.members) == list(range(len(trajectories)))
    for row in rows:
        assert 0 < row.tokens <= limits.row_length and 0 < row.reads <= limits.reads and 0 < row.terms <= limits.terms
        assert 0 < row.segments <= limits.segments and len(row.members) <= limits.trajectories


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_content_keys_keep_apart_what_differs(data):
    trajectories = data.draw(forests())
    keys = []
    for training in trajectories:
        length = len(training.trajectory.ids)
        key = st.none() | st.lists(st.sampled_from([0, 0, 0, 2**40, 7]), min_size=length, max_size=length).map(np.array)
        keys.append(data.draw(key))
    trajectories = [replace(t, content_key=key) for t, key in zip(trajectories, keys, strict=True)]
    batches, stats = pack(trajectories, WIDE, 1)
    check_contract(batches, trajectories, WIDE, keys)
    assert stats.placed_tokens == naive_unique_tokens(trajectories, keys)


def test_siblings_kept_apart_by_content_share_the_read_of_their_token():
    trajectories = [
        replace(make_trajectory(k, [5, 6, 7], [False, True, True]), content_key=np.array([0, 1 + k, 0])) for k in range(2)
    ]
    batches, stats = pack(trajectories, WIDE, 1)
    assert stats.placed_tokens == 5 and stats.terms == 4
    assert stats.reads == totals(batches)["reads"] == 3  # (5 → 6) once, (6 → 7) of either


def test_a_deep_caterpillar_of_one_token_segments():
    trajectories = [make_trajectory(k, [*range(k + 1), 99], [False] * (k + 1) + [True]) for k in range(40)]
    batches, stats = pack(trajectories, WIDE, 1)
    check_contract(batches, trajectories, WIDE)
    assert batches[0].segments.depth.max() == 39 and stats.placed_tokens == 80


def test_identical_trajectories_share_reads_and_keep_their_terms():
    trajectories = [make_trajectory(k, [1, 2, 3, 4], [False, False, True, True]) for k in range(6)]
    _, stats = pack(trajectories, WIDE, 1)
    assert (stats.placed_tokens, stats.reads, stats.terms, stats.segments) == (4, 2, 12, 1)


def test_temperatures_share_states_but_not_reads():
    trajectories = [make_trajectory(k, [1, 2, 3], [False, True, True], temperature=1 - k / 10) for k in range(2)]
    _, stats = pack(trajectories, WIDE, 1)
    assert (stats.placed_tokens, stats.reads, stats.terms) == (3, 4, 4)


def test_a_tree_larger_than_a_row_copies_its_prefix_and_reads_it_once():
    """The prefix is trained too: the copies must not train it twice."""
    prefix = list(range(10))
    trajectories = [make_trajectory(k, [*prefix, 100 + k, 200 + k, 300 + k], [False] + [True] * 12) for k in range(6)]
    limits = RowLimits(row_length=20, reads=20, terms=200, segments=16, trajectories=16)
    batches, stats = pack(trajectories, limits, 1)
    check_contract(batches, trajectories, limits)
    assert stats.num_rows == 2 and stats.placed_tokens == 2 * 10 + 6 * 3 and stats.unique_tokens == 10 + 6 * 3
    assert stats.terms == 6 * 12


def test_min_shared_copies_short_runs():
    trajectories = [make_trajectory(k, [1, 2, 10 + k, 20 + k], [False, True, True, True]) for k in range(2)]
    for min_shared, placed in ((1, 6), (2, 6), (3, 8)):
        limits = RowLimits(64, 64, 64, 8, 8, min_shared)
        batches, stats = pack(trajectories, limits, 1)
        check_contract(batches, trajectories, limits)
        assert (stats.placed_tokens, stats.unique_tokens) == (placed, 6)


def test_trajectories_without_a_trainable_token_take_no_room():
    trajectories = [make_trajectory(0, [1, 2], [False, False]), make_trajectory(1, [1, 2, 3], [False, False, True])]
    batches, stats = pack(trajectories, WIDE, 2)
    check_contract(batches, trajectories[1:], WIDE)
    assert (stats.trajectories, stats.untrained, stats.placed_tokens) == (1, 1, 3)
    assert pack(trajectories[:1], WIDE, 2)[0] == [] and pack([], WIDE, 2)[0] == []


def test_limits_from_config():
    assert RowLimits.from_config(PackingConfig(row_length=1024)) == RowLimits(1024, 1024, 2048, 128, 128, 1)
    assert RowLimits.from_config(PackingConfig(row_length=100, terms=7, min_shared=3)) == RowLimits(100, 100, 7, 64, 64, 3)


@pytest.mark.parametrize(
    ("trajectory", "limits", "message"),
    [
        (
            make_trajectory(3, [1] * 9, [False] + [True] * 8, group=4),
            RowLimits(8, 8, 8, 8, 8),
            "trajectory 3 .group 4.* 9 tokens.*row_length",
        ),
        (
            make_trajectory(3, [1] * 6, [False] + [True] * 5),
            RowLimits(8, 8, 4, 8, 8),
            "trajectory 3 .*5 trainable.*packing.terms",
        ),
        (
            make_trajectory(3, [1] * 6, [False] + [True] * 5),
            RowLimits(8, 4, 8, 8, 8),
            "trajectory 3 .*5 trainable.*packing.reads",
        ),
        (make_trajectory(3, [1, 2], [True, True]), WIDE, "trajectory 3 .*position 0"),
        (make_trajectory(3, [], []), WIDE, "trajectory 3 .*no tokens"),
        (make_trajectory(3, [1, 2], [False, True], temperature=0.0), WIDE, "trajectory 3 .*temperature"),
        (
            replace(make_trajectory(3, [1, 2], [False, True]), weight=np.ones(3, np.float32)),
            WIDE,
            "trajectory 3 .*`weight` has 3",
        ),
        (make_trajectory(0, [1, 2], [False, True]), WIDE, "trajectory 0 .*not unique"),
    ],
)
def test_bad_trajectories_are_refused_by_name(trajectory, limits, message):
    good = make_trajectory(0, [1, 2, 3], [False, True, False])
    with pytest.raises(PackingError, match=message):
        pack([good, trajectory], limits, 1)


def test_a_row_built_other_than_planned_is_an_error():
    trajectories = [make_trajectory(k, [1, 2, 3 + k], [False, True, True]) for k in range(2)]
    planned = plan(trajectories, WIDE)
    broken = replace(planned, rows=(replace(planned.rows[0], tokens=5),))
    with pytest.raises(PackingError, match="row 0 was planned"):
        build_row(broken, 0)


def test_packing_is_deterministic():
    rng = np.random.default_rng(0)
    trajectories = []
    for k in range(60):
        ids = rng.integers(0, 2, rng.integers(2, 30))
        trajectories.append(make_trajectory(k, ids, np.arange(len(ids)) > 0))
    limits = RowLimits(64, 64, 128, 32, 16)
    first, second = pack(trajectories, limits, 2)[0], pack(trajectories, limits, 2)[0]
    for a, b in zip(first, second, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
