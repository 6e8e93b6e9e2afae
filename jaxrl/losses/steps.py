"""All terms of an optimizer step at once, without gradient: where a loss gets sums that cross rows and microbatches.

A loss that needs such sums is cut in two: `coefficients(step, config)` makes values per term of the whole step from a
pass without gradient; `value` then sees those of its own row as `Aligned.coefficients`, and is a sum over terms like any
other. Letters: N terms of the step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.losses.aligned import Aligned


class StepTerms(NamedTuple):
    """The terms of every row of every microbatch, in any order."""

    terms: Aligned  # arrays [N]; no coefficients
    episode: jax.Array  # [N] int32, step-wide; arbitrary in unused slots
    group: jax.Array  # [N] int32
    num: int  # no id is as large

    def episode_sum(self, x: jax.Array) -> jax.Array:
        """Σ x over the terms of the episode, at each of its terms, [N]."""
        return self._sum(x, self.episode)

    def group_sum(self, x: jax.Array) -> jax.Array:
        """Σ x over the terms of the group, at each of its terms, [N]."""
        return self._sum(x, self.group)

    def episode_min(self, x: jax.Array) -> jax.Array:
        """The least x of the episode, at each of its terms, [N]; 0 in unused slots."""
        ids = jnp.where(self.terms.used, self.episode, self.num)
        least = jax.ops.segment_min(x, ids, self.num + 1)[ids]
        return jnp.where(self.terms.used, least, 0)

    def _sum(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        ids = jnp.where(self.terms.used, ids, self.num)
        return jax.ops.segment_sum(jnp.where(self.terms.used, x, 0), ids, self.num + 1)[ids]
