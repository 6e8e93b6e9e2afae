"""Rows whose tokens are spread over devices still say the same: paths, reads and offsets."""

import jax
import numpy as np
import pytest
from forest import make_config, make_forest

from jaxrl.data import PackedRows
from jaxrl.packing import RowLimits, pack
from jaxrl.trainer.placement import place_rows

CONFIG = make_config(packing={"rows": 3, "row_length": 96})


def path(rows, r, place):
    """(token id, position) from `place` to the root."""
    while place >= 0:
        yield int(rows.tokens[r, place]), int(rows.positions[r, place])
        place = rows.predecessor[r, place]


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_reads_and_paths_follow_their_tokens(num_devices):
    (rows, *_), _ = pack(make_forest(), RowLimits.from_config(CONFIG.packing), 3)
    placed = place_rows(rows, num_devices)
    assert not np.array_equal(placed.tokens, rows.tokens)
    used = rows.segments.length.sum(1)
    for r in range(3):
        assert np.array_equal(np.sort(placed.offset[r]), np.r_[[-1] * (96 - used[r]), : used[r]])
        at = placed.offset[r] >= 0
        for name in ("tokens", "positions", "subtree_end"):
            np.testing.assert_array_equal(getattr(placed, name)[r][at], getattr(rows, name)[r][placed.offset[r][at]])
        for slot, state in enumerate(rows.reads.state[r]):
            where = placed.reads.state[r, slot]
            assert (where < 0) == (state < 0)
            assert list(path(placed, r, where)) == list(path(rows, r, state))
        assert (rows.reads.state[r] >= 0).any() == (used[r] > 0)


def test_on_one_device_rows_stay_as_they_are():
    (rows, *_), _ = pack(make_forest(), RowLimits.from_config(CONFIG.packing), 3)
    placed = place_rows(rows, 1)
    same = PackedRows(**{name: getattr(placed, name) for name in PackedRows.__dataclass_fields__})
    jax.tree.map(np.testing.assert_array_equal, same, rows)
    for r, used in enumerate(rows.segments.length.sum(1)):
        np.testing.assert_array_equal(placed.offset[r], np.where(np.arange(96) < used, np.arange(96), -1))
