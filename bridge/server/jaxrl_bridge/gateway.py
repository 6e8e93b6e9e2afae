"""The ASGI middleware around vLLM's OpenAI server: the key on every route, and the bridge's own routes under /bridge/.

It is the outermost layer, so that no route of vLLM's is reached without the key, whichever version of vLLM this is.
"""

import asyncio
import hmac
import json
import logging
import os
import time
from urllib.parse import parse_qs

import vllm
from prometheus_client import REGISTRY
from vllm.sampling_params import RequestOutputKind, SamplingParams

from jaxrl_bridge.adapters import Adapters
from jaxrl_bridge.errors import STATUS, BridgeError
from jaxrl_bridge.publish import Publisher, tell_version
from jaxrl_bridge.sessions import LINE_INTERVAL, Session
from jaxrl_bridge.sources import check_path
from jaxrl_bridge.streams import REFUSALS, Stream, Streams

logger = logging.getLogger("vllm.jaxrl_bridge")
PROTOCOL = 1
UNPUBLISHED = -1  # the version of the weights that the server loaded itself
BODY_LIMIT = 256 << 20  # bytes of a JSON body
KEY_VARIABLE = "JAXRL_BRIDGE_KEY"
_key = os.environ.pop(KEY_VARIABLE, "")  # not inherited by vLLM's own child processes


class Gateway:
    """`app` is the ASGI application below."""

    def __init__(self, app):
        if not _key:
            raise RuntimeError(f"set {KEY_VARIABLE}: the server answers nobody without a key")
        self.app = app
        self.bridge: _Bridge | None = None
        self.starting = asyncio.Lock()

    async def __call__(self, scope, receive, send):
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        if not (_health(scope) or _authorised(scope)):
            return await _refuse(scope, receive, send)
        if scope["type"] == "websocket" or not scope["path"].startswith("/bridge/"):
            return await self.app(scope, receive, send)
        try:
            async with self.starting:
                if self.bridge is None:
                    self.bridge = await _Bridge.create(scope["app"].state)
            await self.bridge.handle(scope, receive, send)
        except BridgeError as error:
            await _json(send, error.as_json(), STATUS[error.kind])
        except Exception as error:  # an answer before it reaches vLLM's handlers, whose form is another
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await _json(send, BridgeError("internal", f"{type(error).__name__}: {error}").as_json(), 500)


