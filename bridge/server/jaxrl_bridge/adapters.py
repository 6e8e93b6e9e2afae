"""LoRA adapters as versions: each has a name and an id of its own, and stays loaded while a generation uses it."""

from pathlib import Path

from vllm.lora.request import LoRARequest

from jaxrl_bridge.errors import BridgeError
from jaxrl_bridge.sources import SHM, check_path
from jaxrl_bridge.streams import Adapter, Streams


class Adapters:
    """The adapters vLLM has loaded; `streams.adapter` is the one that new generations get."""

    def __init__(self, engine, streams: Streams):
        self.engine = engine
        self.streams = streams
        self.old: list[Adapter] = []
        self._num_loaded = 0

    async def load(self, body: dict) -> dict:
        """Serves the PEFT folder `path` as `version` to requests from now on."""
        version, path = body["version"], body["path"]
        if self.engine.vllm_config.lora_config is None:
            raise BridgeError("bad_request", "the server was started without --enable-lora")
        if not SHM.match(path):
            check_path(path, "file")
        if not (Path(path) / "adapter_config.json").is_file():
            raise BridgeError("bad_request", f"{path} is no PEFT folder: it has no adapter_config.json")
        if version <= self.streams.version:
            raise BridgeError("version", f"version {version} is not above the served version {self.streams.version}")
        self._num_loaded += 1
        request = LoRARequest(f"policy-{version}", self._num_loaded, path)
        try:
            loaded = await self.engine.add_lora(request)
        except Exception as error:
            raise BridgeError("mismatch", f"vLLM cannot load the adapter {path}: {error}") from error
        if not loaded:
            raise BridgeError("mismatch", f"vLLM did not load the adapter {path}")
        if self.streams.adapter is not None:
            self.old.append(self.streams.adapter)
        self.streams.adapter = Adapter(version, request)
        self.streams.version = version
        await self.sweep()
        return {"version": version}

    async def sweep(self) -> None:
        """Unloads adapters that no generation uses any more."""
        unused = [adapter for adapter in self.old if adapter.users == 0]
        self.old = [adapter for adapter in self.old if adapter.users]
        for adapter in unused:
            await self.engine.remove_lora(adapter.request.lora_int_id)
