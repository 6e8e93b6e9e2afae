"""`python -m jaxrl.bench head`: the head over reads by kernel, in plain chunks, and with all logits in memory, in one run.

Per shape (model width × vocabulary, from an embedding [V, E] where tied) and number of reads, one JSON line per version: ms of
the forward pass and of forward + backward, median and 95th percentile; MiB that the compiled forward + backward adds to its
arguments (temporaries and results); MiB that the process had allocated at most when it had run (`device_peak_mib`; null where
the device does not say, or an earlier version went as high). Then one line of ratios, other version / kernel. FLOPs =
2 · reads · width · vocabulary a matrix product, one forward and three forward + backward: logits computed again count for nothing.
Errors, ‖a − b‖/‖b‖ on the first reads, are against float32 from the same 16-bit arrays.
"""

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import head as plain

SHAPES = {"qwen3-0.6b": "1024x151936-tied", "qwen3-8b": "4096x151936"}
VERSIONS = ("kernel", "chunked", "full")
RESULTS = ("logp", "entropy", "d_states", "d_head")
CHUNK = 512  # reads: the trainer's
CHECKED_READS = 256

Head = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def main(argv: list[str]) -> None:
    options = _parse(argv)
    for shape in options.shapes:
        width, vocab, tied = _sizes(shape)
        for num_reads in options.reads:
            arguments = _arguments(num_reads, width, vocab, tied, options.dtype)
            versions = {name: version for name in options.versions if (version := _version(name, tied)) is not None}
            _errors(shape, versions, arguments, tied)
            _times(shape, num_reads, versions, arguments, 2 * num_reads * width * vocab, options.repeats)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.bench head", description=__doc__.split("\n\n")[0])
    named = ", ".join(SHAPES)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help=f"{named}, or WIDTHxVOCAB, or WIDTHxVOCAB-tied")
    parser.add_argument("--reads", nargs="+", type=int, default=[8192, 40_960])
    parser.add_argument("--versions", nargs="+", default=VERSIONS, choices=VERSIONS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=10, help="timed calls of each")
    options = parser.parse_args(argv)
    for shape in options.shapes:
        if not re.fullmatch(r"\d+x\d+(-tied)?", SHAPES.get(shape, shape)):
            parser.error(f"--shapes {shape}: neither one of {named} nor WIDTHxVOCAB or WIDTHxVOCAB-tied")
    return options


def _sizes(shape: str) -> tuple[int, int, bool]:
    sizes, _, tied = SHAPES.get(shape, shape).partition("-")
    width, vocab = map(int, sizes.split("x"))
    return width, vocab, bool(tied)


def _version(name: str, tied: bool) -> Head | None:
    """The head of that name as a function of (states [U, E], matrix as it is stored, target, temperature); None: not here."""
    if name == "kernel":
        platform = jax.default_backend()
        if platform == "gpu":
            from pallas_kernels import head_hopper

            return partial(head_hopper.read_logprobs, vocab_major=tied)
        if platform != "tpu":
            return None
        from pallas_kernels import head_tpu

        return partial(head_tpu.read_logprobs, vocab_major=tied)
    return _from_stored(full_logits if name == "full" else partial(plain.read_logprobs, chunk=CHUNK), tied)


def _from_stored(head: Head, tied: bool) -> Head:
    return (lambda states, matrix, *rest: head(states, matrix.T, *rest)) if tied else head


