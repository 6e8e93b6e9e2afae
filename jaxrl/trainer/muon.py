"""Muon (Jordan et al., 2024) on the matrices of scanned layers: each layer's momentum made orthogonal, layers dealt out to devices.

Under fsdp every matrix is cut, and its Newton–Schulz steps would be collectives that all devices take part in. Here a stack
[L, in, out] is moved so that each device holds whole layers, and the result is moved back: no device repeats
another's work, and none has more than ⌈L / devices⌉ layers. One mesh axis moves at a time, which is an all-to-all; all at once,
XLA would gather the stack on every device. The momentum stays where its parameters are, so a checkpoint does
not depend on the mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

# Makes an update's root mean square that of AdamW, so that both take one learning rate (Liu et al., arXiv:2502.16982).
_RMS = 0.2


def muon(
    schedule: optax.Schedule, momentum: float, weight_decay: float, placed: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Nesterov momentum, orthogonalised, scaled by 0.2 √max(in, out), with decoupled decay. Leaves are [in, out] or stacks
    [L, in, out]. `placed`: NamedShardings of at least these parameters, by the same paths; None: one device."""
    of_path = dict(jax.tree_util.tree_leaves_with_path(placed))
    return optax.chain(
        optax.trace(momentum, nesterov=True),
        optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(lambda p, x: _update(x, of_path.get(p)), updates)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _update(stack: jax.Array, placed: NamedSharding | None) -> jax.Array:
    scale = _RMS * max(stack.shape[-2:]) ** 0.5
    if placed is None or placed.mesh.size == 1 or stack.ndim == 2:
        return scale * _orthogonal(stack)
    route = _route(placed)
    padding = -len(stack) % placed.mesh.size  # matrices of zeros stay zero
    moved = jnp.pad(stack, [(0, padding), (0, 0), (0, 0)])
    for sharding in route:
        moved = jax.lax.with_sharding_constraint(moved, sharding)
    moved = _orthogonal(moved)
    for sharding in reversed(route):
        moved = jax.lax.with_sharding_constraint(moved, sharding)
    return scale * moved[: len(stack)]


def _orthogonal(stack: jax.Array) -> jax.Array:
    """Every matrix U S Vᵀ of the stack to about U Vᵀ: Optax's transformation, which without momentum of its own is the
    Newton–Schulz iteration alone."""
    newton_schulz = scale_by_muon(beta=0.0, weight_dimension_numbers=MuonDimensionNumbers(-2, -1))
    return newton_schulz.update(stack, newton_schulz.init(stack))[0]


def _route(placed: NamedSharding) -> list[NamedSharding]:
    """From [L, in, out] as its parameter lies to whole layers: the axes that cut the matrices, one after the other, then those
    over which it is replicated, all onto L."""
    mesh, (_, *cuts) = placed.mesh, (*placed.spec, None, None, None)[:3]
    specs, on_layers = [PartitionSpec(None, *cuts)], ()
    for dim in (0, 1):
        if cuts[dim] is not None:
            on_layers = (*on_layers, cuts[dim])
            cuts[dim] = None
            specs.append(PartitionSpec(on_layers, *cuts))
    replicated = tuple(axis for axis in mesh.axis_names if axis not in on_layers)
    specs.append(PartitionSpec((*on_layers, *replicated)))
    return [NamedSharding(mesh, spec) for spec in specs]
