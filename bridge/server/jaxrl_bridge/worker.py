"""What runs in every worker of vLLM: takes a publish's buckets, checks them, loads them into the model.

`BridgeWorker` is vLLM's worker extension: its methods are called on every rank by `collective_rpc` and answer with plain
data. A failure is an answer too ({"error": ..}), so that the gateway hears of every rank.
"""

import base64
import functools
import logging
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from jaxrl_bridge import names, nccl
from jaxrl_bridge.checksum import checksums
from jaxrl_bridge.copies import Recorder
from jaxrl_bridge.errors import BridgeError
from jaxrl_bridge.sources import Sources, num_bytes

logger = logging.getLogger("vllm.jaxrl_bridge")
HOST_MEMORY = ("shm", "http", "file")


@dataclass
class Incoming:
    """A publish as one worker sees it."""

    publish_id: str
    specs: dict[str, dict]
    transport: str
    staged: bool
    seen: set[str] = field(default_factory=set)
    loading: bool = False  # the model's weights are no longer those of one version
    loaded: set[str] | None = field(default_factory=set)  # vLLM's names; None: this model does not tell
    kept: list[tuple[list[dict], dict | list[torch.Tensor]]] = field(default_factory=list)  # staged: bucket, source or tensors


def _answers(method):
    """A worker's method as plain data: its result, or {"error": {"kind", "message"}, "loading"}."""

    @functools.wraps(method)
    def answer(self, *args):
        try:
            with set_current_vllm_config(self.vllm_config), torch.device(self.device), torch.inference_mode():
                return method(self, *args)
        except BridgeError as error:
            failure = error
        except Exception as error:  # whatever it was, every rank must answer and the gateway decide
            logger.exception("the bridge's %s failed", method.__name__)
            failure = BridgeError("internal", f"{type(error).__name__}: {error}")
        incoming = self.__dict__.get("bridge_incoming")
        return failure.as_json() | {"loading": incoming is not None and incoming.loading}

    return answer


