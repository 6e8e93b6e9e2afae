"""`python -m jaxrl.bench tree-attention [--peer-python PATH]`: our kernel and PyTorch's FlexAttention on the same trees.

One layer's attention, forward and forward + backward, on a row of 40,960 tokens with 32 query and 4 KV heads of 128 in
bfloat16. Workloads whose shape is drawn are measured on --trees different trees, after a warm-up on others, so that a
kernel that recompiles or depends on one tree shows it: times are median, 95th percentile and worst over the trees, and
`recompiles` must be 0. FlexAttention runs in a process of --peer-python (torch ≥ 2.11), compiled twice, as it comes and with
max-autotune, the faster one taken per workload; both sides take turns on every tree. Our times contain the making of our block
lists; FlexAttention's mask is made beforehand and timed apart. One JSON line per workload.

FLOPs = 4 · visible pairs · heads · head size forward, 3.5 × that forward + backward. Errors are relative to float32 on a row of
4,096 tokens.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.attention.kernel import Kernel, differentiable
from jaxrl.attention.naive import naive_attention
from jaxrl.bench.workloads import ROW, VARIED, WORKLOADS, layout, workload

HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
CHECK_TOKENS = 4096
REPEATS = 3  # calls of one tree between two synchronisations
NAMES = ("out", "dq", "dk", "dv")
_MODULES = {"hopper": "pallas_kernels.tree_attention_hopper", "triton": "triton_kernels.tree_attention"}

# The peer: reads one JSON line per tree from stdin, answers on stdout.
PEER = """
import json, sys, time
import numpy as np, torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

heads, kv_heads, head_dim, row, repeats = map(int, sys.argv[1:])
variants = {
    "default": torch.compile(flex_attention, dynamic=False),
    "max-autotune": torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs"),
}
make_mask = torch.compile(create_block_mask)

def tensors(tokens, generator):
    make = lambda n: torch.randn(1, n, tokens, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator, requires_grad=True)
    return make(heads), make(kv_heads), make(kv_heads), make(heads).detach()

def mask_of(ends):
    end = torch.tensor(ends, device="cuda")
    return make_mask(lambda b, h, q, k: (q >= k) & (q < end[k]), None, None, len(ends), len(ends), device="cuda")

def clock(run):
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats * 1e3

inputs = tensors(row, torch.Generator("cuda").manual_seed(0))
for line in sys.stdin:
    question = json.loads(line)
    ends = np.load(question["ends"])
    if "inputs" in question:
        q, k, v, d_out = (torch.tensor(x, device="cuda").to(torch.bfloat16).transpose(1, 2) for x in np.load(question["inputs"]).values())
        for x in (q, k, v):
            x.requires_grad_()
        out = variants["default"](q, k, v, block_mask=mask_of(ends), enable_gqa=True)
        out.backward(d_out)
        results = {n: x.detach().float().transpose(1, 2).cpu().numpy() for n, x in zip(("out", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad))}
        np.savez(question["results"], **results)
        print(json.dumps({}), flush=True)
        continue
    mask = mask_of(ends)
    torch.cuda.synchronize()
    began = time.perf_counter()
    mask = mask_of(ends)
    torch.cuda.synchronize()
    answer = {"mask_ms": (time.perf_counter() - began) * 1e3}
    q, k, v, d_out = inputs
    for name in question["variants"]:
        attend = lambda: variants[name](q, k, v, block_mask=mask, enable_gqa=True)
        answer[name] = [clock(attend), clock(lambda: attend().backward(d_out))]
    print(json.dumps(answer), flush=True)
