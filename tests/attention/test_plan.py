"""The plan that spreads a row's tokens over devices: balance on every workload, and that it predicts what kernels visit."""

import numpy as np
import pytest

from jaxrl.attention.blockwise import _key_blocks, _Queries, _visible_blocks
from jaxrl.attention.plan import block_work, plan_row
from jaxrl.bench.workloads import ROW, WORKLOADS, layout, workload


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_busiest_device_is_within_5_percent_of_the_mean(name, num_devices):
    """On five forests each; a chain is one segment for eight devices."""
    for seed in range(5):
        forest = workload(name, seed)
        plan = plan_row(layout(forest).subtree_end, sum(tree.total for tree in forest), num_devices)
        assert np.array_equal(np.sort(plan.order), np.arange(ROW))
        assert (np.diff(plan.order.reshape(num_devices, -1)) > 0).all(), "a device's tokens are in order"
        assert plan.work.max() <= 1.05 * plan.work.mean(), plan.work


@pytest.mark.parametrize("name", WORKLOADS)
def test_predicted_work_is_what_the_kernel_visits(name):
    """Blocks of 128 on each of four devices, over the keys as they are gathered there."""
    num_devices, num_tokens, block = 4, 8192, 128
    forest = workload(name, tokens=num_tokens)
    end, used = layout(forest, num_tokens).subtree_end, sum(tree.total for tree in forest)
    plan = plan_row(end, used, num_devices)
    offset = np.where(plan.order < used, plan.order, -1)[None]
    end = np.where(offset < 0, -1, end[plan.order])
    values = np.zeros((1, num_tokens, 1, 1), np.float32)
    keys = _key_blocks(values, values, offset, end, None, block, None)
    blocks = offset.reshape(num_devices, -1, 1, block)
    visited = [sum(int(_visible_blocks(_Queries(b, None), keys, None)[1]) for b in device) for device in blocks]
    assert visited == plan.work.tolist()


@pytest.mark.parametrize("window", [None, 512, 4096])
def test_visible_pairs_are_balanced_too(window):
    """The plan counts blocks and knows of no window: pair by pair, and with one, eight devices stay within 5%."""
    for name in WORKLOADS:
        forest = workload(name, seed=1)
        row, used = layout(forest), sum(tree.total for tree in forest)
        order = plan_row(row.subtree_end, used, 8).order
        pairs = np.where(np.arange(ROW) < used, np.minimum(row.positions + 1, window or ROW), 0)
        per_device = pairs[order].reshape(8, -1).sum(1)
        assert per_device.max() <= 1.05 * per_device.mean(), (name, per_device)


@pytest.mark.parametrize(
    ("num_tokens", "used", "num_devices"), [(40, 33, 8), (40, 0, 2), (1000, 1000, 8), (1016, 700, 8), (8, 8, 8)]
)
def test_awkward_lengths(num_tokens, used, num_devices):
    """A share that no block divides, one token a device, an empty row."""
    end = np.where(np.arange(num_tokens) < used, used, np.arange(1, num_tokens + 1)).astype(np.int32)
    plan = plan_row(end, used, num_devices)
    assert np.array_equal(np.sort(plan.order), np.arange(num_tokens)) and plan.order.dtype == np.int32
    assert plan.work.shape == (num_devices,)


def test_work_counts_blocks_by_their_extremes():
    """Two trees of 6 and 3 tokens, then padding, in blocks of 2: [root root | root a | a b | c c | c - | - -]."""
    end = np.array([6, 6, 6, 5, 5, 6, 9, 9, 9, 10, 11, 12])
    assert block_work(end, 9, np.arange(0, 12, 2)).tolist() == [1, 2, 3, 1, 2, 0]
