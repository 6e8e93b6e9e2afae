"""What of a config reaches a server, and what is refused before one starts."""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.client.launch import Interpreter, find_interpreter, launches
from bridge.client.link import LinkSettings
from bridge.client.sampler import start_sampler
from jaxrl.config import Config, ConfigError, LoraConfig, SamplerConfig, parse
from jaxrl.models.architecture import Architecture
from jaxrl.rollout.protocol import SamplerError
from jaxrl.samplers import share_gpus

MODEL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}
ARCHITECTURE = Architecture.from_hf(MODEL)


def config(sampler, **tables) -> Config:
    base = {"model": {"architecture": MODEL, "tokenizer": "t"}, "env": "sums"}
    return parse(base | {"sampler": sampler} | {table: base.get(table, {}) | keys for table, keys in tables.items()})


def started(sampler: SamplerConfig, folder: Path, device: str, architecture=ARCHITECTURE, lora=None) -> list[str]:
    (launch, *_) = launches(sampler, architecture, lora, Interpreter(("python",), device), folder, "secret")
    return launch


def test_one_word_is_all_that_a_user_changes():
    assert config("vllm").sampler == SamplerConfig(kind="vllm")


@pytest.mark.parametrize(
    "key, sampler, tables",
    [
        ("sampling.top_p", "vllm", {"sampling": {"top_p": 0.9}}),
        ("sampling.top_k", "vllm", {"sampling": {"top_k": 5}}),
        ("sampling.min_p", "vllm", {"sampling": {"min_p": 0.1}}),
        ("model.dtype", "vllm", {"model": {"dtype": "float64"}}),
        ("model.param_dtype", "vllm", {"model": {"param_dtype": "float64"}}),
        ("sampler.pages", {"kind": "vllm", "pages": 200}, {}),
        ("sampler.memory", {"kind": "embedded", "memory": 0.7}, {}),
        ("sampler.cache", {"cache": "keep"}, {}),
        ("sampler.dtype", {"dtype": "float16"}, {}),
        ("sampler.replicas", {"kind": "vllm", "replicas": 2, "urls": ["http://localhost:1"]}, {}),
        ("sampler.urls", {"kind": "vllm", "urls": ["http://10.1.2.3:8000"]}, {}),
        ("sampler.urls", {"kind": "vllm", "urls": ["127.0.0.1:8000"]}, {}),
        ("sampler.urls", {"kind": "vllm", "urls": ["http://localhost:1", "http://localhost:1"]}, {}),
        ("sampler.devices", {"kind": "vllm", "devices": ["0"], "replicas": 2}, {}),
        ("sampler.environment", {"kind": "vllm", "environment": ["NO VALUE"]}, {}),
        ("sampler.shared_folder", {"kind": "vllm", "transport": "file"}, {}),
        ("sampler.shared_folder", {"kind": "vllm", "transport": "shm", "shared_folder": "x"}, {}),
    ],
)
def test_what_cannot_work_is_refused_by_key(key, sampler, tables):
    with pytest.raises(ConfigError) as caught:
        config(sampler, **tables)
    assert caught.value.key == key


def test_a_server_gets_what_the_config_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    settings = SamplerConfig(
        kind="vllm",
        slots=7,
        max_length=512,
        dtype="bfloat16",
        replicas=2,
        devices=("3", "4"),
        environment=("A=b=c",),
        flags=("--swap-space", "1"),
    )
    first, second = launches(settings, ARCHITECTURE, None, Interpreter(("python",), "cuda"), tmp_path, "secret")
    line = " ".join(first.command)
    for words in ("--max-num-seqs 7", "--max-model-len 256", "--dtype bfloat16", "--gpu-memory-utilization 0.4"):
        assert words in line
    assert line.endswith("--swap-space 1") and "secret" not in line and "secret" not in repr(first)
    assert "--enforce-eager" not in line and "lora" not in line
    environment = first.environment
    assert environment["A"] == "b=c" and environment["HF_HUB_OFFLINE"] == "1" and environment["PYTHONSAFEPATH"] == "1"
    assert "PYTHONPATH" not in environment and "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in (first, second)] == ["3", "4"]
    assert (first.log.name, second.log.name) == ("vllm-0.log", "vllm-1.log")
    written = json.loads((first.folder / "config.json").read_text())
    assert Architecture.from_hf(written) == ARCHITECTURE and written["architectures"] == ["LlamaForCausalLM"]


