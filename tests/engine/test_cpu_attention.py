"""The compiled decode kernel against the XLA version, which the engine's other tests hold to a full forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.engine.attention import paged_attention
from jaxrl.engine.cpu_attention import load_kernel


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_size"), [(9, 3, 64, 16), (4, 4, 8, 5), (7, 1, 96, 48)])
def test_equals_the_xla_version(heads, kv_heads, head_dim, page_size):
    rng = np.random.default_rng(0)
    position = np.array([0, 1, page_size - 1, page_size, 62, 63, 64, 65, 128], np.int32)
    num_rows, width = len(position), -(-129 // page_size)
    shape = (num_rows * width + 1, kv_heads, page_size, head_dim)
    k, v = rng.standard_normal((2, *shape)).astype(np.float32)
    tables = (1 + rng.permutation(num_rows * width)).reshape(num_rows, width).astype(np.int32)
    q = rng.standard_normal((num_rows, heads, head_dim)).astype(np.float32)
    expected = paged_attention(
        q[:, None], jnp.asarray(k), jnp.asarray(v), tables, position[:, None], 1, scale=0.3, block_pages=width
    )
    for row, last in enumerate(position):  # poison what no query may see
        for page, number in enumerate(tables[row]):
            seen = np.clip(last + 1 - page * page_size, 0, page_size)
            k[number, :, seen:] = v[number, :, seen:] = np.nan
    kernel = jax.jit(load_kernel(heads // kv_heads, head_dim), static_argnums=5)
    actual = kernel(q, k, v, tables, position, 0.3)
    np.testing.assert_allclose(actual, expected[:, 0], rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(actual[3:5], kernel(q[3:5], k, v, tables[3:5], position[3:5], 0.3))  # rows are alone

    q[2, 0, 0] = np.nan
    assert np.isnan(kernel(q, k, v, tables, position, 0.3)[2, 0]).all()


def test_without_a_compiler_there_is_no_kernel_and_a_word_why(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    assert load_kernel(1, 24) is None
    assert "no C++ compiler on the PATH" in caplog.text


def test_a_compiler_that_fails_is_quoted(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "no such header" >&2; exit 1; }\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_kernel(1, 40) is None
    assert "no such header" in caplog.text
