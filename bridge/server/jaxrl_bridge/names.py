"""Which Hugging Face tensors a vLLM model is made of, and their shapes.

vLLM fuses tensors (q, k and v; gate and up; experts) and shards them; its layers keep the sizes they were asked for. The
names of what was fused come from the model's own tables.
"""

import dataclasses

import torch
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

Shape = tuple[int, ...] | None  # None: vLLM does not say


def expected_tensors(model: torch.nn.Module, tied_embeddings: bool, tensor_parallel: int) -> dict[str, Shape]:
    """Name → shape of every tensor that `model.load_weights` needs, after `mapper` has renamed it."""
    packed = getattr(model, "packed_modules_mapping", None) or {}
    expected: dict[str, Shape] = {}
    for module_name, layer in model.named_modules():
        name = module_name.replace(".base_layer", "")  # what a LoRA layer wraps
        if tied_embeddings and name.split(".")[-1] == "lm_head":
            continue
        # As the layers were before vLLM repacked them for its kernels; a bias is not repacked, and is not in vLLM's record.
        parameters = dict(layer.named_parameters(recurse=False)) | get_layerwise_info(layer).restore_metadata[0]
        for parameter, meta in parameters.items():
            if "lora" in parameter:
                continue
            if parameter.startswith(("w13_", "w2_")) and hasattr(model, "get_expert_mapping"):
                expected.update(_experts(model, name, parameter))
                continue
            parent, _, last = name.rpartition(".")
            parts = packed.get(last, [last])
            for part, shape in zip(parts, _shapes(layer, parameter, meta, len(parts), tensor_parallel), strict=True):
                expected[".".join(filter(None, (parent, part, parameter)))] = shape
    return expected


def _shapes(layer, parameter: str, meta: torch.Tensor, parts: int, tensor_parallel: int) -> list[Shape]:
    if parameter in ("weight", "bias"):
        sizes = None
        if isinstance(layer, QKVParallelLinear):
            q, kv = layer.total_num_heads * layer.head_size, layer.total_num_kv_heads
            sizes = [q, kv * layer.head_size, kv * getattr(layer, "v_head_size", layer.head_size)]
        elif isinstance(layer, MergedColumnParallelLinear):
            sizes = list(layer.output_sizes)
        elif isinstance(layer, LinearBase):
            sizes = [layer.output_size]
        elif isinstance(layer, VocabParallelEmbedding):
            rows = layer.org_vocab_size
            return [(rows, layer.embedding_dim) if parameter == "weight" else (rows,)] * parts
        if sizes is not None and meta.ndim == (2 if parameter == "weight" else 1):
            sizes = [sum(sizes)] if parts == 1 else sizes
            sizes = sizes if len(sizes) == parts else [None] * parts
            return [None if n is None else (n, layer.input_size) if parameter == "weight" else (n,) for n in sizes]
    sharded = tensor_parallel > 1 and hasattr(meta, "weight_loader")
    return [None if sharded or parts > 1 else tuple(meta.shape)] * parts


def _experts(model, name: str, parameter: str) -> dict[str, Shape]:
    """A fused expert layer is loaded from one tensor per expert and projection: (target, source, expert, shard)."""
    block = name[: name.rindex("experts")]
    return {
        block + source + parameter.split("_", 1)[1]: None
        for target, source, _, _ in model.get_expert_mapping()
        if parameter.startswith(target.rsplit(".", 1)[-1])
    }


def mapper(model: torch.nn.Module):
    """A function from a checkpoint's name to the name vLLM loads it under, or None where vLLM skips it."""
    table = getattr(model, "hf_to_vllm_mapper", None)
    if table is None:
        return lambda name: name
    if hasattr(table, "orig_to_new_stacked"):  # it would also fuse; names are compared before that
        table = dataclasses.replace(table, orig_to_new_stacked={})
    return lambda name: next(iter(table.apply_list([name])), None)


def tied(model_config) -> bool:
    """Whether the head is the embedding; `lm_head` is then no tensor of its own."""
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
