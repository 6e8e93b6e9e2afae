"""Trains a language model by reinforcement learning: python -m jaxrl.train CONFIG [--KEY VALUE ...]

CONFIG is a TOML file; every key of it can be set on the command line by its dotted name. Starting the
same command again continues the run. The last line of a finished run is JSON. A run over several hosts is this
command on each of them: see `jaxrl.trainer.processes.initialize`.
"""

import json
import sys
from collections.abc import Sequence

from jaxrl.config import ConfigError
from jaxrl.pipeline.command_line import help_text, read_command


def main(arguments: Sequence[str]) -> int:
    """0: finished, or saved and stopped by a signal. 1: the run failed. 2: it cannot start as it is."""
    if "--help" in arguments or "-h" in arguments:
        print(help_text())
        return 0
    try:
        config = read_command(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from jaxrl.checkpoint import CheckpointError  # jax and all that follows, only once the config is right
    from jaxrl.models.architecture import UnsupportedModelError
    from jaxrl.models.safetensors_files import CheckpointFileError
    from jaxrl.pipeline.journal import JournalError
    from jaxrl.pipeline.run import RunError, run
    from jaxrl.samplers import make_sampler, share_gpus
    from jaxrl.trainer.processes import ProcessError, initialize

    try:
        share_gpus(config)
        initialize()
        summary = run(config, make_sampler)
    except (ConfigError, ProcessError, UnsupportedModelError, CheckpointFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, CheckpointError, JournalError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if summary is None:  # process 0 tells how the run ended
        return 0
    if summary["ended"] != "finished":
        print(f"{summary['ended']} after step {summary['steps']}: the same command continues", file=sys.stderr)
    print(json.dumps(summary), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # while modules load, before the run takes signals itself
        print("interrupted: the same command starts or continues the run", file=sys.stderr)
        sys.exit(130)