class _Bridge:
    def __init__(self, state, info: dict):
        self.engine = state.engine_client
        self.info = info
        self.config = self.engine.vllm_config
        self.streams = Streams(self.engine, UNPUBLISHED)
        silence = float(os.environ.get("JAXRL_BRIDGE_PUBLISH_TIMEOUT", "60"))
        self.publisher = Publisher(self.engine, self.streams, self.workers, silence)
        self.adapters = Adapters(self.engine, self.streams)
        self.sessions: dict[str, Session] = {}

    @classmethod
    async def create(cls, state) -> "_Bridge":
        bridge = cls(state, {})
        bridge.info = await bridge.workers("bridge_info")
        await tell_version(bridge.engine, UNPUBLISHED)
        return bridge

    async def workers(self, method: str, *args) -> dict:
        """Calls a method of `BridgeWorker` on every rank; the first rank's answer, or the first failure of any."""
        if self.engine.errored:
            raise BridgeError("engine_dead", "vLLM's engine is dead")
        try:
            answers = await self.engine.collective_rpc(method, args=args)
        except Exception as error:
            if self.engine.errored:
                raise BridgeError("engine_dead", f"vLLM's engine died: {error}") from error
            raise BridgeError("internal", f"{method}: {error}") from error
        loading = any(answer.get("loading") for answer in answers)
        failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
        for rank, error in sorted(failed, key=lambda item: item[1]["kind"] == "timeout"):  # who waited is not the cause
            where = f" (rank {rank})" if len(answers) > 1 else ""
            failure = BridgeError(error["kind"], error["message"] + where)
            failure.loading = loading
            raise failure
        return answers[0] | ({"loading": loading} if "loading" in answers[0] else {})

    async def handle(self, scope, receive, send) -> None:
        method, parts = scope["method"], scope["path"].removeprefix("/bridge/").split("/")
        match (method, *parts):
            case ("GET", "state"):
                await _json(send, self.state())
            case ("POST", "generate"):
                await self.generate(await _body(receive), receive, send)
            case ("POST", "session"):
                await self.session(receive, send)
            case ("POST", "session", session_id):
                await _json(send, await _checked(self.submit, session_id, await _body(receive)))
            case ("POST", "publish", "begin"):
                await _json(send, await _checked(self.publisher.begin, await _body(receive)))
            case ("PUT", "publish", publish_id, "data"):
                await self.data(publish_id, scope, receive)
                await _json(send, {})
            case ("POST", "publish", publish_id, "bucket"):
                await _json(send, await _checked(self.publisher.bucket, publish_id, await _body(receive)))
            case ("POST", "publish", publish_id, "commit"):
                await _json(send, await _checked(self.publisher.commit, publish_id, await _body(receive)))
            case ("POST", "publish", publish_id, "abort"):
                await _json(send, await self.publisher.abort(publish_id))
            case ("POST", "probe"):
                await _json(send, await _checked(_probe, await _body(receive)))
            case ("POST", "adapter"):
                await _json(send, await _checked(self.adapters.load, await _body(receive)))
            case _:
                await _json(send, BridgeError("bad_request", f"no route {method} {scope['path']}").as_json(), 404)

    def state(self) -> dict:
        if self.engine.errored:
            raise BridgeError("engine_dead", "vLLM's engine is dead")
        model, streams = self.config.model_config, self.streams
        started = sum(stream.started for stream in streams.running)
        transports = ["shm", "http"]
        if os.environ.get("JAXRL_BRIDGE_FILES"):
            transports.append("file")
        if self.info["device"] == "cuda":
            transports = ["cuda_ipc", "nccl", *transports]
        return {
            "protocol": PROTOCOL,
            "vllm": vllm.__version__,
            "device": self.info["device"],
            "version": streams.version,
            "quarantined": self.publisher.quarantined,
            "paused": self.publisher.paused,
            "running": started,
            "waiting": len(streams.running) - started + streams.num_adding + streams.num_held,
            "kv_use": _gauge("vllm:kv_cache_usage_perc"),
            "tokens_per_second": streams.tokens_per_second(),
            "max_model_len": model.max_model_len,
            "dtype": self.info["dtype"],
            "transports": transports,
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "lora": self.config.lora_config is not None,
            "host_id": _host_id(),
            "uuid": self.info["uuid"],
            "nccl": self.info["nccl"],
            "num_workers": self.config.parallel_config.world_size,
        }

    async def open(self, body: dict, left: asyncio.Future) -> Stream | None:
        """Hands a generation to vLLM; None if its client has left meanwhile. Raises BridgeError."""
        params = _sampling_params(body)
        if missing := [name for name in ("request_id", "prompt_ids") if name not in body]:
            raise BridgeError("bad_request", f"the request lacks {missing[0]}")
        prompt_ids, vocab = body["prompt_ids"], self.config.model_config.get_vocab_size()
        # vLLM looks at ids only where it has a tokenizer, and one past the embedding ends its engine.
        if not prompt_ids or not all(isinstance(token, int) and 0 <= token < vocab for token in prompt_ids):
            raise BridgeError("bad_request", f"prompt_ids must be a list of token ids below {vocab}, at least one")
        priority = body.get("priority", 0) if self.config.scheduler_config.policy == "priority" else 0
        return await self.streams.open(body["request_id"], prompt_ids, params, priority, left)

    async def close(self, stream: Stream) -> None:
        await self.streams.close(stream)
        await self.adapters.sweep()

    async def generate(self, body: dict, receive, send) -> None:
        left = asyncio.ensure_future(_disconnected(receive))
        stream = None
        try:
            stream = await self.open(body, left)
            if stream is not None:
                await self._send_lines(stream, left, send)
        finally:
            left.cancel()
            if stream is not None:
                await self.close(stream)

    async def session(self, receive, send) -> None:
        left = asyncio.ensure_future(_disconnected(receive))
        session = Session(self, left)
        self.sessions[session.id] = session
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await session.run(lambda line: _chunk(send, line))
        finally:
            del self.sessions[session.id]
            left.cancel()
            await session.close()

    async def submit(self, session_id: str, body: dict) -> dict:
        if (session := self.sessions.get(session_id)) is None:
            raise BridgeError("bad_request", f"no session {session_id} is open")
        await session.submit(body["requests"], body["cancel"])
        return {}

    async def _send_lines(self, stream, left: asyncio.Future, send) -> None:
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            news = asyncio.ensure_future(stream.news.wait())
            await asyncio.wait({news, left}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            if left.done():
                return
            sent, done = time.monotonic(), stream.done
            await _chunk(send, stream.take_line())
            if stream.error is not None:
                await _chunk(send, stream.error.as_json())
            if done:
                return await send({"type": "http.response.body", "body": b"", "more_body": False})
            await asyncio.sleep(max(0.0, LINE_INTERVAL - (time.monotonic() - sent)))

    async def data(self, publish_id: str, scope, receive) -> None:
        query = parse_qs(scope["query_string"].decode())
        try:
            offset = int(query["offset"][0])
        except (KeyError, ValueError):
            raise BridgeError("bad_request", "PUT data wants ?offset=N") from None
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise BridgeError("bad_request", "the connection closed before the bytes had come")
            if data := message.get("body", b""):
                self.publisher.segment(publish_id).write(offset, data)
                offset += len(data)
            if not message.get("more_body"):
                return


async def _probe(body: dict) -> dict:
    """Whether the file `path` is here and is `token`: then trainer and server share its folder."""
    path, token = body["path"], body["token"]
    if not isinstance(path, str) or not isinstance(token, str):
        raise BridgeError("bad_request", "path and token must be strings")
    check_path(path, "file")
    try:
        with open(path, "rb") as file:
            return {"shared": hmac.compare_digest(file.read(len(token) + 1), token.encode())}
    except OSError as error:
        raise BridgeError("bad_request", f"{path} cannot be read here: {error.strerror}") from None


def _sampling_params(body: dict) -> SamplingParams:
    """Every setting comes from the request: none from the model's generation config or the server's defaults."""
    try:
        return SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body.get("top_p", 1.0),
            top_k=body.get("top_k", 0),
            min_p=body.get("min_p", 0.0),
            stop_token_ids=list(body.get("stop_token_ids") or []),
            seed=body.get("seed"),
            ignore_eos=True,  # stop_token_ids alone decide
            logprobs=0,  # the sampled token's
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
    except KeyError as error:
        raise BridgeError("bad_request", f"the request lacks {error}") from None
    except REFUSALS as error:
        raise BridgeError("bad_request", str(error)) from error


async def _checked(call, *args):
    """A handler's answer; a key that its body lacks or a value of the wrong kind is the client's mistake."""
    try:
        return await call(*args)
    except KeyError as error:
        raise BridgeError("bad_request", f"missing or unknown: {error}") from error


def _health(scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/health"


def _authorised(scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return hmac.compare_digest(value, b"Bearer " + _key.encode())
    return False


async def _refuse(scope, receive, send) -> None:
    refusal = BridgeError("bad_request", "this server wants its key: Authorization: Bearer KEY")
    if scope["type"] == "http":
        return await _json(send, refusal.as_json(), 401)
    await receive()  # the opening handshake, answered before it is accepted
    if "websocket.http.response" in scope.get("extensions", {}):
        await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
        return await send({"type": "websocket.http.response.body", "body": b""})
    await send({"type": "websocket.close", "code": 1008})


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(receive) -> dict:
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BridgeError("bad_request", "the connection closed before the request had come")
        data += message.get("body", b"")
        if len(data) > BODY_LIMIT:
            raise BridgeError("bad_request", f"a request body may have {BODY_LIMIT} bytes")
        if not message.get("more_body"):
            break
    try:
        body = json.loads(bytes(data) or b"{}")
    except ValueError as error:
        raise BridgeError("bad_request", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BridgeError("bad_request", "the body is not a JSON object")
    return body


async def _json(send, answer: dict, status: int = 200) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _chunk(send, line: dict) -> None:
    await send({"type": "http.response.body", "body": json.dumps(line).encode() + b"\n", "more_body": True})


def _gauge(name: str) -> float:
    """The largest value of one of vLLM's own gauges; 0 before it has been set."""
    samples = [s.value for metric in REGISTRY.restricted_registry([name]).collect() for s in metric.samples]
    return max(samples, default=0.0)


def _host_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}-{os.stat('/dev/shm').st_dev}"
