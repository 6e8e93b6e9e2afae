"""The bridge against a real vLLM on the CPU: parity of every dense family over publishes in flight, then tests/vllm whole.

Prints one JSON line for each family: the largest |Δ policy log-prob| between trainer and sampler in float32, before and after
publishes under running generations. Needs `make vllm-env`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 2e-5
LLAMA3 = (
    '{rope_type = "llama3", factor = 4.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 32}'
)
FAMILIES = {
    "llama2": {"model_type": '"llama"', "num_key_value_heads": 4, "tie_word_embeddings": "false"},
    "llama3": {"model_type": '"llama"', "num_key_value_heads": 2, "tie_word_embeddings": "false", "rope_scaling": LLAMA3},
    "smollm2": {"model_type": '"llama"', "num_key_value_heads": 1, "tie_word_embeddings": "true"},
    "qwen2": {"model_type": '"qwen2"', "num_key_value_heads": 2, "tie_word_embeddings": "true"},
    "qwen3": {"model_type": '"qwen3"', "num_key_value_heads": 2, "tie_word_embeddings": "false"},
}


def config(family: dict) -> str:
    keys = "\n".join(f"{key} = {value}" for key, value in family.items())
    return f"""
name = "parity"
sampler = {{ kind = "vllm", max_length = 64, slots = 32 }}
env = "sums"

[model]
tokenizer = "configs/quickstart"

[model.architecture]
{keys}
vocab_size = 16
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 2
num_attention_heads = 4
head_dim = 32
max_position_embeddings = 128
initializer_range = 0.1
rms_norm_eps = 1e-6
eos_token_id = 1

[sampling]
max_tokens = 40

[packing]
row_length = 512
"""


def parity(name: str, folder: Path) -> None:
    file = folder / f"{name}.toml"
    file.write_text(config(FAMILIES[name]))
    command = [sys.executable, "-m", "jaxrl.parity", str(file), "--publishes", "4", "--tasks", "32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines and "agree" in lines[-1], done.stdout[-2000:] + done.stderr[-4000:]
    largest = [line["max"] for line in lines if "publish" in line]
    continued = [line["num_continued"] for line in lines if "num_continued" in line]
    say(name, largest=largest, num_continued=continued, tokens=sum(line.get("tokens", 0) for line in lines))
    assert max(largest) <= LIMIT, f"{name}: {max(largest)}"


def say(proof: str, **figures) -> None:
    print(json.dumps({"proof": proof, **figures}), flush=True)


def main() -> None:
    began = time.monotonic()
    folder = ROOT / "runs" / "proof_bridge"
    folder.mkdir(parents=True, exist_ok=True)
    for name in FAMILIES:
        parity(name, folder)
    tests = subprocess.run([sys.executable, "-m", "pytest", "tests/vllm", "-v"], cwd=ROOT, timeout=3000)
    assert tests.returncode == 0, "tests/vllm failed"
    say("done", seconds=round(time.monotonic() - began))


if __name__ == "__main__":
    main()
