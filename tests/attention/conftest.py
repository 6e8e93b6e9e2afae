"""What several modules of this folder use."""

import jax
import pytest


@pytest.fixture
def quick_compilation():
    """Without XLA's later passes, which change no result here and take a third to a half of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
