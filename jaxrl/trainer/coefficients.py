"""The pass without gradient of a loss that sums across rows: the terms of every microbatch, then the coefficients of all.

    measure:       rows of one microbatch -> its terms                                      (jitted)
    coefficients:  the terms of all microbatches -> coefficients per term of each           (jitted)

Letters: R rows of a microbatch, M loss terms of a row, B microbatches.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.data import PackedRows
from jaxrl.losses.aligned import Aligned
from jaxrl.losses.steps import StepTerms
from jaxrl.mesh import row_sharding
from jaxrl.trainer.placement import PlacedRows

Coefficients = dict[str, jax.Array]  # [R, M] each


class Measured(NamedTuple):
    """The terms of a microbatch and whose they are, [R, M]."""

    terms: Aligned
    episode: jax.Array  # int32, step-wide
    group: jax.Array


def measured(terms: Aligned, rows: PlacedRows) -> Measured:
    """`terms`: [R, M], without what no coefficient is made of."""
    slot = jnp.maximum(rows.terms.trajectory, 0)
    episode, group = (jnp.take_along_axis(ids, slot, axis=1) for ids in (rows.trajectories.episode, rows.trajectories.group))
    return Measured(terms._replace(entropy=None, candidate_logp=None, teacher_logp=None, is_candidate=None), episode, group)


def make_coefficients(
    solve: Callable[[StepTerms], Coefficients], mesh: Mesh
) -> Callable[[Sequence[Measured], Sequence[PackedRows]], list[Coefficients]]:
    """`solve` for a step of any number of microbatches: those, and the ids, are padded to powers of two, so that few sizes
    are ever compiled."""

    @partial(jax.jit, static_argnums=1, out_shardings=row_sharding(mesh, tokens=False))
    def flat(parts: tuple[Measured, ...], num: int) -> list[Coefficients]:
        shape = parts[0].episode.shape
        whole = jax.tree.map(lambda *x: jnp.concatenate([part.reshape(-1) for part in x]), *parts)
        solved = solve(StepTerms(whole.terms, whole.episode, whole.group, num))
        split = {name: x.reshape(len(parts), *shape) for name, x in solved.items()}
        return [{name: x[i] for name, x in split.items()} for i in range(len(parts))]

    def coefficients(parts: Sequence[Measured], batches: Sequence[PackedRows]) -> list[Coefficients]:
        largest = max(int(max(np.max(b.trajectories.episode), np.max(b.trajectories.group))) for b in batches)
        unused = jax.tree.map(jnp.zeros_like, parts[0])
        padded = (*parts, *[unused] * (_power_of_two(len(parts)) - len(parts)))
        return flat(padded, _power_of_two(largest + 1))[: len(parts)]

    return coefficients


def _power_of_two(n: int) -> int:
    """The least one ≥ n ≥ 0."""
    return 1 << max(n - 1, 0).bit_length()
