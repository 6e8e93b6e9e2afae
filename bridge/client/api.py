"""Every route of docs/bridge.md, as a method: requests out, answers and typed errors back. No decision is made here.

The key is sent in a header and is in no message.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from bridge.client.errors import BY_KIND, BadRequest, ServerError, TimedOut, Unauthorised, Unreachable
from jaxrl.rollout.protocol import SamplerError, SamplingParams

try:
    import httpx
except ImportError as error:
    raise SamplerError('sampler = "vllm" needs httpx: pip install "jaxrl[vllm]"') from error

CONNECT_SECONDS = 10.0
REPLY_SECONDS = 30.0  # of a route that answers at once
# Between two lines of a generation. A request may wait behind others, and a running one while weights are loaded; a dead
# engine is told by the server itself, a dead host by nothing else.
LINE_SECONDS = 600.0
WORK_SECONDS = 600.0  # of a route that moves weights, when the caller names no time


class ServerApi:
    """The routes of the server at `url`. Use on one event loop. Every method raises ServerError, by `kind`."""

    def __init__(self, url: str, key: str):
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # no proxy stands before a server of our own
        )
        self._session: Session | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._client.aclose()

    async def healthy(self) -> bool:
        """Whether the server answers that it is well, within seconds."""
        try:
            response = await self._client.get("/health", timeout=httpx.Timeout(CONNECT_SECONDS))
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    async def state(self) -> dict[str, Any]:
        return await self._call("GET", "/bridge/state", timeout=REPLY_SECONDS)

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0
    ) -> AsyncIterator[dict[str, Any]]:
        """Lines of a generation as they come, each {"ids", "logp", "versions"}, the last with "finish_reason". Stop strings
        are the caller's. Closing the iterator aborts the generation there. A stream that ends early raises Unreachable.

        `params.seed` is not sent: a generator per request costs vLLM a kernel each in every step, and on a CPU it ends the engine
        when a prefill is cut into chunks."""
        body = {
            "request_id": request_id,
            "prompt_ids": list(prompt_ids),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_token_ids),
            "priority": priority,
        }
        if self._session is None or self._session.failure is not None:
            self._session = Session(self)
        async with aclosing(self._session.lines(request_id, body)) as lines:
            async for line in lines:
                if "error" in line:
                    raise self._named(line["error"])
                yield line
                if line.get("finish_reason") is not None:
                    return

    async def begin(
        self,
        version: int,
        manifest: Mapping[str, Any],
        transport: str,
        *,
        in_flight: bool,
        cache: str,
        staged: bool = False,
        force: bool = False,
        group: Mapping[str, Any] | None = None,
        timeout: float = WORK_SECONDS,
    ) -> str:
        """Opens a publish and returns its id. `manifest`: {"tensors": [{"name", "shape", "dtype"}, ..]}. `group`, of the
        transport nccl: {"unique_id", "world_size"}.
        Raises Mismatch naming a tensor, Busy, VersionRefused."""
        body = {
            "version": version,
            "manifest": manifest,
            "transport": transport,
            "in_flight": in_flight,
            "cache": cache,
            "staged": staged,
            "force": force,
            **(group or {}),
        }
        return (await self._call("POST", "/bridge/publish/begin", body, timeout=timeout))["publish_id"]

    async def put_data(self, publish_id: str, offset: int, data: bytes | memoryview, *, timeout: float = WORK_SECONDS) -> None:
        """Transport http: bytes of the bucket area from `offset` on."""
        route = f"/bridge/publish/{publish_id}/data?offset={offset}"
        with self._errors(route, timeout):
            response = await self._client.put(
                route,
                content=bytes(data),
                headers={"Content-Type": "application/octet-stream"},
                timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            )
        if response.status_code >= 400:
            raise self._error(response)

    async def bucket(
        self, publish_id: str, tensors: Sequence[Mapping[str, Any]], source: Mapping[str, Any], *, timeout: float = WORK_SECONDS
    ) -> None:
        """`tensors`: {"name", "offset" in bytes, "checksum"} each. Returns when the source may be written again (with a staged
        publish from host memory: after commit)."""
        body = {"tensors": list(tensors), "source": source}
        await self._call("POST", f"/bridge/publish/{publish_id}/bucket", body, timeout=timeout)

    async def commit(
        self,
        publish_id: str,
        tensors: Sequence[Mapping[str, Any]] = (),
        source: Mapping[str, Any] | None = None,
        *,
        timeout: float = WORK_SECONDS,
    ) -> dict[str, Any]:
        """Makes the version the served one, with a last bucket if there are `tensors`. Returns {"version", "num_bytes",
        "num_continued", "seconds", "stop_seconds"}."""
        body = {"tensors": list(tensors), "source": source} if tensors else {}
        return await self._call("POST", f"/bridge/publish/{publish_id}/commit", body, timeout=timeout)

    async def abort(self, publish_id: str, *, timeout: float = REPLY_SECONDS) -> None:
        """Gives a publish up: the old version goes on, or the server stays quarantined if tensors were loaded already."""
        await self._call("POST", f"/bridge/publish/{publish_id}/abort", {}, timeout=timeout)

    async def probe(self, path: str, token: str) -> bool:
        """Whether the server reads `token` in the file `path`. Raises BadRequest when it may not or cannot."""
        return (await self._call("POST", "/bridge/probe", {"path": path, "token": token}, timeout=REPLY_SECONDS))["shared"]

    async def adapter(self, version: int, path: str, *, timeout: float = WORK_SECONDS) -> dict[str, Any]:
        """The PEFT folder `path` serves requests from now on as `version`."""
        return await self._call("POST", "/bridge/adapter", {"version": version, "path": path}, timeout=timeout)

    async def _call(self, method: str, route: str, body: Any = None, *, timeout: float) -> dict[str, Any]:
        with self._errors(route, timeout):
            response = await self._client.request(
                method, route, json=body, timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS)
            )
        if response.status_code >= 400:
            raise self._error(response)
        try:
            return response.json()
        except ValueError:
            raise ServerError(self.url, f"{route} answered what is not JSON: {response.text[:200]!r}") from None

    @contextmanager
    def _errors(self, route: str, seconds: float) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            if isinstance(error, httpx.ConnectTimeout):
                raise Unreachable(self.url, f"no connection within {CONNECT_SECONDS:g} s") from error
            raise TimedOut(self.url, f"{route} did not answer within {seconds:g} s") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise Unreachable(self.url, f"{route}: {type(error).__name__}: {error}") from error

    def _error(self, response: httpx.Response) -> ServerError:
        if response.status_code == 401:
            return Unauthorised(self.url, "it refuses the key: JAXRL_BRIDGE_KEY must be the one that it was started with")
        try:
            return self._named(response.json()["error"])
        except (ValueError, KeyError, TypeError):
            path = response.request.url.path
            fix = ": is the server one that `python -m jaxrl_bridge.serve` started?" if response.status_code == 404 else ""
            return ServerError(self.url, f"{path} answered {response.status_code}{fix} {response.text[:200]!r}")

    def _named(self, error: Mapping[str, Any]) -> ServerError:
        return BY_KIND.get(error["kind"], ServerError)(self.url, error["message"])


class Session:
    """All generations of this client at one server over one connection: requests go out in batches, as many as have come up
    while the last batch was on its way, and every line that comes back has news of several."""

    def __init__(self, api: ServerApi):
        self._api = api
        self._queues: dict[str, asyncio.Queue[dict[str, Any] | ServerError]] = {}
        self._requests: list[dict[str, Any]] = []
        self._cancelled: list[str] = []
        self._waiting = asyncio.Event()  # something is to be sent
        self.failure: ServerError | None = None
        self._task = asyncio.create_task(self._run())

    async def lines(self, request_id: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Lines of one generation, the last with a finish reason or an error. Raises ServerError when the line breaks."""
        if self.failure is not None:
            raise self.failure
        queue = self._queues[request_id] = asyncio.Queue()
        self._requests.append(body)
        self._waiting.set()
        line: dict[str, Any] = {}
        try:
            while "error" not in line and line.get("finish_reason") is None:
                try:
                    line = await asyncio.wait_for(queue.get(), LINE_SECONDS)
                except TimeoutError:
                    raise TimedOut(self._api.url, f"a generation did not answer within {LINE_SECONDS:g} s") from None
                if isinstance(line, ServerError):
                    raise line
                yield line
        finally:
            del self._queues[request_id]
            if self.failure is None and "error" not in line and line.get("finish_reason") is None:
                self._cancelled.append(request_id)
                self._waiting.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        route = "/bridge/session"
        timeout = httpx.Timeout(REPLY_SECONDS, connect=CONNECT_SECONDS)
        try:
            with self._api._errors(route, REPLY_SECONDS):
                async with self._api._client.stream("POST", route, timeout=timeout) as response:
                    if response.status_code >= 400:
                        await response.aread()
                        raise self._api._error(response)
                    await self._serve(response)
            raise Unreachable(self._api.url, "the connection of the generations was closed")
        except BadRequest as error:  # of the connection, which is none of the generations' doing
            self._fail(Unreachable(self._api.url, f"the connection of the generations was given up: {error}"))
        except ServerError as error:
            self._fail(error)
        except Exception as error:  # what is no answer of this protocol: whoever waits must hear of it
            self._fail(ServerError(self._api.url, f"{route}: {type(error).__name__}: {error}"))
        except asyncio.CancelledError:
            self._fail(Unreachable(self._api.url, "the connection of the generations was closed here"))
            raise

    async def _serve(self, response: httpx.Response) -> None:
        lines = _lines(response)
        session_id = (await anext(lines))["session"]
        sending = asyncio.create_task(self._send(session_id))
        try:
            async for line in lines:
                for request_id, news in line["lines"].items():
                    if request_id in self._queues:
                        self._queues[request_id].put_nowait(news)
                if sending.done():
                    sending.result()
        finally:
            sending.cancel()

    async def _send(self, session_id: str) -> None:
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            requests, self._requests = self._requests, []
            cancelled, self._cancelled = self._cancelled, []
            body = {"requests": requests, "cancel": cancelled}
            await self._api._call("POST", f"/bridge/session/{session_id}", body, timeout=REPLY_SECONDS)

    def _fail(self, error: ServerError) -> None:
        self.failure = error
        for queue in self._queues.values():
            queue.put_nowait(error)


async def _lines(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    rest = b""
    async for chunk in response.aiter_raw():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line:
                yield json.loads(line)