"""


def main(argv: list[str]) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer needs memory too
    options = _parse(argv)
    kernel = _kernel(options.kernel)
    with tempfile.TemporaryDirectory() as scratch:
        peer = _Peer(options.peer_python, Path(scratch)) if options.peer_python else None
        _check(kernel, options.kernel, peer)
        ours = _Ours(kernel)
        for name in options.workloads:
            _measure(name, ours, peer, options)
        if peer is not None:
            peer.close()


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.bench tree-attention", description=__doc__.split("\n\n")[0])
    parser.add_argument("--peer-python", help="a Python interpreter with torch that sees the GPU")
    parser.add_argument("--kernel", default="hopper", choices=_MODULES, help="which of ours")
    parser.add_argument("--trees", type=int, default=64, help="measured trees of a workload whose lengths are drawn")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS, metavar="NAME")
    return parser.parse_args(argv)


def _kernel(name: str) -> Kernel:
    module = importlib.import_module(_MODULES[name])
    return Kernel(module.forward, module.backward)


class _Ours:
    """The compiled functions and their inputs."""

    def __init__(self, kernel: Kernel):
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = ((ROW, HEADS), (ROW, KV_HEADS), (ROW, KV_HEADS), (ROW, HEADS))
        make = jax.jit(lambda key, shape: jax.random.normal(key, (1, *shape, HEAD_DIM), jnp.bfloat16), static_argnums=1)
        self.inputs = [make(key, shape) for key, shape in zip(keys, shapes, strict=True)]
        attend = _attend(kernel)
        self.forward = jax.jit(lambda q, k, v, d_out, end: attend(q, k, v, end))
        self.both = jax.jit(lambda q, k, v, d_out, end: jax.vjp(lambda *x: attend(*x, end), q, k, v)[1](d_out))

    def time(self, end: np.ndarray) -> tuple[float, float]:
        """ms forward, and forward + backward."""
        return tuple(_clock(f, *self.inputs, jnp.asarray(end)[None]) for f in (self.forward, self.both))

    @property
    def num_compiled(self) -> int:
        return self.forward._cache_size() + self.both._cache_size()


def _attend(kernel: Kernel):
    attend = differentiable(kernel, scale=HEAD_DIM**-0.5, window=None)

    def run(q, k, v, end):
        offset = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        return attend(q, k, v, offset, offset, end, None, None)[0]

    return run


def _clock(function, *args) -> float:
    jax.block_until_ready(function(*args))
    began = time.perf_counter()
    for _ in range(REPEATS):
        result = function(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / REPEATS * 1e3


def _measure(name: str, ours: _Ours, peer: "_Peer | None", options) -> None:
    num_trees = options.trees if name in VARIED else 1
    warm = layout(workload(name, seed=10_000))
    ours.time(warm.subtree_end)
    compiled = ours.num_compiled
    variants = ()
    if peer is not None:
        first = peer.time(warm.subtree_end, ("default", "max-autotune"))
        variants = (min(("default", "max-autotune"), key=lambda variant: first[variant][1]),)
    times, peer_times, rates, masks = [], [], [], []
    for seed in range(num_trees):
        row = layout(workload(name, seed=seed))
        times.append(ours.time(row.subtree_end))
        rates.append(4 * row.pairs * HEADS * HEAD_DIM / 1e9)
        if peer is not None:
            answer = peer.time(row.subtree_end, variants)
            peer_times.append(answer[variants[0]])
            masks.append(answer["mask_ms"])
    line = {
        "bench": "tree-attention",
        "workload": name,
        "kernel": options.kernel,
        "device": jax.devices()[0].device_kind,
        "trees": num_trees,
    }
    for i, (what, factor) in enumerate((("forward", 1), ("forward_backward", 3.5))):
        line |= {f"{what}_ms": _spread([t[i] for t in times])}
        line |= {f"{what}_tflops": round(statistics.median(factor * r / t[i] for r, t in zip(rates, times, strict=True)))}
        if peer_times:
            line |= {f"flex_{what}_ms": _spread([t[i] for t in peer_times])}
            line |= {f"ratio_{what}": round(statistics.median(p[i] / t[i] for p, t in zip(peer_times, times, strict=True)), 3)}
    if peer_times:
        line |= {"flex": variants[0], "flex_mask_ms": round(statistics.median(masks), 2)}
    print(json.dumps(line | {"recompiles": ours.num_compiled - compiled}), flush=True)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"median": statistics.median(ordered), "p95": ordered[int(0.95 * (len(ordered) - 1))], "worst": ordered[-1]}
    return {name: round(value, 2) for name, value in at.items()}


def _check(kernel: Kernel, name: str, peer: "_Peer | None") -> None:
    """Prints the relative errors of output and gradients against float32, ours and the peer's."""
    end = layout(workload("depth-3 nested", seed=1, tokens=CHECK_TOKENS), CHECK_TOKENS).subtree_end
    rng = np.random.default_rng(0)
    shapes = ((CHECK_TOKENS, HEADS), (CHECK_TOKENS, KV_HEADS), (CHECK_TOKENS, KV_HEADS), (CHECK_TOKENS, HEADS))
    inputs = [jnp.asarray(rng.standard_normal((1, *shape, HEAD_DIM)), jnp.bfloat16) for shape in shapes]
    offset = jnp.arange(CHECK_TOKENS, dtype=jnp.int32)[None]

    def gradients(attend, q, k, v, d_out):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(d_out.astype(out.dtype))

    ours = jax.jit(lambda *x: gradients(lambda q, k, v: _attend(kernel)(q, k, v, jnp.asarray(end)[None]), *x))(*inputs)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in inputs]

        def reference(q, k, v):
            return naive_attention(q, k, v, offset, offset, jnp.asarray(end)[None], scale=HEAD_DIM**-0.5)[0]

        expected = jax.jit(lambda *x: gradients(reference, *x))(*wide)
    line = {"bench": "tree-attention", "what": "relative error against float32", "kernel": name} | _errors(ours, expected)
    if peer is not None:
        theirs = _errors(peer.results(end, inputs), expected)
        line |= {f"flex_{what}": error for what, error in theirs.items()}
    print(json.dumps(line), flush=True)


def _errors(actual, expected) -> dict[str, float]:
    pairs = zip(NAMES, actual, expected, strict=True)
    wide = ((n, np.asarray(a, np.float64), np.asarray(e, np.float64)) for n, a, e in pairs)
    return {name: float(f"{np.linalg.norm(a - e) / np.linalg.norm(e):.2e}") for name, a, e in wide}


class _Peer:
    """FlexAttention in a process of its own."""

    def __init__(self, python: str, scratch: Path):
        self._scratch = scratch
        arguments = [str(x) for x in (HEADS, KV_HEADS, HEAD_DIM, ROW, REPEATS)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # its own triton, not ours
        self._process = subprocess.Popen(
            [python, "-c", PEER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=scratch,
        )

    def time(self, end: np.ndarray, variants: tuple[str, ...]) -> dict:
        """mask_ms, and per variant [ms forward, ms forward + backward]."""
        return self._ask(end, {"variants": variants})

    def results(self, end: np.ndarray, inputs: list[jax.Array]) -> list[np.ndarray]:
        files = {name: str(self._scratch / f"{name}.npz") for name in ("inputs", "results")}
        np.savez(
            files["inputs"], **{n: np.asarray(x, np.float32) for n, x in zip(("q", "k", "v", "d_out"), inputs, strict=True)}
        )
        self._ask(end, files)
        with np.load(files["results"]) as results:
            return [results[name] for name in NAMES]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, end: np.ndarray, question: dict) -> dict:
        path = self._scratch / "ends.npy"
        np.save(path, end)
        self._process.stdin.write(json.dumps(question | {"ends": str(path)}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit("the peer ended: its error is above (--peer-python needs torch with FlexAttention and a GPU)")
        return json.loads(answer)
