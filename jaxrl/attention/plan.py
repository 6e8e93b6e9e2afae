"""Which device holds which tokens of a row: as many on each, and as much work.

The work of a block of queries is the number of key blocks that attention visits for it. In a tree it
differs by orders of magnitude, so a row is cut into short blocks and these are dealt out:

    in order of work, `num_devices` blocks a round, the largest of a round to the device with the least so far

Every round gives each device one block, and afterwards no two devices differ by more than the largest
difference inside a round: if before it loads differ by at most s, and blocks by at most d, a device that had less
gets the larger block, so the two differences have opposite signs. Neighbours in order of work are nearly
equal, so the bound is small; `tests/attention/test_plan.py` holds it under 5% of the mean.

The plan is made on the host, with the row that it belongs to: it is a permutation of fixed shape, a
millisecond of numpy, and data like the lengths it follows from, so nothing recompiles. The whole model
then runs on the permuted row: activations never move, only keys and values do.

Windows are left out: one order of tokens serves all layers, a layer without a window costs the most, and
with one all blocks cost nearly the same.
"""

from typing import NamedTuple

import numpy as np

# Blocks as long as a kernel's tile, so that a tile of any device is a run of consecutive tokens. Fewer
# than four to a device would leave nothing to balance with.
_BLOCK, _BLOCKS_PER_DEVICE = 128, 4


class Plan(NamedTuple):
    """The tokens of a row over devices. Device d holds places d·T/C … (d + 1)·T/C - 1, by ascending offset."""

    order: np.ndarray  # [T] int32: the offset of the token at each place
    work: np.ndarray  # [C] int64: pairs of a query block and a key block that a device visits


def plan_row(subtree_end: np.ndarray, num_tokens: int, num_devices: int) -> Plan:
    """Spreads a row of T tokens, of which the first `num_tokens` are no padding, over C devices.

    `subtree_end` [T] is that of the row contract, in order of offsets; T is a multiple of C.
    """
    per_device = len(subtree_end) // num_devices
    block = min(_BLOCK, max(1, per_device // _BLOCKS_PER_DEVICE))
    # Where blocks do not divide a device's share, each device gets one shorter block of the row's end.
    whole, rest = divmod(per_device, block)
    lengths = np.repeat([block, rest], [whole * num_devices, num_devices if rest else 0])
    start = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    work = block_work(subtree_end, num_tokens, start)

    load = np.zeros(num_devices, np.int64)
    device = np.empty(len(start), np.int64)
    split = whole * num_devices
    by_work = np.concatenate([np.argsort(-work[:split], kind="stable"), split + np.argsort(-work[split:], kind="stable")])
    for blocks in by_work.reshape(-1, num_devices):
        least_first = np.argsort(load, kind="stable")
        device[blocks] = least_first
        load[least_first] += work[blocks]
    # Stable: a device's tokens stay in order.
    order = np.argsort(np.repeat(device, lengths), kind="stable").astype(np.int32)
    return Plan(order, load)


def block_work(subtree_end: np.ndarray, num_tokens: int, start: np.ndarray) -> np.ndarray:
    """For each block of consecutive tokens from `start` [n], ascending, up to the next: the number of key
    blocks of the same cut with a key that one of its queries may see, judged by the blocks' extremes.

    Key block j reaches from itself to the last block that starts before its latest end.
    """
    reach = np.maximum.reduceat(np.where(np.arange(len(subtree_end)) < num_tokens, subtree_end, 0), start)
    used = start < num_tokens
    first = np.arange(len(start))
    stop = np.maximum(np.searchsorted(start, reach, side="left"), first)  # exclusive
    begun, ended = (np.bincount(x[used], minlength=len(start) + 1) for x in (first, stop))
    return np.where(used, np.cumsum(begun - ended)[:-1], 0)
