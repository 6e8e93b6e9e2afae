"""Every layout of 8 devices over data × fsdp × context × tensor equals one device, and layouts that cut over several axes also with
a loss that sums across rows, a reference and Muon: prints one JSON line each."""

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

from layouts import ACROSS_ROWS, AXES, CONFIG, compare, make_batches, step_on  # noqa: E402

LAYOUTS = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8]


ACROSS = [sizes for sizes in LAYOUTS if max(sizes) < 8]


def main() -> None:
    for name, config, layouts in (("grpo, AdamW", CONFIG, LAYOUTS), ("gspo, KL, Muon", ACROSS_ROWS, ACROSS)):
        reference = step_on({"data": 1}, make_batches(), config)
        for sizes in layouts:
            layout = dict(zip(AXES, sizes, strict=True))
            gradient_error, update_error = compare(step_on(layout, make_batches(), config), reference)
            errors = {"gradient_error": float(f"{gradient_error:.1e}"), "update_error_in_lr": float(f"{update_error:.1e}")}
            print(json.dumps({"step": name} | layout | errors), flush=True)
            assert gradient_error <= 1e-5 and update_error <= 1e-2
    print(json.dumps({"done": len(LAYOUTS) + len(ACROSS)}))


if __name__ == "__main__":
    main()
