"""The decoder: a Flax Linen module of Llama's shape that leaves attention to its caller.

`attend` is where packed trees, a paged KV cache or a dense mask come in; everything else is the same for training
and sampling. Shape letters: B batch (rows), T tokens, E hidden size, H query heads, Hkv key heads, D head size,
L layers, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config import ConfigError, LoraConfig
from jaxrl.mesh import LOGICAL_RULES
from jaxrl.models.architecture import Architecture
from jaxrl.models.lora import Linear, check_targets
from jaxrl.models.rope import rotate, rotation

# (q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,D], cache of the layer) -> (out [B,T,H,D], cache of the layer).
# q and k are normed and rotated; the scale Architecture.attention_scale is applied inside.
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


class RMSNorm(nn.Module):
    """x / rms(x) · scale over the last dimension, computed in at least float32 and returned in x's dtype."""

    eps: float
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        ones = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = self.param("scale", ones, (x.shape[-1],), self.param_dtype)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normed * scale.astype(wide.dtype)).astype(x.dtype)


class Weight(nn.Module):
    """One matrix under a name of its own: the embedding table, the output head."""

    name_of_param: str
    shape: tuple[int, int]
    axes: tuple[str, str]
    initializer_range: float
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self):
        normal = nn.with_logical_partitioning(nn.initializers.normal(self.initializer_range), self.axes)
        return self.param(self.name_of_param, normal, self.shape, self.param_dtype)


class _Block(nn.Module):
    """What attention and MLP share: how they make their linear layers."""

    architecture: Architecture
    dtype: jnp.dtype
    param_dtype: jnp.dtype
    lora: LoraConfig | None

    def linear(self, name: str, features: int, axes: tuple[str, str], use_bias: bool) -> Linear:
        lora = self.lora if self.lora is not None and name in self.lora.targets else None
        std = self.architecture.initializer_range
        return Linear(features, axes, self.dtype, self.param_dtype, std, use_bias, lora, name=name)


class Attention(_Block):
    @nn.compact
    def __call__(self, x_BTE, cos, sin, attend: Attend, cache):
        arch = self.architecture
        batch = x_BTE.shape[:2]
        q = self.linear("q_proj", arch.num_heads * arch.head_dim, ("embed", "heads"), arch.qkv_bias)(x_BTE)
        k = self.linear("k_proj", arch.num_kv_heads * arch.head_dim, ("embed", "kv_heads"), arch.qkv_bias)(x_BTE)
        v = self.linear("v_proj", arch.num_kv_heads * arch.head_dim, ("embed", "kv_heads"), arch.qkv_bias)(x_BTE)
        q, k, v = (y.reshape(*batch, -1, arch.head_dim) for y in (q, k, v))
        if arch.qk_norm:
            q = RMSNorm(arch.norm_eps, self.param_dtype, name="q_norm")(q)
            k = RMSNorm(arch.norm_eps, self.param_dtype, name="k_norm")(k)
        out, cache = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, cache)
        out = out.reshape(*batch, arch.num_heads * arch.head_dim)
        return self.linear("o_proj", arch.hidden_size, ("heads", "embed"), arch.o_bias)(out), cache


class MLP(_Block):
    @nn.compact
    def __call__(self, x_BTE):
        arch = self.architecture
        gate = self.linear("gate_proj", arch.intermediate_size, ("embed", "mlp"), arch.mlp_bias)(x_BTE)
        up = self.linear("up_proj", arch.intermediate_size, ("embed", "mlp"), arch.mlp_bias)(x_BTE)
        return self.linear("down_proj", arch.hidden_size, ("mlp", "embed"), arch.mlp_bias)(nn.silu(gate) * up)


class Layer(nn.Module):
    architecture: Architecture
    dtype: jnp.dtype
    param_dtype: jnp.dtype
    lora: LoraConfig | None
    mesh: Mesh | None
    attend: Attend

    @nn.compact
    def __call__(self, x_BTE, rotations, cache):
        arch = self.architecture
        block = (arch, self.dtype, self.param_dtype, self.lora)
        normed = RMSNorm(arch.norm_eps, self.param_dtype, name="input_layernorm")(x_BTE)
        update, cache = Attention(*block, name="self_attn")(normed, *rotations, self.attend, cache)
        x_BTE = _constrain(x_BTE + update, self.mesh)
        normed = RMSNorm(arch.norm_eps, self.param_dtype, name="post_attention_layernorm")(x_BTE)
        return _constrain(x_BTE + MLP(*block, name="mlp")(normed), self.mesh), cache


