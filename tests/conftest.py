"""Eight CPU devices for every test, a compilation cache that outlives the run, and the compiler for TPUs."""

import sys
from pathlib import Path

import jax

sys.path.append(str(Path(__file__).parent.parent / ".tools" / "libtpu"))  # for these tests alone: see bootstrap.sh

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
