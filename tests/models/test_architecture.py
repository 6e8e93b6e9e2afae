import pytest

from jaxrl.models.architecture import Architecture, UnsupportedModelError
from jaxrl.models.hf import load_architecture

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN2 = LLAMA | {"model_type": "qwen2"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("case", ["llama2", "llama3", "llama_bias", "smollm2", "qwen2", "qwen2_yarn", "qwen3", "qwen3_yarn"])
def test_config_json_round_trip(goldens, case):
    architecture = load_architecture(goldens / case)
    assert Architecture.from_hf(architecture.to_hf()) == architecture


def test_old_and_new_rope_keys_mean_the_same():
    new = Architecture.from_hf(LLAMA | {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}})
    assert new.rope.theta == 5e5 and new.rope.original_context == 64
    for key in ("rope_type", "type"):
        assert Architecture.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {key: "llama3"}}) == new
    assert Architecture.from_hf(LLAMA | {"rope_theta": 1e6, "rope_scaling": None}).rope.theta == 1e6
    # Qwen2.5's documented long-context setting leaves the original context to a default in one of its forms.
    yarn = Architecture.from_hf(QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert yarn.rope.original_context == 256


def test_defaults_of_each_family():
    without_kv = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert Architecture.from_hf(without_kv).num_kv_heads == 4
    assert Architecture.from_hf(LLAMA).head_dim == 8
    assert Architecture.from_hf(LLAMA | {"model_type": "qwen3"}).head_dim == 128
    assert Architecture.from_hf(LLAMA | {"eos_token_id": [2, 3]}).eos_token_ids == (2, 3)
    assert Architecture.from_hf(QWEN2).qkv_bias and not Architecture.from_hf(QWEN2).o_bias


def test_a_sliding_window_that_is_switched_off_is_none():
    off = {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 1}
    assert Architecture.from_hf(QWEN2 | off) == Architecture.from_hf(QWEN2)
    above = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}
    assert Architecture.from_hf(QWEN2 | above) == Architecture.from_hf(QWEN2)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (LLAMA | {"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"hidden_size": 32}, "no model_type"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"vocab_size": None}, "no vocab_size"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        (LLAMA | {"head_dim": 7}, "head_dim 7"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "layer type"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA | {"sliding_window": 64}, "sliding_window 64"),
        (QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, "sliding_window 64"),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types 'sliding_attention'"),
        (LLAMA | {"num_experts": 8}, "num_experts 8"),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config, names):
    with pytest.raises(UnsupportedModelError, match=names):
        Architecture.from_hf(config)
