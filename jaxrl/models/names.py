"""Which Hugging Face tensor holds which parameter: one table, for checkpoints, adapters and samplers that load by name.

A parameter is found by its path under "params" in the form of a scanned decoder. Those under "layers" are stacked:
layer i's tensor is slice i of axis 0, and "{layer}" in its Hugging Face name stands for i. Linear kernels are [in, out]
here and [out, in] there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxrl.models.architecture import Architecture
from jaxrl.models.lora import TARGETS


@dataclass(frozen=True)
class ParameterName:
    """One parameter and the tensor, or the tensor of each layer, that holds it."""

    path: tuple[str, ...]  # e.g. ("layers", "self_attn", "q_proj", "kernel")
    tensor: str  # e.g. "model.layers.{layer}.self_attn.q_proj.weight"
    shape: tuple[int, ...]  # of one tensor, as Hugging Face stores it
    transpose: bool  # the parameter is the tensor's transpose

    @property
    def stacked(self) -> bool:
        return self.path[0] == "layers"

    def tensors(self, num_layers: int) -> tuple[str, ...]:
        """The names of all its tensors, in the order of the layers."""
        return tuple(self.tensor.format(layer=i) for i in range(num_layers)) if self.stacked else (self.tensor,)


def parameter_names(architecture: Architecture) -> tuple[ParameterName, ...]:
    """Every parameter of a decoder, in the order Hugging Face stores the tensors of a layer."""
    arch = architecture
    hidden, q_size, kv_size = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    names = [ParameterName(("embed_tokens", "embedding"), "model.embed_tokens.weight", (arch.vocab_size, hidden), False)]

    def layer(module: str, parameter: str, tensor: str, shape: tuple[int, ...]) -> None:
        path = ("layers", *module.split("."), parameter)
        names.append(ParameterName(path, f"model.layers.{{layer}}.{module}.{tensor}", shape, parameter == "kernel"))

    layer("input_layernorm", "scale", "weight", (hidden,))
    layer("post_attention_layernorm", "scale", "weight", (hidden,))
    if arch.qk_norm:
        layer("self_attn.q_norm", "scale", "weight", (arch.head_dim,))
        layer("self_attn.k_norm", "scale", "weight", (arch.head_dim,))
    out_in = {
        "q_proj": (q_size, hidden),
        "k_proj": (kv_size, hidden),
        "v_proj": (kv_size, hidden),
        "o_proj": (hidden, q_size),
        "gate_proj": (arch.intermediate_size, hidden),
        "up_proj": (arch.intermediate_size, hidden),
        "down_proj": (hidden, arch.intermediate_size),
    }
    for target, module in TARGETS.items():
        layer(f"{module}.{target}", "kernel", "weight", out_in[target])
        if arch.mlp_bias if module == "mlp" else arch.o_bias if target == "o_proj" else arch.qkv_bias:
            layer(f"{module}.{target}", "bias", "bias", out_in[target][:1])
    names.append(ParameterName(("norm", "scale"), "model.norm.weight", (hidden,), False))
    if not arch.tie_embeddings:
        names.append(ParameterName(("lm_head", "kernel"), "lm_head.weight", (arch.vocab_size, hidden), True))
    return tuple(names)


def tensors(architecture: Architecture) -> Iterator[tuple[str, ParameterName, int | None]]:
    """Every tensor of a checkpoint with its parameter and layer (None if not stacked), layer after layer."""
    names = parameter_names(architecture)
    stacked = [name for name in names if name.stacked]
    yield names[0].tensor, names[0], None
    for i in range(architecture.num_layers):
        for name in stacked:
            yield name.tensor.format(layer=i), name, i
    for name in names[1:]:
        if not name.stacked:
            yield name.tensor, name, None
