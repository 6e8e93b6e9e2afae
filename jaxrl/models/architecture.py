"""What a decoder looks like: the part of a Hugging Face config.json that shapes the computation.

`Architecture.from_hf` accepts the dense families Llama 2/3.x (SmolLM2 among them), Qwen2/2.5 and Qwen3, and refuses
by name whatever would change the result and is not implemented: a config is never half understood.
"""

from dataclasses import dataclass
from typing import Any, Literal


class UnsupportedModelError(Exception):
    """A model that this project does not compute. The message names the config key that says so."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. The fields below `theta` are read by the scalings that name them."""

    kind: Literal["default", "llama3", "yarn"]
    theta: float
    factor: float = 1.0  # llama3, yarn
    original_context: int = 0  # llama3, yarn: tokens of the context before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: from `factor`, `mscale` and `mscale_all_dim`
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions


_ROPE_KEYS = {
    "default": {},
    "llama3": {"factor": True, "low_freq_factor": True, "high_freq_factor": True},
    "yarn": {
        "factor": True,
        "attention_factor": False,
        "beta_fast": False,
        "beta_slow": False,
        "mscale": False,
        "mscale_all_dim": False,
        "truncate": False,
    },
}  # rope type -> its keys, True: required


@dataclass(frozen=True)
class Architecture:
    """Shapes and switches of a dense decoder. Hashable, so it can be a static argument of a jitted function."""

    model_type: Literal["llama", "qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    max_positions: int
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def attention_scale(self) -> float:
        """What `attend` multiplies q · k by."""
        return self.head_dim**-0.5

    @property
    def context_length(self) -> int:
        """Most positions the rotary embedding is made for: rope scaling stretches the original context by its factor."""
        return max(self.max_positions, int(self.rope.factor * self.rope.original_context))

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Architecture":
        """From the dict of a config.json, as transformers 4 or 5 writes it.

        Raises UnsupportedModelError naming the key that is missing, wrong or not implemented.
        """
        model_type = _required(config, "model_type")
        if model_type not in ("llama", "qwen2", "qwen3"):
            raise UnsupportedModelError(f"model_type {model_type!r} is not implemented: llama, qwen2 and qwen3 are")
        _refuse_unimplemented(config)
        heads = _positive(config, "num_attention_heads")
        hidden = _positive(config, "hidden_size")
        # Llama's config predates grouped queries, so leaving the key out means one key head per query head.
        kv_heads = heads if model_type == "llama" and config.get("num_key_value_heads") is None else None
        kv_heads = kv_heads or _positive(config, "num_key_value_heads")
        head_dim = (config.get("head_dim") and _positive(config, "head_dim")) or (
            128 if model_type == "qwen3" and "head_dim" not in config else hidden // heads
        )
        if heads % kv_heads:
            raise UnsupportedModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2 or head_dim == 0:
            raise UnsupportedModelError(f"head_dim {head_dim}: rotary embedding needs pairs, so an even number above 0")
        attention_bias = bool(config.get("attention_bias", False)) and model_type != "qwen2"
        max_positions = _positive(config, "max_position_embeddings")
        eos = config.get("eos_token_id")
        return cls(
            model_type=model_type,
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=_positive(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=_rope(config, max_positions),
            max_positions=max_positions,
            norm_eps=_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or model_type == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            initializer_range=_number("initializer_range", config.get("initializer_range", 0.02)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            pad_token_id=config.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The dict of a config.json in the form of transformers 5; `from_hf` of it gives the same Architecture."""
        rope: dict[str, Any] = {"rope_type": self.rope.kind, "rope_theta": self.rope.theta}
        for key in _ROPE_KEYS[self.rope.kind]:
            if (value := getattr(self.rope, key)) is not None:
                rope[key] = value
        if self.rope.kind != "default":
            rope["original_max_position_embeddings"] = self.rope.original_context
        config = {
            "architectures": [
                {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.model_type]
            ],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) if len(self.eos_token_ids) > 1 else next(iter(self.eos_token_ids), None),
            "pad_token_id": self.pad_token_id,
        }
        if self.model_type != "qwen2":
            config["attention_bias"] = self.o_bias
        if self.model_type == "llama":
            config["mlp_bias"] = self.mlp_bias
        else:
            config["use_sliding_window"] = False
        return config


def _required(config: dict[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise UnsupportedModelError(f"the model's config has no {key}")
    return config[key]


def _positive(config: dict[str, Any], key: str) -> int:
    value = _required(config, key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"{key} must be a positive integer, not {value!r}")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UnsupportedModelError(f"{key} must be a number ≥ 0, not {value!r}")
    return float(value)


def _refuse_unimplemented(config: dict[str, Any]) -> None:
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation!r} is not implemented: silu is")
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise UnsupportedModelError(f"layer_types {', '.join(map(repr, other))} is not implemented: full_attention is")
    # Qwen keeps a `sliding_window` in configs that switch it off, and in those that would begin above the last layer.
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window", config["model_type"] == "llama")
    if slides and config.get("max_window_layers", 0) < _positive(config, "num_hidden_layers"):
        raise UnsupportedModelError(f"sliding_window {config['sliding_window']} is not implemented: full attention is")
    for key in (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "quantization_config",
        "attention_sinks",
        "attn_logit_softcapping",
    ):
        if config.get(key):
            raise UnsupportedModelError(f"{key} {config[key]!r} is not implemented")


def _rope(config: dict[str, Any], max_positions: int) -> Rope:
    """transformers 5 writes one dict `rope_parameters`; 4 writes `rope_theta` beside a dict `rope_scaling` or null."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UnsupportedModelError(f"rope_parameters or rope_scaling must be a table, not {given!r}")
    if any(isinstance(value, dict) for value in given.values()):
        raise UnsupportedModelError("rope_parameters that differ by layer type are not implemented")
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    for source in (given, config):
        if (share := source.get("partial_rotary_factor")) not in (None, 1, 1.0):
            raise UnsupportedModelError(f"partial_rotary_factor {share} is not implemented: 1 is")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise UnsupportedModelError(f"rope type {kind!r} is not implemented: {', '.join(_ROPE_KEYS)} are")
    values: dict[str, Any] = {}
    for key, is_required in _ROPE_KEYS[kind].items():
        if given.get(key) is not None:
            values[key] = given[key] if key == "truncate" else _number(key, given[key])
        elif is_required:
            raise UnsupportedModelError(f"rope type {kind!r} needs {key} in rope_parameters")
    if kind != "default":
        # The value beside the rope keys wins where both are given, as in transformers.
        original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        values["original_context"] = int(_number("original_max_position_embeddings", original or max_positions))
    theta = _number("rope_theta", theta)
    if theta <= 1:
        raise UnsupportedModelError(f"rope_theta must be above 1, not {theta:g}")
    return Rope(kind=kind, theta=theta, **values)
