"""`python -m jaxrl.bench generate --checkpoint DIR [--peer-python PATH]`: tokens per second of the embedded sampler.

With --peer-python, an interpreter that has torch and transformers, every round runs transformers' `generate` too: the
same prompts, the same number of new tokens, both warmed up, one side at a time, alternating, so that what else
the machine does hits both. The workload is a training step's: --batch sequences, --samples-per-prompt of each random
prompt (1: all prompts differ, and the sampler has nothing to share). One JSON line per side and round, then one with the ratio of each round. Sampling is at
--temperature without truncation (0: greedy), with stop tokens off; the embedded sampler also returns each token's
log-probs, the peer does not. Times include prefill and everything on the host.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time

import jax
import numpy as np

from jaxrl.config import SamplerConfig
from jaxrl.engine import EmbeddedSampler
from jaxrl.models.hf import load_architecture, load_checkpoint
from jaxrl.rollout.protocol import SamplingParams

# The peer: reads one JSON line per round from stdin, answers with seconds on stdout. Its own process, because torch and
# jax would share a thread pool badly; idle while the other side runs.
PEER = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM

options = json.loads(sys.stdin.readline())
model = AutoModelForCausalLM.from_pretrained(options["checkpoint"], dtype=getattr(torch, options["dtype"])).eval()
if torch.cuda.is_available():
    model = model.cuda()
how = dict(do_sample=True, temperature=options["temperature"], top_k=0, top_p=1.0) if options["temperature"] else dict(do_sample=False)
model.generation_config.eos_token_id = None
for line in sys.stdin:
    round = json.loads(line)
    prompts = torch.tensor(round["prompts"], device=model.device)
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=round["new_tokens"],
            min_new_tokens=round["new_tokens"], pad_token_id=0, **how
        )
    tokens = out[:, prompts.shape[1]:].numel() if out.device.type == "cpu" else out[:, prompts.shape[1]:].cpu().numel()
    print(json.dumps({"seconds": time.perf_counter() - began, "tokens": tokens}), flush=True)
"""


def main(argv: list[str]) -> None:
    options = _parse(argv)
    architecture = load_architecture(options.checkpoint)
    limits = SamplerConfig(
        slots=options.batch,
        max_length=options.prompt_tokens + options.new_tokens,
        prefill_chunk=options.prefill_chunk,
        dtype=options.dtype,
    )
    weights = {"params": load_checkpoint(options.checkpoint, architecture, None, options.dtype)}
    sampler = EmbeddedSampler(architecture, weights, 0, limits)
    del weights
    rng = np.random.default_rng(0)
    shape = (options.rounds + 1, options.batch // options.samples_per_prompt, options.prompt_tokens)
    prompts = rng.integers(0, architecture.vocab_size, shape)  # round 0 warms up
    prompts = np.repeat(prompts, options.samples_per_prompt, axis=1)
    peer = _start_peer(options) if options.peer_python else None
    rounds = asyncio.run(_measure(sampler, prompts, options, peer))
    _report(rounds, options)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.bench generate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--peer-python", help="a Python interpreter with torch and transformers")
    parser.add_argument("--batch", type=int, default=64, help="sequences generated at once")
    parser.add_argument("--samples-per-prompt", type=int, default=8, help="a divisor of the batch; 1: all prompts differ")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of both sides")
    parser.add_argument("--prefill-chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    if options.batch % options.samples_per_prompt:
        parser.error(f"--samples-per-prompt {options.samples_per_prompt} does not divide --batch {options.batch}")
    return options


async def _measure(sampler: EmbeddedSampler, prompts, options, peer) -> list[dict[str, float]]:
    rounds = []
    for i, batch in enumerate(prompts):
        began = time.perf_counter()
        params = [SamplingParams(options.new_tokens, temperature=options.temperature, seed=j) for j in range(len(batch))]
        completions = await asyncio.gather(*(sampler.generate(p, how) for p, how in zip(batch, params, strict=True)))
        seconds = time.perf_counter() - began
        result = {"jaxrl": sum(len(c.tokens.ids) for c in completions) / seconds}
        if peer is not None:
            answer = _ask(peer, {"prompts": batch.tolist(), "new_tokens": options.new_tokens})
            result["transformers"] = answer["tokens"] / answer["seconds"]
        if i > 0:
            rounds.append(result)
            for side, rate in result.items():
                print(
                    json.dumps({"bench": "generate", "side": side, "round": i, "tokens_per_second": round(rate, 1)}), flush=True
                )
    await sampler.close()
    if peer is not None:
        peer.stdin.close()
        peer.wait()
    return rounds


def _start_peer(options) -> subprocess.Popen:
    peer = subprocess.Popen([options.peer_python, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    settings = {"checkpoint": options.checkpoint, "dtype": options.dtype, "temperature": options.temperature}
    peer.stdin.write(json.dumps(settings) + "\n")
    return peer


def _ask(peer: subprocess.Popen, question: dict) -> dict:
    peer.stdin.write(json.dumps(question) + "\n")
    peer.stdin.flush()
    answer = peer.stdout.readline()
    if not answer:
        sys.exit("the peer ended: its error is above (--peer-python needs torch and transformers)")
    return json.loads(answer)


def _report(rounds: list[dict[str, float]], options) -> None:
    summary = {
        "bench": "generate",
        "device": jax.devices()[0].device_kind,
        "batch": options.batch,
        "samples_per_prompt": options.samples_per_prompt,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "temperature": options.temperature,
        "dtype": options.dtype,
        "jaxrl": round(statistics.median(r["jaxrl"] for r in rounds), 1),
    }
    if "transformers" in rounds[0]:
        ratios = [r["jaxrl"] / r["transformers"] for r in rounds]
        summary["transformers"] = round(statistics.median(r["transformers"] for r in rounds), 1)
        summary["ratios"] = [round(ratio, 2) for ratio in ratios]
        summary["ratio"] = round(statistics.median(ratios), 2)
    print(json.dumps(summary), flush=True)
