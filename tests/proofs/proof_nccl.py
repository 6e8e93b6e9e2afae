"""`make verify-nccl`: weights from one GPU to another, by NCCL and by CUDA IPC between peers. This process is the trainer on the
first GPU, vLLM's Python a worker on the second: every checksum, seconds as JSON, and what is left when the worker is killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from bridge.client import cuda
from bridge.client.transports.cuda_ipc import CudaIpc
from bridge.client.transports.nccl import Nccl
from bridge.client.weights import TensorSpec, Unit
from jaxrl.rollout.protocol import SamplerError

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VLLM_PYTHON", str(ROOT / ".vllm" / "bin" / "python"))
NUM_BYTES, NUM_UNITS, NUM_BUCKETS = 2**26, 8, 5

WORKER = """
import base64, json, sys, time
import torch
from jaxrl_bridge.checksum import checksums
from jaxrl_bridge.sources import Sources
sources = Sources(torch.device("cuda:1"))
torch.cuda.set_device(1)
for line in sys.stdin:
    name, body, shape = json.loads(line)
    began = time.monotonic()
    if name == "join":
        sources.join(base64.b64decode(body["unique_id"]), body["world_size"], 1)
        print(json.dumps("joined"), flush=True)
        continue
    num_units, num_words = shape
    specs = [{"name": str(i), "shape": [num_words], "dtype": "F32"} for i in range(num_units)]
    bucket = [{"name": str(i), "offset": 4 * num_words * i} for i in range(num_units)]
    tensors = [tensor.to("cuda:1", copy=name == "cuda_ipc") for tensor in sources.tensors(name, body, specs, bucket)]
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    print(json.dumps([seconds, [int(total) for total in checksums(tensors)]]), flush=True)
"""


def units(bucket: int) -> list[Unit]:
    spec = TensorSpec("x", (NUM_BYTES // 4,), "float32")
    odd = 2 * jnp.arange(NUM_BYTES // 4, dtype=jnp.uint32) + 1
    values = [jnp.arange(NUM_BYTES // 4, dtype=jnp.uint32) * (2 * i + 3) + bucket for i in range(NUM_UNITS)]
    return [Unit((spec,), (0,), words, jnp.sum(odd * words, dtype=jnp.uint32)[None]) for words in values]


def main() -> None:
    if jax.default_backend() != "gpu" or cuda.call("cudaGetDeviceCount") < 2:
        sys.exit("verify-nccl needs two GPUs of one host; here it has proved nothing")
    if not Path(PYTHON).exists():
        sys.exit(f"{PYTHON} does not exist: make vllm-env VLLM=gpu, or name vLLM's Python in VLLM_PYTHON")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "bridge" / "server")}
    worker = subprocess.Popen(
        [PYTHON, "-P", "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )

    def tell(*line) -> None:
        worker.stdin.write(json.dumps(line) + "\n")
        worker.stdin.flush()

    total = NUM_UNITS * NUM_BYTES
    transports = [Nccl(1)] + [CudaIpc()] * cuda.are_peers(1, 0)
    for transport in transports:
        transport.begin(total, NUM_BYTES)
        if isinstance(transport, Nccl):
            tell("join", transport.group, None)
            transport.meet()
            assert json.loads(worker.stdout.readline()) == "joined"
        for bucket in range(NUM_BUCKETS):
            sent = units(bucket)
            jax.block_until_ready([unit.words for unit in sent])
            tell(transport.name, transport.put(bucket, sent, "id"), [NUM_UNITS, NUM_BYTES // 4])
            if isinstance(transport, Nccl):
                transport.meet()
            seconds, checksums = json.loads(worker.stdout.readline())
            assert checksums == [int(unit.checksums[0]) for unit in sent], f"{transport.name}: bucket {bucket} arrived damaged"
            print(json.dumps({"transport": transport.name, "bytes": total, "gigabytes_per_second": total / seconds / 1e9}))
    worker.kill()
    worker.wait()
    transports[0].put(0, units(0), "id")
    began = time.monotonic()
    try:
        transports[0].meet()
        sys.exit("a broadcast to a worker that was killed went through")
    except SamplerError as error:
        print(json.dumps({"killed": str(error), "seconds": time.monotonic() - began}))
    for transport in transports:
        transport.close()
    print("all checksums right, and a killed worker was told")


if __name__ == "__main__":
    main()
