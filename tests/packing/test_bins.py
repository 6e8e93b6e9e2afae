"""How well rows are filled, and at what price in copied prefixes."""

from itertools import combinations

import numpy as np
import pytest
from forests import make_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.bench.__main__ import main
from jaxrl.bench.packing import agents
from jaxrl.config import PackingConfig
from jaxrl.packing import RowLimits, plan
from jaxrl.packing.bins import best_subset


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=8), st.integers(0, 60))
def test_best_subset_is_the_best(sizes, room):
    sums = [sum(c) for n in range(len(sizes) + 1) for c in combinations(sizes, n)]
    chosen = best_subset(sizes, room)
    assert len(set(chosen)) == len(chosen)
    assert sum(sizes[k] for k in chosen) == max(s for s in sums if s <= room)


@pytest.mark.parametrize("seed", range(3))
def test_agents_take_no_more_rows_than_published(seed):
    stats = plan(agents(seed), RowLimits.from_config(PackingConfig(row_length=4096))).stats
    assert 490_000 < stats.logical_tokens < 498_000 and stats.trajectories == 450
    assert stats.num_rows <= 61


def independent(lengths, first=1000):
    """Trajectories that share nothing."""
    return [make_trajectory(k, np.arange(n) + first * (k + 1), np.arange(n) > 0) for k, n in enumerate(lengths)]


def test_trees_that_fit_are_combined_to_fill_rows():
    """First fit decreasing needs 3 rows for these, subset sums 2."""
    limits = RowLimits(100, 100, 200, 64, 64)
    stats = plan(independent([60, 50, 27, 23, 22, 18]), limits).stats
    assert stats.num_rows == 2 and stats.placed_tokens == stats.unique_tokens == 200


def test_a_tree_that_fits_a_row_is_not_spread_over_two_without_need():
    prefix = list(range(40))
    trajectories = [
        make_trajectory(k, [*prefix, *range(1000 * (k + 1), 1000 * (k + 1) + 15)], [False] * 40 + [True] * 15) for k in range(4)
    ]
    trajectories += [make_trajectory(9, np.arange(30) + 9000, np.arange(30) > 0)]
    stats = plan(trajectories, RowLimits(110, 110, 220, 64, 64)).stats
    assert stats.num_rows == 2 and stats.placed_tokens == stats.unique_tokens == 130


def test_a_tree_is_taken_apart_where_that_saves_a_row():
    """Three trees of 60 in rows of 100: 3 rows whole, 2 when one is spread over the gaps."""
    trajectories = [
        make_trajectory(3 * t + k, [1000 * t, *(100 * (k + 1) + 1000 * t + np.arange(19))], np.arange(20) > 0)
        for t in range(3)
        for k in range(3)
    ]
    stats = plan(trajectories, RowLimits(100, 100, 200, 64, 64)).stats
    assert stats.unique_tokens == 3 * 58
    assert stats.num_rows == 2 and stats.placed_tokens == 3 * 58 + 1


def test_dispatcher_names_the_benches(capsys):
    assert main(["nothing"]) == 2
    assert "packing" in capsys.readouterr().err
