"""Results over parts of the keys, joined, are those over all of them; a sink is one more logit."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.attention.merge import apply_sink, merge
from jaxrl.attention.naive import naive_attention


def test_parts_of_the_keys_merge_exactly():
    """Some queries see keys of one part only, some of none: no NaN comes of it."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(rng.standard_normal((1, 30, 2, 4))) for _ in range(3))
        offset = jnp.asarray(rng.permutation(30))[None]
        end = jnp.minimum(offset + 9, 30)
        end = jnp.where(offset % 5 == 0, 0, end)
        q_offset = jnp.where(offset < 4, -1, offset)

        def attend(keys):
            return naive_attention(q, k[:, keys], v[:, keys], q_offset, offset[:, keys], end[:, keys], scale=0.7)

        @jax.jit
        def whole_and_merged():
            got = jnp.zeros_like(q), jnp.full(q.shape[:3], -jnp.inf)
            for keys in (slice(0, 11), slice(11, 12), slice(12, 30)):
                got = merge(*got, *attend(keys))
            return attend(slice(None)), got

        want, got = whole_and_merged()
        assert np.isneginf(want[1]).any() and not np.isneginf(want[1]).all()
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_a_sink_is_a_logit_in_the_softmax():
    """Output and every gradient, the sink's too, against a softmax that has it among its scores."""
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(rng.standard_normal((2, 20, n, 4))) for n in (4, 2, 2))
        sink = jnp.asarray(rng.standard_normal(4)) + jnp.array([0, 50, -50, 2])
        offset = jnp.broadcast_to(jnp.arange(20), (2, 20))
        end = jnp.broadcast_to(jnp.where(jnp.arange(20) < 8, 20, 14), (2, 20))

        def by_merging(q, k, v, sink):
            return apply_sink(*naive_attention(q, k, v, offset, offset, end, scale=0.5), sink)

        def among_the_scores(q, k, v, sink):
            return naive_attention(q, k, v, offset, offset, end, scale=0.5, sink=sink)[0]

        weights = jnp.asarray(rng.standard_normal(q.shape))
        got, want = (
            jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) * weights).sum(), (0, 1, 2, 3)))(q, k, v, sink)
            for f in (by_merging, among_the_scores)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-15), got, want)
