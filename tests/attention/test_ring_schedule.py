"""The ring as XLA compiles it for a TPU slice: every transfer lies beside a call of the kernel."""

import re
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tpu_topology import needs_libtpu, slice_devices, uncached

from jaxrl.attention import tree_attention
from jaxrl.config import AttentionConfig, MeshConfig
from jaxrl.mesh import ROW_AXES, make_mesh, row_sharding

START, DONE, KERNEL = "S", "D", "K"


def loop_schedules(text):
    """[(event, transfer)] in the order in which they run, for each loop's body with transfers in a scheduled HLO
    module. A call of the kernel is a Mosaic kernel or, in plain JAX, a loop."""
    assert "is_scheduled=true" in text.partition("\n")[0]
    bodies = set(re.findall(r" while\(.*?body=(%[\w.-]+)", text))
    found = []
    for name, lines in re.findall(r"^(%[\w.-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S):
        events = []
        for line in lines.splitlines():
            if match := re.match(r"\s+(%[\w.-]+) = .* collective-permute-start\(", line):
                events.append((START, match[1]))
            elif match := re.search(r" collective-permute-done\((%[\w.-]+)\)", line):
                events.append((DONE, match[1]))
            elif " while(" in line or 'custom_call_target="tpu_custom_call"' in line:
                events.append((KERNEL, ""))
        if name in bodies and any(event == START for event, _ in events):
            found.append(events)
    return found


def is_hidden(transfer, events):
    start, done = events.index((START, transfer)), events.index((DONE, transfer))
    return any(event == KERNEL for event, _ in events[start:done])


@needs_libtpu
def test_every_transfer_hides_behind_the_kernel():
    """Forward: keys and values, half each way. Backward: their gradients too."""
    mesh = make_mesh(MeshConfig(context=8), slice_devices("v5p:2x2x2"))
    num_tokens = 8 * 2048
    heads = NamedSharding(mesh, PartitionSpec(ROW_AXES, "context", "tensor"))
    q, kv = (jax.ShapeDtypeStruct((1, num_tokens, n, 128), jnp.bfloat16, sharding=heads) for n in (2, 1))
    offset = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32, sharding=row_sharding(mesh, tokens=True))
    attention = partial(tree_attention, scale=0.1, config=AttentionConfig(), mesh=mesh)

    def loss(q, k, v, offset, end):
        return jnp.square(attention(q, k, v, offset, end).astype(jnp.float32)).sum()

    with uncached():
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, kv, kv, offset, offset).compile()
    loops = loop_schedules(compiled.as_text())
    transfers = [[name for event, name in events if event == START] for events in loops]
    assert sorted(map(len, transfers)) == [2, 4], "a forward and a backward ring, two ways each"
    for names, events in zip(transfers, loops, strict=True):
        assert all(is_hidden(name, events) for name in names), "".join(event for event, _ in events)
