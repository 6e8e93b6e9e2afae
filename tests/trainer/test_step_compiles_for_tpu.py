"""The whole optimizer step, compiled for a slice of TPUs that is not there."""

import jax
import pytest
from forest import make_architecture, make_config, make_forest
from tpu_topology import needs_libtpu, slice_devices, uncached

from jaxrl.config import MeshConfig
from jaxrl.mesh import make_mesh, row_sharding
from jaxrl.models.decoder import abstract_variables, shardings
from jaxrl.packing import RowLimits, pack
from jaxrl.trainer.placement import place_rows
from jaxrl.trainer.step import make_trainer

T = 1024


def placed_like(shapes, placements):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, placements)


def compiled_results(function, *arguments):
    """(what the function gives, as shapes with their shardings; its program), compiled for the arguments' devices."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return placed_like(jax.eval_shape(function, *arguments), compiled.output_shardings), compiled.as_text()


@needs_libtpu
@pytest.mark.parametrize(
    ("layout", "kernels"),
    [
        (
            {"context": 2, "tensor": 2},
            {"tree_attention_forward", "tree_attention_backward_queries", "tree_attention_backward_keys"},
        ),
        ({"context": 4}, {"head_forward", "head_logits_gradient"}),
    ],
    ids=["every axis", "whole vocabulary"],
)
def test_the_step_compiles_for_a_slice(layout, kernels):
    config = make_config(
        packing={"row_length": T, "rows": 4, "reads": 64, "terms": 64}, model={"dtype": "bfloat16", "param_dtype": "float32"}
    )
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, **layout), slice_devices("v5p:2x2x4"))
    trainer = make_trainer(config, make_architecture(), mesh)
    update = trainer._reinforce
    variables = placed_like(abstract_variables(trainer.decoder), shardings(trainer.decoder, mesh))
    batch = pack(make_forest(), RowLimits.from_config(config.packing), config.packing.rows)[0][0]
    by_token, by_row = row_sharding(mesh, tokens=True), row_sharding(mesh, tokens=False)
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_token if x.shape[1] == T else by_row),
        place_rows(batch, mesh.shape["context"]),
    )
    with uncached():
        state, _ = compiled_results(trainer.init, variables)
        totals, _ = compiled_results(update.zero)
        added, program = compiled_results(update.accumulate, state, totals, rows, {})
        (updated, _), _ = compiled_results(update.apply, state, added)
    assert all(kernel in program for kernel in kernels)
    for before, after in ((totals, added), (state, updated)):
        for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
