"""The bridge's routes as plain calls, and weights for a tiny Llama: what the tests of the server speak to it with."""

import json
import os
import uuid
from pathlib import Path

import httpx
import numpy as np

KEY = "sesame"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, VOCAB = 64, 2, 1, 32, 128, 2, 256


def model_folder(folder: Path) -> Path:
    """A config.json that vLLM loads with random weights; the tests publish the weights they want."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights(seed: int) -> dict[str, np.ndarray]:
    """Random weights by Hugging Face name, large enough that two seeds disagree on every token."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes[layer + "self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[layer + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[layer + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[layer + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[layer + "mlp.gate_proj.weight"] = (MLP, HIDDEN)
        shapes[layer + "mlp.up_proj.weight"] = (MLP, HIDDEN)
        shapes[layer + "mlp.down_proj.weight"] = (HIDDEN, MLP)
        shapes[layer + "input_layernorm.weight"] = (HIDDEN,)
        shapes[layer + "post_attention_layernorm.weight"] = (HIDDEN,)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    values = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: 1 + value if "norm" in name else value for name, value in values.items()}


def logprobs(weights: dict[str, np.ndarray], ids: list[int], old: dict[str, np.ndarray] | None = None, kept: int = 0):
    """[T, V] log-probs after each of the ids, in float64: the model written out, as a reference.

    With `old`, keys and values of the first `kept` positions are those of the weights `old`.
    """
    past = _forward(old, ids[:kept], None)[1] if old is not None else None
    logits, _ = _forward(weights, ids[kept:] if past else ids, past)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _forward(weights: dict[str, np.ndarray], ids: list[int], past: list | None):
    """Logits of `ids`, which follow the positions whose keys and values are `past`, and the keys and values per layer."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    begin = len(past[0][0]) if past else 0
    positions, half, caches = begin + np.arange(len(ids)), HEAD_DIM // 2, []
    angles = positions[:, None] / 10000.0 ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[name + ".weight"]

    def rotate(x):
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        h = norm(x, layer + "input_layernorm")
        q, k, v = (h @ w[f"{layer}self_attn.{p}_proj.weight"].T for p in "qkv")
        q = rotate(q.reshape(len(ids), HEADS, HEAD_DIM))
        k, v = rotate(k.reshape(len(ids), KV_HEADS, HEAD_DIM)), v.reshape(len(ids), KV_HEADS, HEAD_DIM)
        if past:
            k, v = np.concatenate([past[i][0], k]), np.concatenate([past[i][1], v])
        caches.append((k, v))
        k, v = np.repeat(k, HEADS // KV_HEADS, 1), np.repeat(v, HEADS // KV_HEADS, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
        scores = np.where(positions[:, None] >= np.arange(len(k)), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(len(ids), -1) @ w[layer + "self_attn.o_proj.weight"].T
        h = norm(x, layer + "post_attention_layernorm")
        gate, up = (h @ w[f"{layer}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[layer + "mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w["lm_head.weight"].T, caches


def checksum(array: np.ndarray) -> int:
    data = array.tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), "<u4").astype(np.uint64)
    return int(((2 * np.arange(len(words), dtype=np.uint64) + 1) * words % 2**32).sum() % 2**32)


def manifest(weights: dict[str, np.ndarray]) -> dict:
    return {"tensors": [{"name": n, "shape": list(a.shape), "dtype": "F32"} for n, a in weights.items()]}


def layout(weights: dict[str, np.ndarray]) -> tuple[list[dict], bytes]:
    """The entries of a bucket that holds all of `weights`, and its bytes."""
    entries, area = [], bytearray()
    for name, array in weights.items():
        entries.append({"name": name, "offset": len(area), "checksum": checksum(array)})
        area += array.tobytes() + b"\0" * (-array.nbytes % 16)
    return entries, bytes(area)


class Server:
    """A running server's URL and the calls of its contract. Errors come back as (status, kind, message)."""

    def __init__(self, url: str):
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)

    async def call(self, method: str, route: str, body=None, content=None) -> dict:
        answer = await self.http.request(method, route, json=body, content=content)
        if answer.status_code != 200:
            raise Refused(answer.status_code, **answer.json()["error"])
        return answer.json()

    async def state(self) -> dict:
        return await self.call("GET", "/bridge/state")

    async def generate(self, prompt_ids, max_tokens, *, heard=None, **settings) -> dict:
        """The whole generation: ids, logp, versions (one per token), finish_reason. `heard` is called with every line."""
        body = {"request_id": uuid.uuid4().hex, "prompt_ids": prompt_ids, "max_tokens": max_tokens, "temperature": 1.0}
        result = {"ids": [], "logp": [], "versions": [], "finish_reason": None}
        async with self.http.stream("POST", "/bridge/generate", json=body | settings) as answer:
            if answer.status_code != 200:
                raise Refused(answer.status_code, **json.loads(await answer.aread())["error"])
            async for text in answer.aiter_lines():
                line = json.loads(text)
                if "error" in line:
                    raise Refused(200, **line["error"])
                result["ids"] += line["ids"]
                result["logp"] += line["logp"]
                result["versions"] += [version for version, count in line["versions"] for _ in range(count)]
                result["finish_reason"] = line.get("finish_reason")
                if heard is not None:
                    heard(result)
        return result

    async def begin(self, version, weights, *, transport="shm", **settings) -> str:
        body = {"version": version, "manifest": manifest(weights), "transport": transport, "in_flight": True}
        return (await self.call("POST", "/bridge/publish/begin", body | settings))["publish_id"]

    async def bucket(self, publish_id, tensors, source) -> dict:
        return await self.call("POST", f"/bridge/publish/{publish_id}/bucket", {"tensors": tensors, "source": source})

    async def commit(self, publish_id) -> dict:
        return await self.call("POST", f"/bridge/publish/{publish_id}/commit")

    async def abort(self, publish_id) -> dict:
        return await self.call("POST", f"/bridge/publish/{publish_id}/abort")

    async def publish(self, version, weights, **settings) -> dict:
        """A whole publish through shared memory, in one bucket."""
        entries, area = layout(weights)
        with segment(area) as source:
            publish_id = await self.begin(version, weights, **settings)
            await self.bucket(publish_id, entries, source)
            return await self.commit(publish_id)


class Refused(Exception):
    def __init__(self, status: int, kind: str, message: str):
        super().__init__(f"{status} {kind}: {message}")
        self.status, self.kind, self.message = status, kind, message


class segment:
    """A shared-memory file with these bytes; gives the bucket's source."""

    def __init__(self, area: bytes):
        self.path, self.area = f"/dev/shm/jaxrl-test-{uuid.uuid4().hex}", area

    def __enter__(self) -> dict:
        Path(self.path).write_bytes(self.area)
        return {"path": self.path, "size": len(self.area)}

    def __exit__(self, *_):
        os.unlink(self.path)
