"""Eight CPU devices for every test, quick compilation, a compilation cache that outlives the run, and the compiler for TPUs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parent.parent / ".tools" / "libtpu"))  # for these tests alone: see bootstrap.sh

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # XLA's later passes: a quarter of the time, and no other results
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture
def optimized() -> Iterator[None]:
    """With all of XLA's passes, for tests of what they make."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-vllm` runs tests/vllm: they need vLLM's environment, and servers that take a minute to start."""
    if collection_path == Path(__file__).parent / "vllm" and not any("vllm" in argument for argument in config.args):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests take longest first, so that processes side by side end together."""
    items.sort(key=lambda item: item.path.parent.name not in ("resume", "pipeline"))