@jax.custom_vjp
def full_logits(states: jax.Array, head: jax.Array, target: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `jaxrl.models.head.read_logprobs` of [U] reads, but all logits are kept for the backward pass: three products."""
    return _full_forward(states, head, target, temperature)[0]


def _full_forward(states, head, target, temperature):
    logits = jnp.dot(states, head, preferred_element_type=jnp.float32) / temperature[:, None]
    lse = jax.nn.logsumexp(logits, axis=-1)
    logp = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0] - lse
    log_probs = logits - lse[:, None]
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return (logp, entropy), (states, head, target, temperature, logits, lse, entropy)


def _full_backward(saved, cotangents):
    states, head, target, temperature, logits, lse, entropy = saved
    d_logp, d_entropy = (x[:, None] for x in cotangents)
    log_probs = logits - lse[:, None]
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == target[:, None]
    d_logits = jnp.where(is_target, d_logp, 0) - jnp.exp(log_probs) * (d_logp + d_entropy * (log_probs + entropy[:, None]))
    d_logits = (d_logits / temperature[:, None]).astype(states.dtype)
    d_head = jnp.dot(states.T, d_logits, preferred_element_type=head.dtype)
    return jnp.dot(d_logits, head.T, preferred_element_type=states.dtype), d_head, None, None


full_logits.defvjp(_full_forward, _full_backward)


def _arguments(num_reads: int, width: int, vocab: int, tied: bool, dtype: str) -> tuple[jax.Array, ...]:
    """states, matrix, target, temperature, and the cotangents of log-prob and entropy."""
    keys = jax.random.split(jax.random.key(0), 6)

    @partial(jax.jit, static_argnums=(1, 2))
    def normal(key, shape, size):
        return (jax.random.normal(key, shape) * size).astype(dtype)

    return (
        normal(keys[0], (num_reads, width), 1.0),
        normal(keys[1], (vocab, width) if tied else (width, vocab), 2 / math.sqrt(width)),
        jax.random.randint(keys[2], (num_reads,), 0, vocab),
        jax.random.uniform(keys[3], (num_reads,), minval=0.7, maxval=1.3),
        jax.random.normal(keys[4], (num_reads,)),
        jax.random.normal(keys[5], (num_reads,)) * 0.1,
    )


def _both(head: Head):
    def run(states, matrix, target, temperature, d_logp, d_entropy):
        results, pull = jax.vjp(lambda *x: head(*x, target, temperature), states, matrix)
        return *results, *pull((d_logp, d_entropy))

    return run


def _forward(head: Head):
    return lambda states, matrix, target, temperature, *_: head(states, matrix, target, temperature)


def _errors(shape: str, versions: dict[str, Head], arguments: tuple[jax.Array, ...], tied: bool) -> None:
    states, matrix, *rest = arguments
    states, *rest = (x[:CHECKED_READS] for x in (states, *rest))
    with jax.default_matmul_precision("highest"):
        wide = (x.astype(jnp.float32) for x in (states, matrix))
        expected = jax.jit(_both(_version("chunked", tied)))(*wide, *rest)
    expected = [np.asarray(x) for x in expected]
    for name, head in versions.items():
        line = {"bench": "head", "what": "relative error against float32", "shape": shape, "version": name}
        for result, a, b in zip(RESULTS, jax.jit(_both(head))(states, matrix, *rest), expected, strict=True):
            line[result] = float(f"{np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b):.2e}")
        print(json.dumps(line), flush=True)


def _times(shape: str, num_reads: int, versions: dict[str, Head], arguments, product_flops: int, repeats: int) -> None:
    def compiled(function):
        return jax.jit(function).lower(*arguments).compile()

    with ThreadPoolExecutor() as pool:
        jobs = {name: [pool.submit(compiled, wrap(head)) for wrap in (_forward, _both)] for name, head in versions.items()}
        programs = {name: [job.result() for job in pair] for name, pair in jobs.items()}
    lines = {}
    for name, (forward, both) in programs.items():
        line = {"bench": "head", "shape": shape, "reads": num_reads, "version": name, "device": jax.devices()[0].device_kind}
        before = _device_peak()
        for what, program, products in (("forward", forward, 1), ("forward_backward", both, 3)):
            times = _clock(program, arguments, repeats)
            line[f"{what}_ms"] = {"median": statistics.median(times), "p95": times[math.ceil(0.95 * len(times)) - 1]}
            line[f"{what}_tflops"] = round(products * product_flops / statistics.median(times) / 1e9, 3)
        memory = both.memory_analysis()
        line["memory_mib"] = round((memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20, 1)
        after = _device_peak()
        line["device_peak_mib"] = round(after / 2**20) if after is not None and after > before else None
        print(json.dumps(line), flush=True)
        lines[name] = line
    if "kernel" in lines:
        ratios = {"bench": "head", "what": "ratio, other version / kernel", "shape": shape, "reads": num_reads}
        ours = lines.pop("kernel")
        for name, line in lines.items():
            for what in ("forward_ms", "forward_backward_ms"):
                ratios[f"{name}_{what}"] = round(line[what]["median"] / ours[what]["median"], 3)
            ratios[f"{name}_memory"] = round(line["memory_mib"] / ours["memory_mib"], 3)
        print(json.dumps(ratios), flush=True)


def _clock(program, arguments, repeats: int) -> list[float]:
    """ms of each call, sorted, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(round((time.perf_counter() - began) * 1e3, 3))
    return sorted(times[1:])


def _device_peak() -> int | None:
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
