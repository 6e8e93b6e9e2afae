"""`python -m jaxrl.bench NAME [options]`: runs one measurement and prints it as JSON lines."""

import importlib
import sys

BENCHES = ("packing", "generate", "context", "tree-attention", "train-step", "head", "publish", "shared-prefix", "autotuner")


def main(argv: list[str]) -> int:
    """Imports and runs `jaxrl.bench.NAME.main(options)`; other benches are not even imported."""
    if not argv or argv[0] not in BENCHES:
        print(f"usage: python -m jaxrl.bench NAME [options], NAME one of: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    importlib.import_module(f"jaxrl.bench.{argv[0].replace('-', '_')}").main(argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
