"""A fleet of real servers with a tiny model, generations that are held to a full forward, and kill -9."""

import asyncio
import os
import signal
from contextlib import aclosing
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.client.fleet import Fleet
from bridge.client.launch import find_interpreter, launches
from bridge.client.link import LinkSettings
from bridge.client.process import Launch
from bridge.client.replica import Attached
from bridge.client.sampler import VllmSampler
from bridge.client.segments import run_id
from jaxrl.config import SamplerConfig
from jaxrl.models.architecture import Architecture
from jaxrl.models.decoder import Decoder, head_matrix, init_variables
from jaxrl.rollout.checked import CheckedSampler
from jaxrl.rollout.protocol import SamplingParams, join

PYTHON = Path(__file__).parents[2] / ".vllm" / "bin" / "python"
needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="make vllm-env has not been run")
KEY = "a-key-of-no-one"
TOLERANCE = 2e-5
LENGTH = 2048
ARCHITECTURE = Architecture.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    }
)


@cache
def weights(version: int, architecture: Architecture = ARCHITECTURE):
    """Of each version others, so different that every token's log-prob tells them apart."""
    return init_variables(Decoder(architecture), jax.random.key(version), None)


def attention(q, k, v, cache):
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * ARCHITECTURE.attention_scale
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1), v), cache


@jax.jit
def _log_probs(variables, tokens):
    """[LENGTH] ids -> [LENGTH]: of each its log-prob behind those before it; of the first, anything."""
    hidden, _ = Decoder(ARCHITECTURE).apply(variables, tokens[None], jnp.arange(LENGTH)[None], attention)
    table = jax.nn.log_softmax(hidden[0] @ head_matrix(variables["params"], ARCHITECTURE))
    return jnp.concatenate([jnp.zeros(1), jnp.take_along_axis(table[:-1], tokens[1:, None], axis=1)[:, 0]])


def log_probs(version: int, prompt: list[int], ids: list[int]) -> np.ndarray:
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(prompt) + len(ids)] = [*prompt, *ids]
    return np.asarray(_log_probs(weights(version), padded))[len(prompt) : len(prompt) + len(ids)]


def sampler_config(**settings) -> SamplerConfig:
    return SamplerConfig(kind="vllm", python=str(PYTHON), slots=32, max_length=LENGTH, start_seconds=300.0, **settings)


def servers(folder: Path, config: SamplerConfig) -> list[Launch]:
    return launches(config, ARCHITECTURE, None, find_interpreter(config), folder, KEY)


class RealFleet:
    """A fleet and the sampler over it. link: wraps what `LinkSettings.open` gives, to go wrong."""

    def __init__(
        self, where: list[Launch | Attached], config: SamplerConfig, folder: Path, architecture=ARCHITECTURE, link=None
    ):
        settings = LinkSettings(config, architecture, None, run_id(folder))
        opened = settings.open if link is None else lambda api, state: link(settings.open(api, state))
        self.fleet = Fleet(where, opened)
        self.sampler = VllmSampler(
            self.fleet,
            decode=str,
            eos_ids=(),
            max_length=LENGTH,
            vocab_size=architecture.vocab_size,
            dtype=config.dtype,
        )
        self.checked = CheckedSampler(self.sampler, 1)
        self.version = 1  # the newest published

    async def start(self, version: int = 1) -> None:
        await self.fleet.start()
        await self.sampler.publish(weights(version), version, False)

    async def publish(self, version: int, in_flight: bool = True):
        self.version = version
        return await self.checked.publish(weights(version), version, in_flight)


class Generation:
    """One that runs. `parts` so far."""

    def __init__(self, fleet: RealFleet, prompt: list[int], max_tokens: int):
        self.prompt, self.max_tokens, self.parts, self.reason = prompt, max_tokens, [], None
        self.task = asyncio.create_task(self._go(fleet))

    async def _go(self, fleet: RealFleet) -> None:
        async with aclosing(fleet.checked.stream(self.prompt, SamplingParams(self.max_tokens))) as parts:
            async for part in parts:
                self.parts.append(part.tokens)
                self.reason = part.finish_reason

    @property
    def num_tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    async def reach(self, count: int) -> None:
        while self.num_tokens < count:
            assert not self.task.done(), self.task.exception()
            await asyncio.sleep(0.005)

    async def versions(self) -> set[int]:
        """Waits for the end, holds every log-prob to the weights of its version; which versions there were."""
        await self.task
        tokens = join(self.parts)
        assert self.reason == "length" and len(tokens.ids) == self.max_tokens
        for version in set(tokens.version.tolist()):
            expected = log_probs(version, self.prompt, tokens.ids.tolist())
            off = np.abs(tokens.policy_logp - expected)[tokens.version == version]
            assert off.max() <= TOLERANCE, (version, off.max())
        return set(tokens.version.tolist())


def processes(launch: Launch, name: str = "") -> list[int]:
    """Process ids of a server, the supervisor's left out, whose command contains `name`, the oldest first."""
    found, inode = [], os.stat(launch.log).st_ino
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            writes_log = os.stat(f"/proc/{pid}/fd/1").st_ino == inode
        except OSError:
            continue
        if writes_log and "run_command" not in command and name in command:
            found.append(pid)
    return found


async def kill(launch: Launch, name: str = "") -> None:
    """kill -9 of the oldest such process, as soon as there is one."""
    while not (found := processes(launch, name)):
        await asyncio.sleep(0.05)
    os.kill(found[0], signal.SIGKILL)