class Decoder(nn.Module):
    """Token ids to final hidden states; the head is applied by the caller, to the positions it needs.

    Variables: {"params": base} or {"params": base, "lora": adapters}. With `scan_layers` the parameters of all layers
    lie under "layers", stacked on axis 0; without, under "layers_0", "layers_1", ... (`unstack_layers` converts).
    `remat` is what a layer keeps for its backward pass: "none" keeps everything, "dots" its linear layers' outputs,
    "full" its input. With `mesh`, hidden states are constrained to rows over data × fsdp and tokens over context.
    """

    architecture: Architecture
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32
    remat: Literal["none", "dots", "full"] = "none"
    lora: LoraConfig | None = None
    scan_layers: bool = True
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, tokens, positions, attend: Attend, cache: Any = None) -> tuple[jax.Array, Any]:
        """tokens, positions: int32 [B, T]. cache: None, or a pytree whose leaves lead with a layer axis; without
        `scan_layers` also a list of one pytree per layer, which then never has to be stacked again. The embedding
        of an id beyond the vocabulary is NaN.

        Returns the hidden states after the final norm, [B, T, E] in `dtype`, and the cache in the form it came in.
        """
        arch = self.architecture
        if self.lora is not None:
            check_targets(self.lora)
        table = self._weight("embed_tokens", "embedding", (arch.vocab_size, arch.hidden_size), ("vocab", "embed"))
        if not arch.tie_embeddings:  # made here so that it is one of the parameters; `head_matrix` reads it
            self._weight("lm_head", "kernel", (arch.hidden_size, arch.vocab_size), ("embed", "vocab"))
        x_BTE = _constrain(jnp.take(table, tokens, axis=0).astype(self.dtype), self.mesh)
        rotations = rotation(positions, arch.rope, arch.head_dim, self.dtype)
        layer = self._layer_class()
        fields = (arch, self.dtype, self.param_dtype, self.lora, self.mesh, attend)
        if self.scan_layers:
            scanned = nn.scan(
                layer,
                variable_axes={"params": 0, "lora": 0},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, 0),
                out_axes=0,
                length=arch.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x_BTE, cache = scanned(*fields, name="layers")(x_BTE, rotations, cache)
        else:
            is_list = isinstance(cache, list)
            caches = []
            for i in range(arch.num_layers):
                own = cache[i] if is_list else jax.tree.map(lambda leaf, i=i: leaf[i], cache)
                x_BTE, own = layer(*fields, name=f"layers_{i}")(x_BTE, rotations, own)
                caches.append(own)
            cache = caches if is_list else jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
        return RMSNorm(arch.norm_eps, self.param_dtype, name="norm")(x_BTE), cache

    def _weight(self, name: str, param: str, shape: tuple[int, int], axes: tuple[str, str]):
        return Weight(param, shape, axes, self.architecture.initializer_range, self.param_dtype, name=name)()

    def _layer_class(self):
        if self.remat == "none":
            return Layer
        policies = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}
        # The body of a scan is compiled once, so nothing can be merged with its own recomputation there.
        return nn.remat(Layer, prevent_cse=not self.scan_layers, policy=policies[self.remat])


def _constrain(x_BTE, mesh: Mesh | None):
    if mesh is None:
        return x_BTE
    rules = dict(LOGICAL_RULES)
    return jax.lax.with_sharding_constraint(x_BTE, NamedSharding(mesh, PartitionSpec(rules["rows"], rules["tokens"], None)))


def _boxed_variables(decoder: Decoder):
    """Shapes and dtypes of the variables, each boxed with the logical names of its dimensions."""
    return jax.eval_shape(lambda key: _init(decoder, key), jax.eval_shape(lambda: jax.random.key(0)))


def _init(decoder: Decoder, key):
    tokens = jnp.zeros((1, 1), jnp.int32)
    return decoder.clone(mesh=None).init(key, tokens, tokens, lambda q, k, v, cache: (q, cache))


def logical_axes(decoder: Decoder):
    """A PartitionSpec of logical names for every variable, in the tree of the variables."""
    return nn.get_partition_spec(_boxed_variables(decoder))


def abstract_variables(decoder: Decoder):
    """A ShapeDtypeStruct for every variable."""
    return nn.unbox(_boxed_variables(decoder))


def shardings(decoder: Decoder, mesh: Mesh):
    """A NamedSharding for every variable, from its logical names and LOGICAL_RULES.

    Raises ConfigError naming the mesh axis and the parameter if a dimension does not split evenly.
    """
    rules = dict(LOGICAL_RULES)

    def place(path, names, leaf):
        axes = tuple(rules[name] for name in names)
        for size, axis in zip(leaf.shape, axes, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ConfigError(
                    f"mesh.{axis}",
                    f"{mesh.shape[axis]} does not divide {where} of shape {leaf.shape}: choose a divisor of {size}",
                )
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(
        place, logical_axes(decoder), abstract_variables(decoder), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def init_variables(decoder: Decoder, key, mesh: Mesh | None):
    """Random variables, each made where its shards live. The values do not depend on the mesh."""
    placed = None if mesh is None else shardings(decoder, mesh)
    return jax.jit(lambda key: nn.unbox(_init(decoder, key)), out_shardings=placed)(key)


def unstack_layers(variables):
    """The variables of a scanned decoder in the form of an unrolled one: "layers" becomes "layers_0", .... Jit-able."""

    def unstack(tree):
        rest = {name: value for name, value in tree.items() if name != "layers"}
        num_layers = jax.tree.leaves(tree["layers"])[0].shape[0]
        return rest | {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"]) for i in range(num_layers)}

    return {collection: unstack(tree) for collection, tree in variables.items()}


def head_matrix(params, architecture: Architecture):
    """The [E, V] matrix that turns hidden states into logits: the embedding's transpose if tied."""
    matrix, vocab_major = stored_head(params, architecture)
    return matrix.T if vocab_major else matrix


def stored_head(params, architecture: Architecture) -> tuple[jax.Array, bool]:
    """That matrix as it lies in the parameters, and whether it is [V, E], which a tied embedding is."""
    tied = architecture.tie_embeddings
    return params["embed_tokens"]["embedding"] if tied else params["lm_head"]["kernel"], tied
