"""Every layout of 8 devices over data × fsdp × context × tensor equals one device: prints one JSON line each."""

import itertools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))

from layouts import AXES, compare, make_batches, step_on  # noqa: E402

LAYOUTS = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=4) if sizes[0] * sizes[1] * sizes[2] * sizes[3] == 8]


@pytest.fixture(scope="module")
def reference():
    return step_on({"data": 1}, make_batches())


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "x".join(map(str, sizes)))
def test_layout_equals_one_device(reference, sizes):
    layout = dict(zip(AXES, sizes, strict=True))
    gradient_error, adam_error = compare(step_on(layout, make_batches()), reference)
    print(
        json.dumps(layout | {"gradient_error": float(f"{gradient_error:.1e}"), "adam_error_in_lr": float(f"{adam_error:.1e}")})
    )
    assert gradient_error <= 1e-5 and adam_error <= 1e-2
