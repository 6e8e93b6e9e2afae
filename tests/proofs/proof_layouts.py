"""Every layout of 8 devices over data × fsdp × context × tensor equals one device: prints one JSON line each."""

import itertools
import json
import math
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))

from layouts import AXES, compare, make_batches, step_on  # noqa: E402

LAYOUTS = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8]


def main() -> None:
    reference = step_on({"data": 1}, make_batches())
    for sizes in LAYOUTS:
        layout = dict(zip(AXES, sizes, strict=True))
        gradient_error, adam_error = compare(step_on(layout, make_batches()), reference)
        errors = {"gradient_error": float(f"{gradient_error:.1e}"), "adam_error_in_lr": float(f"{adam_error:.1e}")}
        print(json.dumps(layout | errors), flush=True)
        assert gradient_error <= 1e-5 and adam_error <= 1e-2
    print(json.dumps({"done": len(LAYOUTS)}))


if __name__ == "__main__":
    main()
