"""`python -m jaxrl.bench context [options]`: does a plan's work predict the time of each device? As JSON lines.

A row's tokens are planned over C devices and the share of each is run on the one device there is, forward
and backward, against the keys of the whole row as `gather` brings them. The time of a share is predicted
as `fixed + per_block * work`; the two numbers come from shares of two chains of the same
shapes, a full row and one of which a quarter is used, never from the tree itself.

    busiest_predicted_ms, busiest_measured_ms   the largest over the devices, and their ratio
    work_imbalance, time_imbalance              the busiest over the mean, less 1: planned, and measured
"""

import argparse
import json
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.attention.choice import choose_kernel
from jaxrl.attention.kernel import differentiable
from jaxrl.attention.plan import Plan, plan_row
from jaxrl.bench.workloads import ROW, WORKLOADS, Tree, layout, workload
from jaxrl.config import AttentionConfig


def shares(forest: list[Tree], tokens: int, num_devices: int) -> tuple[Plan, list[tuple[np.ndarray, ...]]]:
    """The plan, and for each device (q_offset [1, T / C], k_offset [1, T], subtree_end [1, T])."""
    end, used = layout(forest, tokens).subtree_end, sum(tree.total for tree in forest)
    plan = plan_row(end, used, num_devices)
    offset = np.where(plan.order < used, plan.order, -1)[None]
    end = np.where(offset < 0, -1, end[plan.order])
    return plan, [(q_offset, offset, end) for q_offset in np.split(offset, num_devices, axis=1)]


def seconds(run, repeats: int, calls: int) -> float:
    """Median over `repeats` of the time of a call, among `calls` that are issued together."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)])
        times.append((time.perf_counter() - start) / calls)
    return float(np.median(times))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.bench context", description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=ROW)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 4], metavar=("QUERY", "KV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args(argv)
    tokens, (heads, kv_heads), size = options.tokens, options.heads, options.head_dim

    device = jax.devices()[0]
    capability = device.compute_capability if device.platform == "gpu" else None
    kernel = choose_kernel(AttentionConfig(), device.platform, capability, size, options.dtype, False)
    attend = differentiable(kernel, scale=size**-0.5, window=None)

    @jax.jit
    def forward_backward(q, k, v, d_out, q_offset, k_offset, end):
        (out, _), pull = jax.vjp(lambda *x: attend(*x, q_offset, k_offset, end, None, None), q, k, v)
        return out, pull((d_out, jnp.zeros((1, q.shape[1], heads), jnp.float32)))

    def random(seed, length, num_heads):
        return jax.random.normal(jax.random.key(seed), (1, length, num_heads, size), options.dtype)

    k, v = (random(seed, tokens, kv_heads) for seed in (0, 1))
    for num_devices in options.devices:
        q, d_out = (random(seed, tokens // num_devices, heads) for seed in (2, 3))

        def time_of(share, q=q, d_out=d_out):
            placed = jax.device_put(share)
            return 1e3 * seconds(partial(forward_backward, q, k, v, d_out, *placed), options.repeats, options.calls)

        work, times = [], []
        for length in (tokens, tokens // 4):
            plan, devices = shares([Tree(length)], tokens, num_devices)
            work.append(plan.work[0])
            times.append(time_of(devices[0]))
        per_block = (times[0] - times[1]) / (work[0] - work[1])
        fixed = times[0] - per_block * work[0]
        for name in options.workloads:
            plan, devices = shares(workload(name, tokens=tokens), tokens, num_devices)
            measured = np.array([time_of(share) for share in devices])
            predicted = fixed + per_block * plan.work
            line = {
                "workload": name,
                "devices": num_devices,
                "busiest_predicted_ms": round(predicted.max(), 4),
                "busiest_measured_ms": round(measured.max(), 4),
                "ratio": round(predicted.max() / measured.max(), 3),
                "work_imbalance": round(plan.work.max() / plan.work.mean() - 1, 4),
                "time_imbalance": round(measured.max() / measured.mean() - 1, 4),
                "fixed_ms": round(fixed, 4),
                "per_block_us": round(1e3 * per_block, 4),
            }
            print(json.dumps(line), flush=True)
