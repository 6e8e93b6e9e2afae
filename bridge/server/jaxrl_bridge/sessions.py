"""All generations of one client over one connection.

A connection for each generation costs client and server some milliseconds of Python; hundreds of short ones would wait for
that, not for vLLM. A session is one response that stays open: requests are submitted beside it, and every line carries what is
new of all of them.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable

from jaxrl_bridge.errors import BridgeError

LINE_INTERVAL = 0.02  # seconds: tokens that come faster share a line, for a line costs both sides more than a token
SIGN_OF_LIFE = 5.0  # seconds without news after which an empty line is sent


class Session:
    """`bridge` opens and closes generations; `left` is done when the client has gone, and all of them end."""

    def __init__(self, bridge, left: asyncio.Future):
        self.id = uuid.uuid4().hex
        self._bridge = bridge
        self._left = left
        self._opening: dict[str, asyncio.Task] = {}
        self._streams: dict[str, object] = {}

    async def submit(self, requests: list[dict], cancel: list[str]) -> None:
        """Starts generations, and ends those of `cancel`. What is wrong with one is told in its line."""
        for body in requests:
            request_id = body["request_id"]
            if request_id in self._opening or request_id in self._streams:
                raise BridgeError("bad_request", f"{request_id} is running already")
            self._opening[request_id] = asyncio.create_task(self._bridge.open(body, self._left))
        for request_id in cancel:
            if task := self._opening.pop(request_id, None):
                task.cancel()
                task.add_done_callback(self._drop_late)
            if stream := self._streams.pop(request_id, None):
                await self._bridge.close(stream)

    async def run(self, send: Callable[[dict], Awaitable[None]]) -> None:
        """Sends lines {"lines": {request_id: line of /bridge/generate, or {"error"}}} until the client has gone."""
        await send({"session": self.id})
        sent = time.monotonic()
        while not self._left.done():
            await asyncio.wait({self._left}, timeout=LINE_INTERVAL)
            lines = await self._news()
            if lines or time.monotonic() - sent > SIGN_OF_LIFE:
                await send({"lines": lines})
                sent = time.monotonic()

    async def close(self) -> None:
        await self.submit([], [*self._opening, *self._streams])

    async def _news(self) -> dict[str, dict]:
        lines = {}
        for request_id, task in [item for item in self._opening.items() if item[1].done()]:
            del self._opening[request_id]
            error = task.exception()
            if error is None:
                self._streams[request_id] = task.result()
            elif isinstance(error, KeyError):
                lines[request_id] = BridgeError("bad_request", f"the request lacks {error}").as_json()
            elif isinstance(error, BridgeError):
                lines[request_id] = error.as_json()
            else:
                lines[request_id] = BridgeError("internal", f"{type(error).__name__}: {error}").as_json()
        for request_id, stream in list(self._streams.items()):
            if stream is None:  # the client has left
                del self._streams[request_id]
            elif stream.news.is_set():
                done, error = stream.done, stream.error
                lines[request_id] = stream.take_line() | (error.as_json() if error is not None else {})
                if done:
                    del self._streams[request_id]
                    await self._bridge.close(stream)
        return lines

    def _drop_late(self, task: asyncio.Task) -> None:
        """A generation that was opened in the moment in which it was cancelled."""
        if not task.cancelled() and task.exception() is None and task.result() is not None:
            asyncio.ensure_future(self._bridge.close(task.result()))
