"""The one place that knows every sampler: from the run's config to what generates."""

import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from jaxrl.config import Config
from jaxrl.models.architecture import Architecture
from jaxrl.rollout.protocol import Sampler
from jaxrl.rollout.tokenizer import Tokenizer

SPARE_MEMORY = 0.1  # share of a GPU that neither JAX nor vLLM takes up front: their runtimes need it


async def make_sampler(
    config: Config,
    architecture: Architecture,
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    folder: Path,
    weights: Awaitable[tuple[Any, int]],
) -> Sampler:
    """The sampler of `config.sampler`. `weights`: the decoder's pytree, which is copied, and the policy version to serve it
    as; servers start before it is there. Their logs and what they read go to `folder`. Cancelling this ends what it started.

    Raises ConfigError naming a key, and SamplerError with the last lines of a server that does not start.
    """
    if config.sampler.kind == "vllm":
        from bridge.client.sampler import start_sampler  # its extra is needed where it is used

        return await start_sampler(config, architecture, tokenizer.decode, eos_ids, folder, weights)
    from jaxrl.engine import EmbeddedSampler

    variables, version = await weights
    return EmbeddedSampler(
        architecture,
        variables,
        version,
        config.sampler,
        tokenizer_decode=tokenizer.decode,
        eos_token_ids=tuple(eos_ids),
        lora=config.model.lora,
    )


def share_gpus(config: Config) -> None:
    """To be called before JAX takes the GPUs: servers that will be started on the same ones get their room."""
    sampler = config.sampler
    if sampler.kind == "vllm" and not sampler.urls and not sampler.devices:
        left = 1 - sampler.memory - SPARE_MEMORY
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{max(left, SPARE_MEMORY):.2f}")
