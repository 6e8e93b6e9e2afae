"""Which task a group works on: the data position is the group's index, so nothing else needs saving."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def task_of(group: int, num_tasks: int, seed: int) -> int:
    """Row of the task set for a group: every epoch runs through all rows in a permutation of its own."""
    epoch, place = divmod(group, num_tasks)
    return int(_permutation(num_tasks, seed, epoch)[place])


@functools.lru_cache(maxsize=4)  # the epochs that running groups are in
def _permutation(num_tasks: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_tasks)


def fingerprint(tasks: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 over all rows in order: a resumed run must see the tasks it began with."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps(task, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()
