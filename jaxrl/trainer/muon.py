"""Muon (Jordan et al., 2024) on the matrices of scanned layers: each layer's momentum made orthogonal, layers dealt out to devices.

Under fsdp every matrix is cut, and its Newton–Schulz steps would be collectives that all devices take part in. Here a stack
[L, in, out] is moved so that each device holds whole layers, and the result is moved back: no device repeats
another's work, and none has more than ⌈L / devices⌉ layers. The momentum stays where its parameters are, so a
checkpoint does not depend on the mesh.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

# Makes an update's root mean square that of AdamW, so that both take one learning rate (Liu et al., arXiv:2502.16982).
_RMS = 0.2


def muon(
    schedule: optax.Schedule, momentum: float, weight_decay: float, mesh: Mesh | None
) -> optax.GradientTransformationExtraArgs:
    """Nesterov momentum, orthogonalised, scaled by 0.2 √max(in, out), with decoupled decay. Leaves are [in, out] or stacks
    [L, in, out]."""
    return optax.chain(
        optax.trace(momentum, nesterov=True),
        optax.stateless(lambda updates, _: jax.tree.map(lambda x: _orthogonal(x, mesh), updates)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _orthogonal(stack: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Every matrix M = U S Vᵀ of the stack to about U Vᵀ, scaled."""
    num_devices = 1 if mesh is None else mesh.size
    moved = stack
    if stack.ndim == 3 and num_devices > 1:
        padding = -len(stack) % num_devices  # matrices of zeros stay zero
        moved = jnp.pad(stack, [(0, padding), (0, 0), (0, 0)])
        moved = jax.lax.with_sharding_constraint(moved, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    # Without momentum of its own Optax's transformation is its Newton–Schulz iteration alone.
    newton_schulz = scale_by_muon(beta=0.0, weight_dimension_numbers=MuonDimensionNumbers(-2, -1))
    result, _ = newton_schulz.update(moved, newton_schulz.init(moved))
    if moved is not stack:
        # Whole on its device until the last step, or the compiler would cut the matrices again.
        result = jax.lax.with_sharding_constraint(result, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    scale = _RMS * max(stack.shape[-2:]) ** 0.5
    return scale * result[: len(stack)]
