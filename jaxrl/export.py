"""Writes a run's weights as a Hugging Face checkpoint: python -m jaxrl.export RUN OUT

RUN is the folder of a run (OUT/NAME of its config); it may still be going on. OUT then loads with
transformers, vLLM and `model.checkpoint` of another run. Adapters are merged into their base unless
--adapter asks for the adapter alone, in PEFT's format.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.checkpoint import CheckpointError, Checkpoints, abstract_state
from jaxrl.config import Config, ConfigError, load
from jaxrl.models.architecture import Architecture, UnsupportedModelError
from jaxrl.models.decoder import Decoder, abstract_variables
from jaxrl.models.hf import load_architecture, load_checkpoint, save_checkpoint
from jaxrl.models.hub import local_folder
from jaxrl.models.peft import merge_lora, save_adapter
from jaxrl.models.safetensors_files import CheckpointFileError

ERRORS = (ConfigError, CheckpointError, CheckpointFileError, UnsupportedModelError)


def export(
    run: Path, out: Path, *, step: int | None = None, best: bool = False, adapter: bool = False, dtype: str | None = None
) -> int:
    """Writes the weights of the latest, the best or the given step to `out`, as `dtype` (the run's own
    model.param_dtype if None). Returns the step.

    Raises one of ERRORS, naming what is missing or does not fit; `out` must not hold a model already.
    """
    config = load(run / "config.toml")
    model = config.model
    if model.param_dtype == "float64":
        jax.config.update("jax_enable_x64", True)  # or what is restored is rounded to float32
    if adapter and model.lora is None:
        raise ConfigError("model.lora", f"the run in {run} trained no adapter: leave out --adapter")
    source = local_folder("model.checkpoint", model.checkpoint) if model.checkpoint else None
    architecture = load_architecture(source) if source else Architecture.from_hf(model.architecture)
    dtype = dtype or model.param_dtype
    if not (run / "checkpoints").is_dir():
        raise CheckpointError(f"{run} has no folder checkpoints: the run has saved none yet")
    checkpoints = Checkpoints(run / "checkpoints", config.checkpoint.keep, config.checkpoint.keep_best, read_only=True)
    try:
        step = _choose(checkpoints, run, step, best)
        trained = _restore(checkpoints, step, config, architecture, "trainable")
        if adapter:
            save_adapter(out, trained, architecture, model.lora, model.checkpoint, dtype)
            return step
        if model.lora is not None:
            base = _base(checkpoints, step, config, architecture, source)
            trained = merge_lora({"params": base, "lora": trained}, model.lora)
    finally:
        checkpoints.close()
    tokenizer = local_folder("model.tokenizer", model.tokenizer) if model.tokenizer else source
    save_checkpoint(out, trained, architecture, dtype, tokenizer)
    return step


def _choose(checkpoints: Checkpoints, run: Path, step: int | None, best: bool) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise CheckpointError(f"{run}/checkpoints holds no complete checkpoint")
    if best and checkpoints.best() is None:
        raise CheckpointError(f"no checkpoint in {run}/checkpoints has a reward to be the best by: leave out --best")
    step = checkpoints.best() if best else steps[-1] if step is None else step
    if step not in steps:
        raise CheckpointError(f"{run}/checkpoints has no step {step}, it has {', '.join(map(str, steps))}")
    return step


def _restore(checkpoints: Checkpoints, step: int, config: Config, architecture: Architecture, field: str) -> Any:
    model = config.model
    decoder = Decoder(architecture, param_dtype=jnp.dtype(model.param_dtype), lora=model.lora)
    shapes = abstract_variables(decoder)["lora" if field == "trainable" and model.lora else "params"]
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = abstract_state(shapes, jax.tree.map(lambda _: here, shapes))
    return checkpoints.restore_part(step, {field: wanted})[field]


def _base(checkpoints: Checkpoints, step: int, config: Config, architecture: Architecture, source: Path | None) -> Any:
    """What the adapters were trained on: the checkpoint's if it holds it, else the files the run started from."""
    if "frozen" in checkpoints.fields(step):
        return _restore(checkpoints, step, config, architecture, "frozen")
    if source is None:
        raise CheckpointError("the base of this run's adapters is in no file: only --adapter can be exported")
    return load_checkpoint(source, architecture, None, config.model.param_dtype)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.export", description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("out", type=Path, help="folder to write to")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="optimizer step of the checkpoint; the latest if left out")
    which.add_argument("--best", action="store_true", help="the checkpoint with the best reward")
    parser.add_argument("--adapter", action="store_true", help="write the adapter alone, as PEFT does")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the files; the run's if left out")
    args = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # the model need not fit an accelerator, and nothing is computed
    try:
        step = export(args.run, args.out, step=args.step, best=args.best, adapter=args.adapter, dtype=args.dtype)
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"step {step} of {args.run} is in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
