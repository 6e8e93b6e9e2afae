"""Compiles every shipped Triton configuration for sm_90, without a GPU, and prints registers and spills as JSON lines.

A program of its own: the tests beside it interpret the kernels, which is decided when they are defined.
"""

import json
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triton_kernels import tree_attention_kernels as kernels
from triton_kernels.tree_attention import DTYPES, Tile, default_tiles

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
TENSORS = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "d_out_ptr", "dq_ptr", "dk_ptr", "dv_ptr")


def configurations():
    """(kernel name, dtype, head size as compiled, tile)."""
    for dtype in DTYPES:
        for head_dim in (64, 128, 256):  # 96 runs as 128
            tiles = default_tiles(head_dim, dtype)
            for name, tile in (("forward_kernel", tiles.forward), ("dq_kernel", tiles.dq), ("dkdv_kernel", tiles.dkdv)):
                yield name, dtype, head_dim, tile


def compile_one(configuration: tuple[str, str, int, Tile]) -> dict:
    name, dtype, head_dim, tile = configuration
    kernel = getattr(kernels, name)
    constants = {"NUM_ROWS": 1, "TQ": 40_960, "TK": 40_960, "H": 32, "HKV": 4, "D": head_dim, "M": tile.queries, "N": tile.keys}
    constants |= {"WINDOW": 0, "PRECISION": "tf32x3" if dtype == "float32" else "tf32"}
    signature, given, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], given[(i,)] = "constexpr", constants[argument]
        elif argument.startswith("scale"):
            signature[argument] = "fp32"
        else:
            floats = "fp32" if argument in ("lse_ptr", "delta_ptr") else "i32"
            signature[argument] = "*" + (SHORT[dtype] if argument in TENSORS else floats)
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = triton.compile(
        ASTSource(kernel, signature, given, attributes), target=GPUTarget("cuda", 90, 32), options=options
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        command = [PTXAS, "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "kernel": name,
        "dtype": dtype,
        "head_dim": head_dim,
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", report)[1]),
        "shared_bytes": compiled.metadata.shared,
    }


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        for result in pool.map(compile_one, configurations()):
            print(json.dumps(result), flush=True)
