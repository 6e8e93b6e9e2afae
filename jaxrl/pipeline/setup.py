"""What a run is made of, built from its config and checked before anything expensive starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.mesh import make_mesh
from jaxrl.metrics import check_trackers
from jaxrl.models.architecture import Architecture
from jaxrl.models.decoder import init_variables, shardings
from jaxrl.models.hf import load_architecture, load_checkpoint
from jaxrl.models.hub import local_folder
from jaxrl.models.peft import load_adapter
from jaxrl.packing import RowLimits
from jaxrl.rollout.environment import Environment
from jaxrl.rollout.episodes import EpisodeRunner, length_limit
from jaxrl.rollout.loading import load_environment
from jaxrl.rollout.protocol import Sampler
from jaxrl.rollout.tokenizer import Tokenizer, check_vocabulary, eos_token_ids, load_tokenizer
from jaxrl.trainer.step import Trainer, make_trainer

ENVIRONMENTS = "jaxrl.envs:make_environment"


@dataclass(frozen=True)
class Parts:
    config: Config
    checkpoint: Path | None  # folder of the Hugging Face checkpoint the run starts from
    architecture: Architecture
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    environment: Environment
    mesh: Mesh
    trainer: Trainer
    limits: RowLimits


def build(config: Config) -> Parts:
    """Everything but weights and processes. Raises ConfigError (or what names a file or tensor) for what cannot work."""
    if config.model.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "float32")  # or GPUs and TPUs round matmul inputs
    if "float64" in (config.model.dtype, config.model.param_dtype):
        jax.config.update("jax_enable_x64", True)
    check_trackers(config.log)
    environment = load_environment(config.env, ENVIRONMENTS, config.seed)
    if config.eval.num_tasks > len(environment.heldout):
        have = f"{config.env.name} has {len(environment.heldout)} held-out tasks"
        raise ConfigError("eval.num_tasks", f"{have}, {config.eval.num_tasks} were asked for")
    checkpoint = None if config.model.checkpoint is None else local_folder("model.checkpoint", config.model.checkpoint)
    architecture = Architecture.from_hf(config.model.architecture) if checkpoint is None else load_architecture(checkpoint)
    check_length(config, architecture)
    tokenizer = load_tokenizer(checkpoint if config.model.tokenizer is None else config.model.tokenizer)
    check_vocabulary(tokenizer, architecture.vocab_size)
    mesh = make_mesh(config.mesh)
    return Parts(
        config=config,
        checkpoint=checkpoint,
        architecture=architecture,
        tokenizer=tokenizer,
        eos_ids=eos_token_ids(tokenizer, checkpoint),
        environment=environment,
        mesh=mesh,
        trainer=make_trainer(config, architecture, mesh),
        limits=RowLimits.from_config(config.packing),
    )


def make_runner(parts: Parts, sampler: Sampler, log: Path | None = None) -> EpisodeRunner:
    """What runs the run's episodes on `sampler`; not started."""
    return EpisodeRunner(
        parts.config.env,
        sampler,
        factory=ENVIRONMENTS,
        tokenizer=parts.tokenizer.folder,
        eos_ids=parts.eos_ids,
        limit=length_limit(parts.config),
        seed=parts.config.seed,
        log=log,
    )


def check_length(config: Config, architecture: Architecture) -> None:
    """Raises ConfigError if a trajectory could be longer than the positions the model knows."""
    limit, most = length_limit(config), architecture.context_length
    if limit.tokens > most:
        raise ConfigError(
            limit.key,
            f"trajectories may have {limit.tokens} tokens, the model's max_position_embeddings with rope scaling is {most}: "
            "lower it, or set rope scaling in the model's config",
        )


def initial_variables(parts: Parts) -> Mapping[str, Any]:
    """The decoder's variables at step 0, sharded: the checkpoint's or random ones, and adapters if there are any."""
    model, decoder = parts.config.model, parts.trainer.decoder
    key = jax.random.key(parts.config.seed)
    if parts.checkpoint is None:
        variables = dict(init_variables(decoder, key, parts.mesh))
    else:
        placed = shardings(decoder, parts.mesh)
        params = load_checkpoint(parts.checkpoint, parts.architecture, placed["params"], model.param_dtype)
        variables = {"params": params}
        if model.lora is not None:
            variables["lora"] = init_variables(decoder, key, parts.mesh)["lora"]
    if model.lora is not None and model.lora.adapter is not None:
        placed = shardings(decoder, parts.mesh)
        variables["lora"] = load_adapter(model.lora.adapter, parts.architecture, model.lora, placed["lora"], model.param_dtype)
    return variables
