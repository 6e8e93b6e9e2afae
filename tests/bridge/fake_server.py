"""A stand-in for a bridge server: its routes over a real socket, a rule in place of a model, and every way to go wrong.

In a test's own event loop (`async with FakeServer() as server`), or as a process: `python fake_server.py --port N`.
"""

import argparse
import asyncio
import json
import os
import signal

KEY = "a-key-of-no-one"


def next_token(ids: list[int]) -> int:
    """What the rule samples behind `ids`: all of them matter."""
    return (sum((i + 1) * token for i, token in enumerate(ids)) + len(ids)) % 97


def logp(ids: list[int], version: int) -> float:
    return -version - len(ids) / 1024


class FakeServer:
    """Knobs, to be set at any time: `token_seconds`; `generate_status` and `publish_error` (kind, message) are answered
    instead; `drop_after` tokens the connection breaks; `hangs`: no answer ever; `silent`: generations send nothing."""

    def __init__(self, key: str = KEY, token_seconds: float = 0.002):
        self.key, self.token_seconds = key, token_seconds
        self.version, self.quarantined, self.paused = -1, None, False
        self.generate_status: int | None = None
        self.publish_error: tuple[str, str] | None = None
        self.quarantines = False  # a failed publish leaves it so
        self.drop_after: int | None = None
        self.hangs = self.silent = False
        self.may_commit = asyncio.Event()  # cleared: a commit takes until it is set
        self.may_commit.set()
        self.extra_state: dict = {}
        self.requests: list[dict] = []  # of sessions
        self.publishes: list[dict] = []  # bodies of begin
        self.aborts = 0
        self.running = 0
        self._open: dict | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._sessions: dict[str, tuple[asyncio.StreamWriter, dict[str, asyncio.Task]]] = {}
        self._admit = asyncio.Event()
        self._admit.set()

    async def __aenter__(self):
        await self.listen(0)
        return self

    async def __aexit__(self, *_):
        await self.die()

    async def listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def die(self) -> None:
        """As by kill -9: the port closes, every connection breaks."""
        self._server.close()
        self.drop()
        await asyncio.sleep(0)

    def drop(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def come_back(self) -> None:
        """As a fresh process on the same port."""
        self.version, self.quarantined, self.paused, self._open = -1, None, False, None
        self._admit.set()
        await self.listen(self.port)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                while self.hangs:
                    await asyncio.sleep(0.01)
                allowed = path == "/health" or headers.get("authorization") == f"Bearer {self.key}"
                await self._answer(method, path, body, allowed, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, method: str, path: str, body: bytes, allowed: bool, writer: asyncio.StreamWriter) -> None:
        if not allowed:
            return self._json(writer, _error("bad_request", "no key"), 401)
        if path == "/health":
            return self._json(writer, {})
        if path == "/bridge/state":
            return self._json(writer, self.state())
        if path == "/bridge/session":
            return await self._session(writer)
        if path.startswith("/bridge/session/"):
            answer = self._submit(path.split("/")[-1], json.loads(body))
            return self._json(writer, answer, 404 if "error" in answer else 200)
        if path.startswith("/bridge/publish/"):
            route = path.split("?")[0].split("/")[-1]
            answer = await self._publish(route, json.loads(body) if body and method == "POST" else {})
            return self._json(writer, answer, 409 if "error" in answer else 200)
        self._json(writer, _error("bad_request", f"no route {path}"), 404)

    def state(self) -> dict:
        return {
            "protocol": 1,
            "vllm": "stand-in",
            "device": "cpu",
            "version": self.version,
            "quarantined": self.quarantined,
            "paused": self.paused,
            "running": self.running,
            "waiting": 0,
            "kv_use": 0.0,
            "tokens_per_second": 0.0,
            "max_model_len": 4096,
            "dtype": "float32",
            "transports": ["http"],
            "logprobs_mode": "processed_logprobs",
            "lora": False,
            "host_id": "nowhere",
            "uuid": None,
            "pid": os.getpid(),
        } | self.extra_state

    async def _session(self, writer: asyncio.StreamWriter) -> None:
        name = f"s{len(self._sessions)}"
        tasks: dict[str, asyncio.Task] = {}
        self._sessions[name] = writer, tasks
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: application/x-ndjson\r\n\r\n")
        try:
            await _chunk(writer, {"session": name})
            while not writer.transport.is_closing():
                await asyncio.sleep(0.01)
        finally:
            for task in tasks.values():
                task.cancel()

    def _submit(self, name: str, body: dict) -> dict:
        if name not in self._sessions:
            return _error("bad_request", f"no session {name}")
        writer, tasks = self._sessions[name]
        for request in body["requests"]:
            tasks[request["request_id"]] = asyncio.create_task(self._generate(request, writer))
        for request_id in body["cancel"]:
            tasks[request_id].cancel()
        return {}

    async def _generate(self, body: dict, writer: asyncio.StreamWriter) -> None:
        async def emit(line: dict) -> None:
            await _chunk(writer, {"lines": {body["request_id"]: line}})

        if self.generate_status is not None:
            return await emit(_error("internal", f"out of order: {self.generate_status}"))
        await self._admit.wait()
        if self.quarantined:
            return await emit(_error("quarantined", self.quarantined))
        self.requests.append(body)
        ids = list(body["prompt_ids"])
        self.running += 1
        try:
            for n in range(1, body["max_tokens"] + 1):
                await asyncio.sleep(self.token_seconds)
                while self.paused or self.silent:
                    await asyncio.sleep(0.005)
                token = next_token(ids)
                line = {"ids": [token], "logp": [logp(ids, self.version)], "versions": [[self.version, 1]]}
                ids.append(token)
                if token in body["stop_token_ids"]:
                    line["finish_reason"] = "stop"
                elif n == body["max_tokens"]:
                    line["finish_reason"] = "length"
                await emit(line)
                if n == self.drop_after:
                    return writer.transport.abort()
                if "finish_reason" in line:
                    return
        except ConnectionError:
            pass  # the client has gone
        finally:
            self.running -= 1

    async def _publish(self, route: str, body: dict) -> dict:
        if route == "begin":
            self.publishes.append(body)
            if body["version"] <= self.version and not body["force"]:
                return _error("version", f"version {body['version']} is not above {self.version}")
            self._open, self.paused = body, True
            self._admit.clear()
            return {"publish_id": "p"}
        if route == "abort":
            self.aborts += 1
            self._end()
            return {"quarantined": self.quarantined}
        if self._open is None:
            return _error("bad_request", "no publish is open")
        if route == "commit":
            await self.may_commit.wait()
            if self.publish_error is not None:
                if self.quarantines:
                    self.quarantined = self.publish_error[1]
                self._end()
                return _error(*self.publish_error)
            self.version, self.quarantined = self._open["version"], None
            self._end()
            return {"version": self.version, "num_bytes": 4, "num_continued": self.running, "seconds": 0.0, "stop_seconds": 0.0}
        return {}

    def _end(self) -> None:
        self._open, self.paused = None, self.quarantined is not None
        self._admit.set()

    def _json(self, writer: asyncio.StreamWriter, answer: dict, status: int = 200) -> None:
        text = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)


async def _chunk(writer: asyncio.StreamWriter, line: dict) -> None:
    text = json.dumps(line).encode() + b"\n"
    writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
    await writer.drain()


def _error(kind: str, message: str) -> dict:
    return {"error": {"kind": kind, "message": message}}


async def _main(port: int, token_seconds: float) -> None:
    server = FakeServer(os.environ["JAXRL_BRIDGE_KEY"], token_seconds)
    await server.listen(port)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 0)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--seed")
    parser.add_argument("--port", type=int)
    parser.add_argument("--token-seconds", type=float, default=0.002)
    arguments = parser.parse_args()
    asyncio.run(_main(arguments.port, arguments.token_seconds))