class BridgeWorker:
    """Worker extension. Its methods' names must not collide with a worker's, so each begins with `bridge_`."""

    @_answers
    def bridge_info(self) -> dict:
        device = torch.device(self.device)
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        return {
            "device": device.type,
            "uuid": uuid,
            "nccl": nccl.version() if device.type == "cuda" else None,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
        }

    @_answers
    def bridge_begin(self, publish_id: str, manifest: dict, transport: str, staged: bool, group: dict | None) -> dict:
        """Compares the manifest with the model. Nothing is loaded."""
        if self.model_config.quantization is not None:
            raise BridgeError("bad_request", f"the server's weights are quantised ({self.model_config.quantization})")
        specs = {spec["name"]: spec for spec in manifest["tensors"]}
        _compare(
            self.bridge_model(), self.model_config, self.parallel_config.tensor_parallel_size, specs, len(manifest["tensors"])
        )
        sources = self.bridge_sources()
        sources.forget_removed()
        if group is not None:
            sources.join(base64.b64decode(group["unique_id"]), group["world_size"], 1 + self.rank)
        self.bridge_incoming, self.bridge_specs = Incoming(publish_id, specs, transport, staged), specs
        return {}

    @_answers
    def bridge_bucket(self, publish_id: str, bucket: list[dict], source: dict, opening: dict | None) -> dict:
        """Takes a bucket: loads it, or keeps it until commit. `opening`: the publish begins here, with the manifest that
        `bridge_begin` last compared; its transport and whether it is staged."""
        incoming = self.bridge_current(publish_id, opening)
        self.bridge_take(incoming, bucket, source, incoming.staged)
        self.bridge_wait()
        return {"num_bytes": _num_bytes(incoming, bucket)}

    def bridge_take(self, incoming: Incoming, bucket: list[dict], source: dict, staged: bool) -> None:
        """Checksums first, so that a damaged bucket changes nothing."""
        specs = []
        for entry in bucket:
            if entry["name"] not in incoming.specs:
                raise BridgeError("mismatch", f"{entry['name']} is not in the manifest")
            if entry["name"] in incoming.seen:
                raise BridgeError("mismatch", f"{entry['name']} was sent twice")
            incoming.seen.add(entry["name"])
            specs.append(incoming.specs[entry["name"]])
        if staged and incoming.transport in HOST_MEMORY:
            incoming.kept.append((bucket, source))
            return
        tensors = self.bridge_sources().tensors(incoming.transport, source, specs, bucket)
        _verify(bucket, tensors)
        if staged:
            incoming.kept.append((bucket, [tensor.clone() for tensor in tensors]))
        else:
            self.bridge_load(incoming, bucket, tensors)

    @_answers
    def bridge_commit(self, publish_id: str, bucket: list[dict], source: dict, opening: dict | None) -> dict:
        """Loads what was staged, and the last bucket if it comes with the commit, and checks that the model is whole."""
        incoming = self.bridge_current(publish_id, opening)
        if bucket:
            self.bridge_take(incoming, bucket, source, bool(incoming.kept))
        if missing := [name for name in incoming.specs if name not in incoming.seen]:
            raise BridgeError("mismatch", f"{len(missing)} tensors of the manifest were not sent, the first is {missing[0]}")
        while incoming.kept:
            entries, held = incoming.kept.pop(0)
            if isinstance(held, dict):
                specs = [incoming.specs[entry["name"]] for entry in entries]
                held = self.bridge_sources().tensors(incoming.transport, held, specs, entries)
                _verify(entries, held)
            self.bridge_load(incoming, entries, held)
        model = self.bridge_model()
        if not self.bridge_in_place():
            finalize_layerwise_reload(model, self.model_config)
            _repack_tied_head(model)
        self.bridge_wait()
        if incoming.loaded is not None:
            tied = names.tied(self.model_config)
            expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters() if "lora" not in name}
            left = sorted(n for n in expected - incoming.loaded if not (tied and n.startswith("lm_head")))
            if left:
                raise BridgeError("mismatch", f"{len(left)} parameters of vLLM's model were not loaded, the first is {left[0]}")
        if reset := getattr(self.model_runner, "reset_lora_state", None):
            reset()
        self.bridge_incoming = None
        return {"num_bytes": _num_bytes(incoming, bucket)}

    @_answers
    def bridge_abort(self, publish_id: str) -> dict:
        """Drops a publish. Weights already loaded stay: the gateway keeps the server paused."""
        incoming = self.__dict__.get("bridge_incoming")
        if incoming is None or incoming.publish_id != publish_id:
            return {"loading": False}
        if incoming.loading and not self.bridge_in_place():
            finalize_layerwise_reload(self.bridge_model(), self.model_config)
        self.bridge_incoming = None
        return {"loading": incoming.loading}

    @_answers
    def bridge_close(self) -> dict:
        self.bridge_sources().close()
        return {}

    def bridge_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()

    def bridge_sources(self) -> Sources:
        if "bridge_open_sources" not in self.__dict__:
            self.bridge_open_sources = Sources(torch.device(self.device))
        return self.bridge_open_sources

    def bridge_current(self, publish_id: str, opening: dict | None) -> Incoming:
        if opening is not None:
            self.bridge_sources().forget_removed()
            self.bridge_incoming = Incoming(publish_id, self.bridge_specs, opening["transport"], opening["staged"])
        incoming = self.__dict__.get("bridge_incoming")
        if incoming is None or incoming.publish_id != publish_id:
            raise BridgeError("bad_request", f"no publish {publish_id} is open")
        return incoming

    def bridge_in_place(self) -> bool:
        """True where vLLM uses weights as they are loaded, so that loading over them is all there is to do."""
        if torch.device(self.device).type != "cuda":
            return False  # packed for the CPU's kernels
        plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        return (
            all(
                getattr(layer, "quant_method", None) is None or type(layer.quant_method) in plain
                for layer in self.bridge_model().modules()
            )
            and not self.model_config.use_mla
        )

    def bridge_load(self, incoming: Incoming, bucket: list[dict], tensors: list[torch.Tensor]) -> None:
        model, in_place = self.bridge_model(), self.bridge_in_place()
        if not incoming.loading:
            incoming.loading = True
            if not in_place:
                initialize_layerwise_reload(model)
        name = ""

        def named():
            nonlocal name
            for entry, tensor in zip(bucket, tensors, strict=True):
                name = entry["name"]
                # A reload by layer holds on to tensors until their layer is complete, longer than the source may be read.
                yield name, tensor if in_place else tensor.clone()

        known = self.__dict__.setdefault("bridge_copies", {})
        key = tuple((entry["name"], tensor.dtype, tensor.shape) for entry, tensor in zip(bucket, tensors, strict=True))
        copies = known.get(key)
        if copies is not None and copies.fit(model):
            copies.repeat(tensors)
            loaded = copies.loaded
        else:
            recorder = Recorder(tensors) if in_place and (copies is not None or key not in known) else None
            try:
                with recorder or nullcontext():
                    loaded = model.load_weights(named())  # all at once: a call looks at every parameter of the model first
            except Exception as error:
                raise BridgeError("mismatch", f"vLLM cannot load {name}: {type(error).__name__}: {error}") from error
            if recorder is not None:
                known[key] = recorder.copies(model, loaded)
        incoming.loaded = None if loaded is None or incoming.loaded is None else incoming.loaded | loaded

    def bridge_wait(self) -> None:
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)


def _compare(model: torch.nn.Module, model_config, tensor_parallel: int, specs: dict[str, dict], count: int) -> None:
    """Raises BridgeError (mismatch) unless the manifest is exactly the model's tensors."""
    if len(specs) != count:
        raise BridgeError("mismatch", "the manifest names a tensor twice")
    expected = names.expected_tensors(model, names.tied(model_config), tensor_parallel)
    rename = names.mapper(model)
    found = set()
    for name, spec in specs.items():
        if (target := rename(name)) not in expected:
            raise BridgeError("mismatch", f"the server's model has no tensor {name}")
        if (shape := expected[target]) is not None and tuple(spec["shape"]) != shape:
            raise BridgeError("mismatch", f"{name} has shape {spec['shape']}, the server's model wants {list(shape)}")
        found.add(target)
    if missing := [name for name in expected if name not in found]:
        raise BridgeError(
            "mismatch", f"the manifest lacks {len(missing)} tensors of the server's model, the first is {missing[0]}"
        )


def _num_bytes(incoming: Incoming, bucket: list[dict]) -> int:
    return sum(num_bytes(incoming.specs[entry["name"]]) for entry in bucket)


def _verify(bucket: list[dict], tensors: list[torch.Tensor]) -> None:
    """Raises BridgeError (mismatch) unless every checksum is right."""
    for entry, total in zip(bucket, checksums(tensors), strict=True):
        if total != entry["checksum"]:
            raise BridgeError("mismatch", f"{entry['name']} has checksum {total}, the trainer sent {entry['checksum']}")


def _repack_tied_head(model: torch.nn.Module) -> None:
    """A head that shares the embedding's weight is not loaded by name, so its packed copy must be made anew."""
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)
