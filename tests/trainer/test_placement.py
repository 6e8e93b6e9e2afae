"""Rows whose tokens are spread over devices still say the same: paths, reads and offsets."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from forest import make_config, make_forest

from jaxrl.config import MeshConfig
from jaxrl.data import PackedRows
from jaxrl.mesh import make_mesh
from jaxrl.packing import RowLimits, pack
from jaxrl.trainer.placement import place_rows, put_rows

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


def test_what_follows_tokens_goes_where_they_go():
    def follow(training):
        at = np.arange(len(training.trajectory.ids))
        experts = (at[:, None, None] + np.arange(6).reshape(2, 3)).astype(np.int16)
        return replace(training, routed_experts=experts, axis_positions=(at[:, None] * [1, 2, 3]).astype(np.int32))

    (rows, *_), _ = pack([follow(t) for t in make_forest()], RowLimits.from_config(CONFIG.packing), 3)
    mesh = make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4])
    placed = put_rows(rows, mesh)
    at = np.asarray(placed.offset) >= 0
    positions = np.asarray(placed.positions)[at]
    np.testing.assert_array_equal(np.asarray(placed.routed_experts)[at][:, 1, 2], positions + 5)
    np.testing.assert_array_equal(np.asarray(placed.axis_positions)[at], positions[:, None] * [1, 2, 3])
    for array in (placed.routed_experts, placed.axis_positions, placed.tokens):
        assert {shard.data.shape[:2] for shard in array.addressable_shards} == {(3, 24)}
    assert placed.reads.reference_logp.shape == (3, 0)


def test_on_one_device_rows_stay_as_they_are():
    (rows, *_), _ = pack(make_forest(), RowLimits.from_config(CONFIG.packing), 3)
    placed = place_rows(rows, 1)
    same = PackedRows(**{name: getattr(placed, name) for name in PackedRows.__dataclass_fields__})
    jax.tree.map(np.testing.assert_array_equal, same, rows)
    for r, used in enumerate(rows.segments.length.sum(1)):
        np.testing.assert_array_equal(placed.offset[r], np.where(np.arange(96) < used, np.arange(96), -1))