def test_on_a_cpu_the_cache_has_room_for_every_slot(tmp_path):
    launch = started(SamplerConfig(kind="vllm", slots=64, max_length=256), tmp_path, "cpu")
    assert launch.environment["VLLM_CPU_KVCACHE_SPACE"] == "1" and "--enforce-eager" in launch.command
    large = Architecture.from_hf(MODEL | {"num_hidden_layers": 64, "head_dim": 128, "num_key_value_heads": 2})
    launch = started(SamplerConfig(kind="vllm", slots=64, max_length=2048), tmp_path, "cpu", large)
    assert launch.environment["VLLM_CPU_KVCACHE_SPACE"] == "16"  # 2 · 64 layers · 2 heads · 128 · 4 bytes · 64 · 2048
    own = SamplerConfig(kind="vllm", environment=("VLLM_CPU_KVCACHE_SPACE=5",))
    assert started(own, tmp_path, "cpu").environment["VLLM_CPU_KVCACHE_SPACE"] == "5"


def test_adapters_have_room_for_their_rank(tmp_path):
    command = started(SamplerConfig(kind="vllm"), tmp_path, "cuda", lora=LoraConfig(rank=20)).command
    assert "--enable-lora" in command and command[command.index("--max-lora-rank") + 1] == "32"


def test_a_head_that_vllm_has_no_cpu_attention_for_is_refused(tmp_path):
    odd = Architecture.from_hf(MODEL | {"head_dim": 16})
    with pytest.raises(ConfigError, match="head_dim = 16"):
        started(SamplerConfig(kind="vllm"), tmp_path, "cpu", odd)
    started(SamplerConfig(kind="vllm"), tmp_path, "cuda", odd)


@pytest.mark.parametrize(
    "python, says", [("/nowhere/python", "no interpreter"), (sys.executable, "has no vllm"), ("/bin/ls", "no Python")]
)
def test_an_interpreter_without_vllm_is_refused_with_the_way_to_get_one(python, says):
    with pytest.raises(ConfigError, match=f"sampler.python.*{says}.*make vllm-env"):
        find_interpreter(SamplerConfig(kind="vllm", python=python))


def test_servers_of_others_need_their_key(tmp_path, monkeypatch):
    monkeypatch.delenv("JAXRL_BRIDGE_KEY", raising=False)
    attached = config({"kind": "vllm", "urls": ["http://localhost:1"]})
    with pytest.raises(ConfigError, match="sampler.urls.*JAXRL_BRIDGE_KEY"):
        asyncio.run(start_sampler(attached, ARCHITECTURE, str, (1,), tmp_path, None))


@pytest.mark.parametrize(
    "state, says",
    [
        ({"dtype": "bfloat16"}, 'sampler.dtype = "bfloat16"'),
        ({"max_model_len": 100}, "sampler.max_length"),
        ({"lora": False}, "--enable-lora"),
    ],
)
def test_a_server_that_does_not_suit_the_config_is_refused(state, says):
    settings = LinkSettings(SamplerConfig(kind="vllm"), ARCHITECTURE, LoraConfig(), "run.1")
    whole = {"dtype": "float32", "max_model_len": 256, "lora": True} | state
    with pytest.raises(SamplerError, match=f"http://here.*{says}"):
        settings.open(SimpleNamespace(url="http://here"), whole)


@pytest.mark.parametrize(
    "sampler, share",
    [
        ("vllm", "0.50"),
        ({"kind": "vllm", "memory": 0.7}, "0.20"),
        ({"kind": "vllm", "devices": ["1"]}, None),
        ({"kind": "vllm", "urls": ["http://localhost:1"]}, None),
        ("embedded", None),
    ],
)
def test_servers_on_the_trainers_gpus_get_their_room(sampler, share, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")  # so that it is put back
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    share_gpus(config(sampler))
    assert os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") == share
