"""A run killed with SIGKILL at a random moment; `make verify-resume` does it many more times."""

import numpy as np
from accounting import check_async, check_sync


def test_sync_ends_bit_for_bit_like_a_run_that_was_not_killed(tmp_path):
    check_sync(tmp_path, num_kills=1, steps=12, rng=np.random.default_rng())


def test_inflight_loses_nothing_trains_on_nothing_twice_and_continues_what_ran(tmp_path):
    check_async(tmp_path, 1, "inflight", steps=12, rng=np.random.default_rng())
