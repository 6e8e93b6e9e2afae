"""Decode attention on a CPU: a C++ kernel, compiled where it runs, behind XLA's foreign function interface.

It computes what `attention.paged_attention` does for one query per row, in float32, without copying pages first. The
compiled library is kept in the user's cache folder, one per source, compiler, kind of CPU and head shape. Without
a C++ compiler the sampler uses the XLA version and says so once.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cc")
# Sums may be reassociated, or nothing is vectorised; NaN and infinity keep their meaning.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-w")
_MATH_FLAGS = ("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
_COMPILE_SECONDS = 120.0

# (q [N, H, D], k_pages [pages, G, S, D], v_pages, tables [N, P] int32, position [N] int32, scale) -> [N, H, D]
Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, float], jax.Array]


@functools.cache
def load_kernel(num_queries: int, head_dim: int) -> Kernel | None:
    """The kernel for num_queries query heads per key head, or None if it cannot be compiled here."""
    try:
        library = ctypes.CDLL(str(_compiled(num_queries, head_dim)))
    except (OSError, subprocess.SubprocessError) as error:
        cause = getattr(error, "stderr", None) or str(error)
        log.warning("decoding uses XLA's slower attention on this CPU: %s; a C++ compiler (g++ or clang++) mends it", cause)
        return None
    name = f"jaxrl_paged_attention_{num_queries}_{head_dim}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.PagedAttention), platform="cpu")

    def attend(q, k_pages, v_pages, tables, position, scale):
        call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, jnp.float32))
        return call(q, k_pages, v_pages, tables, position, scale=np.float32(scale))

    return attend


def _compiled(num_queries: int, head_dim: int) -> Path:
    """The shared library, compiled unless the cache has it. Raises OSError or SubprocessError."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler on the PATH")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS)
    shape = (f"-DQUERIES={num_queries}", f"-DHEAD_DIM={head_dim}")
    command = [compiler, *_FLAGS, *_MATH_FLAGS, *shape, "-I", jax.ffi.include_dir(), str(_SOURCE)]
    identity = (_SOURCE.read_text(), version.stdout, jax.lib.__version__, _cpu(), *_FLAGS, *_MATH_FLAGS, *shape)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl"
    library = cache / f"cpu_attention_{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}.so"
    if not library.exists():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:  # complete or absent, also when two processes compile it
            built = Path(scratch) / library.name
            subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS)
            built.replace(library)
    return library


def _cpu() -> str:
    """What -march=native depends on: a cache folder can be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
