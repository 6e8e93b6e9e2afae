"""`python -m jaxrl.bench train-step [--shape qwen3-0.6b]`: one optimizer step as a tree, and without sharing.

Random weights of a Qwen3 shape, 96 trajectories of "fixed 5K+16x100" (six prompts of 5,000 tokens, sixteen answers of 100 each,
GRPO with AdamW). `tree` packs them as prefix trees into one row of 40,960 tokens; `flat` packs the same trajectories end to end, sharing
nothing, into rows of the same length, with the same attention kernel (each trajectory then is a causal chain), head and remat.
One JSON line each, then one with the tree's gain: time of flat over time of tree.

tokens_per_second counts the tokens of the trajectories (489,600), which both train on. MFU counts useful FLOPs of the tokens a variant computes:
6 · parameters of the layers' matmuls · tokens, 6 · head parameters · reads, and 3.5 · 4 · visible pairs · heads · head size ·
layers for attention (recomputation is not counted), over --peak-tflops.
"""

import argparse
import json
import statistics
import time

import jax
import numpy as np

from jaxrl.config import parse
from jaxrl.data import Source, TrainingTrajectory, Trajectory
from jaxrl.mesh import make_mesh
from jaxrl.models.architecture import Architecture
from jaxrl.models.decoder import init_variables
from jaxrl.packing import RowLimits, pack
from jaxrl.trainer.step import make_trainer

ROW, PROMPTS, ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 40_960, 6, 16, 5000, 100

# Published shapes: hidden size, MLP size, layers, query heads, tied embeddings.
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-4b": (2560, 9728, 36, 32, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
    "qwen3-tiny": (128, 256, 2, 8, True),  # published by nobody: what benches are tried with on a CPU
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.bench train-step", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument(
        "--param-dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and optimizer state"
    )
    parser.add_argument("--remat", default="full", choices=("none", "dots", "full"))
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each variant, after one that compiles")
    parser.add_argument("--variants", nargs="+", default=("tree", "flat"), choices=("tree", "flat"))
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the device in bfloat16, dense")
    options = parser.parse_args(argv)
    architecture = qwen3(options.shape)
    seconds = {}
    for variant in options.variants:
        seconds[variant] = _measure(variant, architecture, options)
    if len(seconds) == 2:
        gain = seconds["flat"] / seconds["tree"]
        print(json.dumps({"bench": "train-step", "shape": options.shape, "gain": round(gain, 2)}), flush=True)


def qwen3(shape: str) -> Architecture:
    hidden, mlp, layers, heads, tied = SHAPES[shape]
    return Architecture.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": 151_936,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": tied,
            "attention_bias": False,
        }
    )


def _measure(variant: str, architecture: Architecture, options) -> float:
    """Prints a variant's line; median seconds of a step."""
    is_tree = variant == "tree"
    length = PROMPT_TOKENS + ANSWER_TOKENS
    per_row = PROMPTS * ANSWERS if is_tree else ROW // length
    packing = {"row_length": ROW, "reads": -(-per_row * ANSWER_TOKENS // 512) * 512, "trajectories": 128, "segments": 256}
    if not is_tree:
        packing["min_shared"] = ROW
    config = parse(
        {
            "model": {
                "architecture": {"model_type": "qwen3"},  # read by nobody here: the shape is given
                "tokenizer": "none",
                "dtype": "bfloat16",
                "param_dtype": options.param_dtype,
                "remat": options.remat,
            },
            "env": "arithmetic",
            "packing": packing | {"terms": packing["reads"]},
        }
    )
    trainer = make_trainer(config, architecture, make_mesh(config.mesh, jax.devices()[:1]))
    state = trainer.init(init_variables(trainer.decoder, jax.random.key(0), trainer.mesh))
    batches, stats = pack(_trajectories(architecture.vocab_size), RowLimits.from_config(config.packing), 1)
    times = []
    for _ in range(options.steps + 1):
        began = time.perf_counter()
        state, metrics = trainer.train_step(state, batches)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[1:])
    flops = _useful_flops(architecture, stats.placed_tokens, is_tree)
    memory = jax.devices()[0].memory_stats() or {}
    line = {
        "bench": "train-step",
        "shape": options.shape,
        "variant": variant,
        "device": jax.devices()[0].device_kind,
        "param_dtype": options.param_dtype,
        "remat": options.remat,
        "rows": len(batches),
        "tokens_computed": stats.placed_tokens,
        "seconds": round(seconds, 4),
        "seconds_of_steps": [round(t, 4) for t in times[1:]],
        "compile_seconds": round(times[0], 1),
        "tokens_per_second": round(PROMPTS * ANSWERS * length / seconds),
        "mfu": round(flops / seconds / options.peak_tflops / 1e12, 4),
        "peak_gib": round(memory.get("peak_bytes_in_use", 0) / 2**30, 1),
        "nonfinite": int(metrics["nonfinite"]),
    }
    print(json.dumps(line), flush=True)
    return seconds


def _trajectories(vocab_size: int) -> list[TrainingTrajectory]:
    rng = np.random.default_rng(0)
    trajectories = []
    for group in range(PROMPTS):
        prompt = rng.integers(0, vocab_size, PROMPT_TOKENS)
        for _ in range(ANSWERS):
            ids = np.concatenate([prompt, rng.integers(0, vocab_size, ANSWER_TOKENS)]).astype(np.int32)
            sampled = np.arange(len(ids)) >= PROMPT_TOKENS
            logp = np.where(sampled, -np.log(vocab_size), 0).astype(np.float32)
            version = np.where(sampled, 0, -1).astype(np.int32)
            source = np.where(sampled, Source.PLAIN, Source.CONTEXT).astype(np.uint8)
            trajectory = Trajectory(ids, sampled, logp, logp, version, source, version)
            advantage = np.where(sampled, rng.standard_normal(), 0).astype(np.float32)
            weight = sampled.astype(np.float32) / (PROMPTS * ANSWERS * ANSWER_TOKENS)
            index = len(trajectories)
            trajectories.append(TrainingTrajectory(trajectory, advantage, weight, index, index, group))
    return trajectories


def _useful_flops(a: Architecture, tokens: int, is_tree: bool) -> float:
    attention = 2 * a.hidden_size * a.head_dim * (a.num_heads + a.num_kv_heads)
    layer = attention + 3 * a.hidden_size * a.intermediate_size
    prompt, answer, answers = PROMPT_TOKENS, ANSWER_TOKENS, ANSWERS
    shared, own = prompt * (prompt + 1) / 2, answer * prompt + answer * (answer + 1) / 2
    pairs = PROMPTS * (shared + answers * own if is_tree else answers * (shared + own))
    head = a.hidden_size * a.vocab_size * PROMPTS * ANSWERS * ANSWER_TOKENS
    return 6 * a.num_layers * layer * tokens + 6 * head + 3.5 * 4 * pairs * a.num_heads * a.head_dim * a.num_layers
