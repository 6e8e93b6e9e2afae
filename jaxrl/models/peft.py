"""PEFT adapter folders in and out (adapter_config.json, adapter_model.safetensors), and adapters merged into their base."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxrl.config import ConfigError, LoraConfig
from jaxrl.models.architecture import Architecture
from jaxrl.models.lora import TARGETS, scaling
from jaxrl.models.names import ParameterName, parameter_names
from jaxrl.models.safetensors_files import CheckpointFileError, TensorFiles
from jaxrl.models.stacking import at, put, read_parameter, tensor_value

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Keys of an adapter's config that plain LoRA has or that do not change what a trained adapter computes. Any other key
# with a value stands for a variant of LoRA, so that a new variant is refused without this list knowing it.
_KNOWN = {
    *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_pattern", "init_lora_weights", "bias"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "megatron_config", "qalora_group_size"),
    *("ensure_weight_tying", "runtime_config"),
}
_INITS = (True, False, "gaussian", "eva", "orthogonal")  # the others change the base weights as well


def adapter_names(architecture: Architecture, config: LoraConfig) -> tuple[ParameterName, ...]:
    """Every factor of the adapters, by its path under "lora", with the name and shape PEFT stores it in."""
    names = []
    for name in parameter_names(architecture):
        *module, parameter = name.path
        if parameter == "kernel" and module[-1] in config.targets:
            prefix = "base_model.model." + name.tensor.removesuffix("weight")
            features_out, features_in = name.shape
            names.append(ParameterName((*module, "lora_a"), prefix + "lora_A.weight", (config.rank, features_in), True))
            names.append(ParameterName((*module, "lora_b"), prefix + "lora_B.weight", (features_out, config.rank), True))
    return tuple(names)


def read_adapter_config(folder: str | Path) -> LoraConfig:
    """Rank, alpha and targets of the adapter in FOLDER. The targets are those its tensors show: PEFT's own field may
    be a pattern.

    Raises CheckpointFileError naming the file, and the key that asks for more than plain LoRA.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise CheckpointFileError(f"no such file: {folder / CONFIG}")
    try:
        fields = json.loads((folder / CONFIG).read_text())
        kind, rank, alpha = fields["peft_type"], fields["r"], fields["lora_alpha"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointFileError(f"{folder / CONFIG} is not the config of a LoRA adapter: {error!r}") from None
    if kind != "LORA":
        raise CheckpointFileError(f"{folder / CONFIG}: peft_type {kind!r} is not implemented: LORA is")
    odd = {key for key, value in fields.items() if value and key not in _KNOWN}
    odd |= {
        key for key, plain in (("bias", ("none",)), ("init_lora_weights", _INITS)) if fields.get(key, plain[0]) not in plain
    }
    if odd:
        raise CheckpointFileError(
            f"{folder / CONFIG}: {', '.join(f'{k} = {fields[k]!r}' for k in sorted(odd))} is not implemented"
        )
    with TensorFiles([folder / WEIGHTS]) as files:
        present = {tensor.split(".")[-3] for tensor in files.shapes if tensor.count(".") > 2}
    targets = tuple(target for target in TARGETS if target in present)
    return LoraConfig(rank=rank, alpha=alpha, targets=targets, adapter=str(folder))


def load_adapter(folder: str | Path, architecture: Architecture, config: LoraConfig, shardings, param_dtype):
    """The adapter in FOLDER in the form of a scanned decoder: what goes under "lora".

    shardings: a tree of Sharding like the result (`decoder.shardings(...)["lora"]`); None: the default device.
    Raises ConfigError if `config` asks for another rank, alpha or other targets, and CheckpointFileError naming the
    tensor and the file for anything missing, extra or mis-shaped.
    """
    folder = Path(folder)
    stored = read_adapter_config(folder)
    for key in ("rank", "alpha", "targets"):
        want, have = getattr(config, key), getattr(stored, key)
        if (set(want) != set(have)) if key == "targets" else want != have:
            raise ConfigError(
                f"model.lora.{key}", f"{want!r}, but the adapter in {folder} has {have!r}: use that, or another adapter"
            )
    names = adapter_names(architecture, config)
    adapters: dict = {}
    with TensorFiles([folder / WEIGHTS]) as files:
        files.check({tensor: name.shape for name in names for tensor in name.tensors(architecture.num_layers)})
        for name in names:
            sharding = at(shardings, name.path) if shardings is not None else None
            put(adapters, name.path, read_parameter(files, name, architecture.num_layers, sharding, jnp.dtype(param_dtype)))
    return adapters


def save_adapter(
    folder: str | Path,
    adapters,
    architecture: Architecture,
    config: LoraConfig,
    base_model: str | None = None,
    dtype=np.float32,
) -> None:
    """Writes adapters (in the form of a scanned decoder) to FOLDER as PEFT does. base_model: the name or folder of the
    model they belong to. Raises CheckpointFileError if FOLDER already holds an adapter."""
    folder = Path(folder)
    if (folder / WEIGHTS).exists():
        raise CheckpointFileError(f"{folder} already holds an adapter: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        name.tensor.format(layer=i): tensor_value(adapters, name, i).astype(jnp.dtype(dtype))
        for name in adapter_names(architecture, config)
        for i in range(architecture.num_layers)
    }
    save_file(values, folder / WEIGHTS, metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(config.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")


def merge_lora(variables, config: LoraConfig | None):
    """The parameters of a decoder without adapters that computes the same: W + alpha / rank · A B. Scanned or unrolled;
    jit-able. The update is added in at least float32 and the sum cast to W's dtype."""
    if config is None:
        return variables["params"]

    def merge(params, adapters):
        if "lora_a" not in adapters:
            return {key: merge(value, adapters[key]) if key in adapters else value for key, value in params.items()}
        kernel = params["kernel"]
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        a, b = adapters["lora_a"].astype(wide), adapters["lora_b"].astype(wide)
        update = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST) * scaling(config)
        return params | {"kernel": (kernel.astype(wide) + update).astype(kernel.dtype)}

    return merge(variables["params"], variables["lora"])
