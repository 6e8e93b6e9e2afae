"""The one place that knows every sampler: from the run's config to what generates."""

from collections.abc import Sequence
from typing import Any

from jaxrl.config import Config
from jaxrl.engine import EmbeddedSampler
from jaxrl.models.architecture import Architecture
from jaxrl.rollout.protocol import Sampler
from jaxrl.rollout.tokenizer import Tokenizer


def make_sampler(
    config: Config, architecture: Architecture, variables: Any, version: int, tokenizer: Tokenizer, eos_ids: Sequence[int]
) -> Sampler:
    """The sampler of `config.sampler`, serving `variables` (the decoder's pytree; copied) as policy `version`."""
    return EmbeddedSampler(
        architecture,
        variables,
        version,
        config.sampler,
        tokenizer_decode=tokenizer.decode,
        eos_token_ids=tuple(eos_ids),
        lora=config.model.lora,
    )
