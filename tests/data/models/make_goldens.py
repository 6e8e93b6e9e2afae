"""Writes the golden files beside this script: tiny random checkpoints saved by transformers with their logits, an
adapter saved by PEFT with its logits, and greedy continuations of stories260K.

Needs an environment with torch, transformers and peft (made with torch 2.13.0, transformers 5.24.0, peft 0.21.2):
    python tests/data/models/make_goldens.py
"""

import json
import shutil
from pathlib import Path

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

HERE = Path(__file__).parent
STORIES = HERE.parent / "stories260K"
ORIGINAL = 16  # tokens of the context before scaling: the ids reach three times as far

BASE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=2.0,
              original_max_position_embeddings=ORIGINAL)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=ORIGINAL)

# name -> (config, dtype of the file, largest file)
CASES = {
    "llama2": (LlamaConfig(**BASE | dict(num_key_value_heads=4)), torch.float32, "1GB"),
    "llama3": (LlamaConfig(**BASE, head_dim=16, rope_parameters=LLAMA3, tie_word_embeddings=True), torch.bfloat16, "1GB"),
    "llama_bias": (LlamaConfig(**BASE, attention_bias=True, mlp_bias=True, head_dim=6), torch.float16, "1GB"),
    "smollm2": (
        LlamaConfig(**BASE | dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1), tie_word_embeddings=True,
                    rope_parameters=dict(rope_type="default", rope_theta=100000.0)),
        torch.bfloat16, "1GB",
    ),
    "qwen2": (Qwen2Config(**BASE, tie_word_embeddings=True), torch.bfloat16, "1GB"),
    "qwen2_yarn": (Qwen2Config(**BASE, rope_parameters=YARN), torch.bfloat16, "10KB"),
    "qwen3": (Qwen3Config(**BASE, head_dim=16, tie_word_embeddings=True), torch.bfloat16, "1GB"),
    "qwen3_yarn": (
        Qwen3Config(**BASE, head_dim=16, attention_bias=True,
                    rope_parameters=YARN | dict(beta_fast=8.0, beta_slow=0.5, mscale=0.8, mscale_all_dim=0.3, truncate=False)),
        torch.bfloat16, "1GB",
    ),
}  # fmt: skip


def randomise(model) -> None:
    """Weights large enough that every part of the model moves the logits; norms and biases away from 1 and 0."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        parameter.data = (
            1 + 0.3 * noise if "norm" in name else 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5
        )


def logits(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(ids)).logits.numpy()


def main() -> None:
    ids = np.random.default_rng(0).integers(3, BASE["vocab_size"], (2, 3 * ORIGINAL))
    np.save(HERE / "ids.npy", ids.astype(np.int32))
    for name, (config, dtype, max_shard_size) in CASES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        randomise(model)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        # Read back: the cast above rounds the rotary frequencies too, which are no part of the file.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        np.save(folder / "logits.npy", logits(model, ids))

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(HERE / "qwen3", dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape) / parameter.shape[1] ** 0.5
    model.peft_config["default"].base_model_name_or_path = "qwen3"
    folder = HERE / "qwen3_adapter"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    np.save(folder / "logits.npy", logits(model, ids))

    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    model = AutoModelForCausalLM.from_pretrained(STORIES)
    stories = []
    for text in ("Once upon a time", "One day, Tom and his dog", "The sun was"):
        prompt = tokenizer(text, return_tensors="pt")
        out = model.generate(**prompt, max_new_tokens=100, do_sample=False)[0].tolist()
        stories.append({"num_prompt": prompt.input_ids.shape[1], "ids": out, "text": tokenizer.decode(out)})
    (STORIES / "greedy.json").write_text(json.dumps(stories, indent=1) + "\n")


if __name__ == "__main__":
    main()
