"""A linear layer with an optional low-rank update (LoRA, arXiv 2106.09685).

The base kernel lives in the collection "params", the update's two factors in "lora": a trainer that differentiates
"lora" alone leaves the base frozen, and optimizer state exists for the adapters only.
"""

import jax.numpy as jnp
from flax import linen as nn

from jaxrl.config import ConfigError, LoraConfig

# The linear layers of a decoder layer, by their Hugging Face names, and the module each lies in.
TARGETS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


def check_targets(config: LoraConfig) -> None:
    """Raises ConfigError for a target that is no linear layer of a decoder layer, and for none at all."""
    unknown = sorted(set(config.targets) - set(TARGETS))
    if unknown or not config.targets:
        problem = f"no adapter for {', '.join(unknown)}" if unknown else "no layer named"
        raise ConfigError("model.lora.targets", f"{problem}; choose among {', '.join(TARGETS)}")


def scaling(config: LoraConfig) -> float:
    """What the product of the factors is multiplied by."""
    return config.alpha / config.rank


class Linear(nn.Module):
    """y = x W (+ bias) (+ alpha / rank · x A B). W is [in, out]; A [in, rank] and B [rank, out] start at uniform
    ±1/sqrt(in) and 0, so an untrained adapter changes nothing by a bit."""

    features: int
    axes: tuple[str, str]  # logical names of W's dimensions
    dtype: jnp.dtype
    param_dtype: jnp.dtype
    initializer_range: float
    use_bias: bool = False
    lora: LoraConfig | None = None  # None also where the layer is no target

    @nn.compact
    def __call__(self, x):
        size = x.shape[-1]
        normal = nn.initializers.normal(self.initializer_range)
        kernel = self.param("kernel", nn.with_logical_partitioning(normal, self.axes), (size, self.features), self.param_dtype)
        x = x.astype(self.dtype)
        y = x @ kernel.astype(self.dtype)
        if self.use_bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[1:])
            y = y + self.param("bias", zeros, (self.features,), self.param_dtype).astype(self.dtype)
        if self.lora is not None:
            a = self._factor(
                "lora_a",
                nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
                (self.axes[0], "lora_rank"),
                (size, self.lora.rank),
            )
            b = self._factor("lora_b", nn.initializers.zeros, ("lora_rank", self.axes[1]), (self.lora.rank, self.features))
            y = y + (x @ a) @ b * scaling(self.lora)
        return y

    def _factor(self, name: str, initializer, axes: tuple[str, str], shape: tuple[int, int]):
        create = nn.with_logical_partitioning(initializer, axes)
        factor = self.variable("lora", name, lambda: create(self.make_rng("params"), shape, self.param_dtype))
        return factor.value.astype(self.dtype)
