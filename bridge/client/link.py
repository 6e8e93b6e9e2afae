"""How weights reach one server that is up: all of them by a transport, or a base once and adapters after it.

With adapters the base is what a server gets first, as the version before the adapter's; then each version is a PEFT folder of its
own, in shared memory or on the shared filesystem. Generations that run stay on the adapter they began with.
"""

import asyncio
import itertools
import shutil
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.client.api import ServerApi
from bridge.client.errors import Mismatch
from bridge.client.publish import publish
from bridge.client.transports.choose import choose, host_id, open_transport
from bridge.client.weights import Weights
from jaxrl.config import LoraConfig, SamplerConfig
from jaxrl.models.architecture import Architecture
from jaxrl.models.names import parameter_names
from jaxrl.models.peft import save_adapter
from jaxrl.models.stacking import at
from jaxrl.rollout.protocol import PublishReport, SamplerError

PUBLISH_SECONDS = 600.0  # the largest weights over a slow link take minutes
# vLLM reads an adapter again when it comes back from its least recently used ones: those that generations may be on stay.
ADAPTERS_KEPT = 16

_numbers = itertools.count()


@dataclass(frozen=True)
class LinkSettings:
    """What all links of a run share."""

    config: SamplerConfig
    architecture: Architecture
    lora: LoraConfig | None
    run_id: str

    def open(self, api: ServerApi, state: Mapping[str, Any]) -> "Link":
        """Raises SamplerError for a server that does not suit the config, naming the key."""
        config, wanted_length = self.config, min(self.config.max_length, self.architecture.context_length)
        if state["dtype"] != config.dtype:
            raise SamplerError(f'vLLM server {api.url} computes in {state["dtype"]}: set sampler.dtype = "{state["dtype"]}"')
        if state["max_model_len"] < wanted_length:
            raise SamplerError(
                f"vLLM server {api.url} takes {state['max_model_len']} tokens: start it with --max-model-len {wanted_length}, "
                "or lower sampler.max_length"
            )
        if self.lora is not None and not state["lora"]:
            raise SamplerError(f"vLLM server {api.url} takes no adapters: start it with --enable-lora")
        return Link(self, api, state)


class Link:
    """`publish` takes what the decoder has under "params", and under "lora" if there are adapters."""

    def __init__(self, settings: LinkSettings, api: ServerApi, state: Mapping[str, Any]):
        self._settings, self._api = settings, api
        self._state, self._transport = state, None
        choose(settings.config.transport, state, settings.config.shared_folder, api.url)  # what cannot reach is said here
        self._adapters: deque[Path] = deque()
        self._adapter_prefix = _adapter_prefix(settings, api, state) if settings.lora is not None else None
        self._has_base = False

    async def publish(self, weights: Any, version: int, *, in_flight: bool, force: bool) -> PublishReport:
        """Makes the server serve the weights. Raises SamplerError."""
        if self._adapter_prefix is None:
            return await self._send(weights["params"], version, in_flight, force)
        began, num_bytes = time.monotonic(), 0
        if not self._has_base or force:
            report = await self._send(weights["params"], version - 1, in_flight, force=True)
            self._has_base, num_bytes = True, report.num_bytes
        folder = Path(f"{self._adapter_prefix}-{version}")
        settings = self._settings
        await asyncio.to_thread(save_adapter, folder, weights["lora"], settings.architecture, settings.lora)
        self._adapters.append(folder)
        await self._api.adapter(version, str(folder), timeout=PUBLISH_SECONDS)
        while len(self._adapters) > ADAPTERS_KEPT:
            await asyncio.to_thread(shutil.rmtree, self._adapters.popleft())
        num_bytes += sum(file.stat().st_size for file in folder.iterdir())
        return PublishReport(version, num_bytes, time.monotonic() - began, 0)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        for folder in self._adapters:
            shutil.rmtree(folder, ignore_errors=True)

    async def _send(self, params: Any, version: int, in_flight: bool, force: bool) -> PublishReport:
        settings, config = self._settings, self._settings.config
        if self._transport is None:
            self._transport = await open_transport(
                config.transport, self._state, settings.run_id, api=self._api, shared_folder=config.shared_folder
            )
        check_shapes(params, settings.architecture, self._api.url)
        return await publish(
            self._api,
            Weights(params, settings.architecture, config.dtype),
            version,
            in_flight=in_flight,
            cache=config.cache,
            transport=self._transport,
            timeout=PUBLISH_SECONDS,
            force=force,
        )


def check_shapes(params: Any, architecture: Architecture, url: str) -> None:
    """Raises Mismatch naming the first tensor of the server's model that `params` does not hold in its shape."""
    for name in parameter_names(architecture):
        shape = name.shape[::-1] if name.transpose else name.shape
        shape = (architecture.num_layers, *shape) if name.stacked else shape
        try:
            found = at(params, name.path).shape
        except KeyError:
            found = "missing"
        if found != shape:
            raise Mismatch(url, f"{name.tensor.format(layer='N')} is {found} in the published weights, {shape} in the model")


def _adapter_prefix(settings: LinkSettings, api: ServerApi, state: Mapping[str, Any]) -> Path:
    name = f"jaxrl-{settings.run_id}-adapter-{next(_numbers)}"
    if state["host_id"] == host_id():
        return Path("/dev/shm") / name
    if settings.config.shared_folder is None:
        raise SamplerError(f"adapters reach {api.url}, on another host, by a folder that both share: set sampler.shared_folder")
    return Path(settings.config.shared_folder).absolute() / name
