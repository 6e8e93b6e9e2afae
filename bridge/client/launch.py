"""What a vLLM server is started with: its interpreter, looked at first, its flags and its environment.

A server starts with random weights of the run's architecture (its folder holds a config.json and nothing else): the trainer
sends every weight before the first request, so no checkpoint is read twice.
"""

import functools
import json
import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bridge.client.process import Launch
from jaxrl.config import ConfigError, LoraConfig, SamplerConfig
from jaxrl.models.architecture import Architecture

PROBE_SECONDS = 60.0  # an interpreter on a cold network disk
# What the interpreter can import, found without importing it: torch alone takes seconds.
PROBE = """
import importlib.util as u, json, pathlib, re
found = {name: u.find_spec(name) for name in ("vllm", "jaxrl_bridge", "torch")}
torch = found["torch"] and pathlib.Path(found["torch"].origin).with_name("version.py").read_text()
cuda = bool(torch) and re.search(r"^cuda\\b.*= *'", torch, re.M) is not None
print(json.dumps({"vllm": bool(found["vllm"]), "bridge": bool(found["jaxrl_bridge"]), "cuda": cuda}))
"""
HINT = "`make vllm-env` makes an environment with both"
BRIDGE_SOURCES = Path(__file__).parents[1] / "server"  # of a checkout
FROM_SOURCES = (
    "import runpy, sys; sys.path.append({path!r}); runpy.run_module('jaxrl_bridge.serve', run_name='__main__', alter_sys=True)"
)
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on CPUs
# Of the trainer's environment, what would change which modules vLLM finds or how it may be talked to.
NOT_INHERITED = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "VIRTUAL_ENV",
    "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "VLLM_PLUGINS",
)
# Tokens of a generation that vLLM hands out at once: each hand-out costs both sides more than the token, and the first comes alone.
STREAM_INTERVAL = 16
GIB = 2**30


@dataclass(frozen=True)
class Interpreter:
    """vLLM's Python. `command` runs the server's entry there."""

    command: tuple[str, ...]
    device: str  # "cpu" or "cuda": what its torch is built for


@functools.cache
def find_interpreter(config: SamplerConfig) -> Interpreter:
    """Raises ConfigError naming `sampler.python` if it is missing, or lacks vLLM or the server's side of the bridge."""
    python = os.path.abspath(config.python)  # not resolved: a virtual environment is where the link is
    if not os.access(python, os.X_OK):
        raise ConfigError("sampler.python", f"no interpreter at {python}: {HINT}")
    try:
        answer = subprocess.run(
            [python, "-c", PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=_environment(config),
            cwd="/",
            timeout=PROBE_SECONDS,
        )
        found = json.loads(answer.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise ConfigError("sampler.python", f"{python} did not answer within {PROBE_SECONDS:g} s") from None
    except (OSError, IndexError, ValueError):
        raise ConfigError("sampler.python", f"{python} is no Python that works: {HINT}") from None
    if not found["vllm"]:
        raise ConfigError("sampler.python", f"{python} has no vllm: {HINT}")
    if found["bridge"]:
        command = (python, "-m", "jaxrl_bridge.serve")
    elif (BRIDGE_SOURCES / "jaxrl_bridge").is_dir():
        command = (python, "-c", FROM_SOURCES.format(path=str(BRIDGE_SOURCES)))
    else:
        raise ConfigError("sampler.python", f"{python} has no jaxrl_bridge: {HINT}")
    return Interpreter(command, "cuda" if found["cuda"] else "cpu")


def launches(
    config: SamplerConfig,
    architecture: Architecture,
    lora: LoraConfig | None,
    interpreter: Interpreter,
    folder: Path,
    key: str,
) -> list[Launch]:
    """How each of `config.replicas` servers is started; their logs are FOLDER/vllm-N.log. Writes FOLDER/vllm/config.json.
    Raises ConfigError for a model that vLLM does not compute on that device."""
    if interpreter.device == "cpu" and architecture.head_dim not in HEAD_DIMS:
        raise ConfigError(
            "model",
            f"vLLM on a CPU has no attention for head_dim = {architecture.head_dim}, only for {', '.join(map(str, HEAD_DIMS))}: "
            'change the model, or use sampler.kind = "embedded"',
        )
    model = (folder / "vllm").absolute()
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(architecture.to_hf(), indent=2))
    flags = _flags(config, architecture, lora, interpreter.device, model)
    environment = _environment(config)
    if config.shared_folder is not None:
        environment["JAXRL_BRIDGE_FILES"] = os.path.abspath(config.shared_folder)
    if interpreter.device == "cpu":
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_cache_gib(config, architecture)))
    out = []
    for i in range(config.replicas):
        own = {"CUDA_VISIBLE_DEVICES": config.devices[i]} if config.devices else {}
        command = (*interpreter.command, *flags, *config.flags)
        log = folder / f"vllm-{i}.log"
        out.append(Launch(command, environment | own, model, log, key, config.start_seconds))
    return out


def _flags(
    config: SamplerConfig, architecture: Architecture, lora: LoraConfig | None, device: str, model: Path
) -> tuple[str, ...]:
    flags = {
        "--model": str(model),
        "--served-model-name": "policy",
        "--load-format": "dummy",
        "--dtype": config.dtype,
        "--max-model-len": str(min(config.max_length, architecture.context_length)),
        "--max-num-seqs": str(config.slots),
        "--logprobs-mode": "processed_logprobs",
        "--scheduling-policy": "priority",
        "--stream-interval": str(STREAM_INTERVAL),
    }
    switches = ["--skip-tokenizer-init", "--enable-prefix-caching", "--disable-uvicorn-access-log"]
    if device == "cpu":
        switches.append("--enforce-eager")
    else:
        flags["--gpu-memory-utilization"] = f"{config.memory:g}"
    if lora is not None:
        switches.append("--enable-lora")
        # Beside the newest adapter those of running generations: one for each version that may be in flight.
        flags |= {"--max-lora-rank": str(_lora_rank(lora.rank)), "--max-loras": "4"}
    return (*(word for pair in flags.items() for word in pair), *switches)


def _environment(config: SamplerConfig) -> dict[str, str]:
    """The trainer's, less what is not for vLLM, and what the config says last."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    own = {
        "PYTHONSAFEPATH": "1",  # python -P: nothing is imported from where it runs
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",  # what its processes bind to for each other
    }
    return inherited | own | dict(entry.split("=", 1) for entry in config.environment)


def _cache_gib(config: SamplerConfig, architecture: Architecture) -> int:
    """Memory for the keys and values of every slot at full length, in whole GiB."""
    itemsize = 4 if config.dtype == "float32" else 2
    token = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim * itemsize
    return max(1, math.ceil(token * config.slots * config.max_length / GIB))


def _lora_rank(rank: int) -> int:
    """The least rank that vLLM makes room for: it knows some only."""
    return next((known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)
