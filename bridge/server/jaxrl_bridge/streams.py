"""The running generations: their tokens, log-probs and, exactly, the policy version that computed each.

A token belongs to the version that was served when vLLM computed it. Versions change only while vLLM is paused, and only
after `settle`: then every token computed before has been labelled. So a label is the version at the time of labelling, and
what makes it exact is that nothing lies between vLLM's engine and this module when the version changes.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

import vllm.exceptions
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError

from jaxrl_bridge.errors import BridgeError

# How vLLM says that a request makes no sense: by version, a ValueError or an error of its own.
REFUSALS = (ValueError, TypeError, *filter(None, [getattr(vllm.exceptions, "VLLMClientError", None)]))
RATE_WINDOW = 5.0  # seconds over which tokens per second are counted


@dataclass
class Adapter:
    """A LoRA adapter that vLLM has loaded and how many generations use it."""

    version: int
    request: LoRARequest
    users: int = 0


@dataclass(eq=False)
class Stream:
    """One generation. `ids` and `logp` hold what has come from vLLM and was not yet sent."""

    collector: object  # vLLM's RequestOutputCollector
    adapter: Adapter | None
    started: bool = False
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)  # [version, tokens] since the start; may be ahead of `ids`
    num_sent: int = 0
    finish_reason: str | None = None
    error: BridgeError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    reader: asyncio.Task | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def take_line(self) -> dict:
        end = self.num_sent + len(self.ids)
        line = {"ids": self.ids, "logp": self.logp, "versions": _part(self.spans, self.num_sent, end)}
        self.ids, self.logp, self.num_sent = [], [], end
        if self.finish_reason is not None:
            line["finish_reason"] = self.finish_reason
        self.news.clear()
        return line

    def label(self, num_computed: int, version: int) -> None:
        """The first `num_computed` tokens exist; those that had no label yet are of `version`."""
        count = num_computed - sum(tokens for _, tokens in self.spans)
        if count <= 0:
            return
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += count
        else:
            self.spans.append([version, count])


class Streams:
    """All generations of this server. `engine` is vLLM's AsyncLLM."""

    def __init__(self, engine, version: int):
        self.engine = engine
        self.version = version  # served now: the label of a token of the base model
        self.salt = "0"  # changes with every publish: prefixes of other weights have another salt
        self.adapter: Adapter | None = None
        self.admit = asyncio.Event()  # cleared: new generations wait
        self.admit.set()
        self.refusal: BridgeError | None = None  # set: new generations are refused
        self.running: set[Stream] = set()
        self.num_adding = 0
        self.num_held = 0  # at the gate
        self.idle = asyncio.Event()  # set while nothing runs
        self.idle.set()
        self._tokens: deque[tuple[float, int]] = deque()

    async def open(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, priority: int, left: asyncio.Future
    ) -> Stream | None:
        """Hands a request to vLLM, once the gate is open; None if the client has left (`left`) meanwhile.

        Raises BridgeError.
        """
        self.num_held += 1
        try:
            while self.refusal is None and not self.admit.is_set():
                admitted = asyncio.ensure_future(self.admit.wait())
                await asyncio.wait({admitted, left}, return_when=asyncio.FIRST_COMPLETED)
                admitted.cancel()
                if left.done():
                    return None
            if self.refusal is not None:
                raise self.refusal
        finally:
            self.num_held -= 1
        adapter = self.adapter
        self.num_adding += 1
        self.idle.clear()
        if adapter is not None:
            adapter.users += 1
        try:
            # Not `generate`: `settle` must see what lies in the collector.
            collector = await self.engine.add_request(
                request_id,
                tokens_input(prompt_ids, cache_salt=self.salt),
                params,
                lora_request=adapter and adapter.request,
                priority=priority,
            )
        except EngineDeadError as error:
            self._leave(adapter)
            raise BridgeError("engine_dead", "vLLM's engine is dead") from error
        except REFUSALS as error:
            self._leave(adapter)
            raise BridgeError("bad_request", str(error)) from error
        except BaseException:
            self._leave(adapter)
            raise
        self.num_adding -= 1
        stream = Stream(collector, adapter)
        self.running.add(stream)
        stream.reader = asyncio.create_task(self._read(stream))
        return stream

    async def close(self, stream: Stream) -> None:
        """Ends a generation for good; one that is not done is aborted."""
        if not stream.done:
            stream.reader.cancel()
            await self.engine.abort(stream.collector.request_id, internal=True)
        stream.collector.close()
        if stream in self.running:
            self._drop(stream)

    async def settle(self) -> None:
        """Returns once every token that vLLM computed before it was paused has its label.

        vLLM sends outputs and its answer to the pause through one ordered channel, so by now those outputs are in the
        client's queue or further on. An empty entry of our own behind them tells when they have been distributed. What vLLM
        holds back then, to hand out several tokens of a generation at once (--stream-interval), it counts.
        """
        if self.engine.output_handler is not None:
            queue = self.engine.engine_core.outputs_queue
            queue.put_nowait(EngineCoreOutputs())
            while not queue.empty():
                await asyncio.sleep(0)
        while any(stream.collector.output is not None for stream in self.running):
            await asyncio.sleep(0)
        states = self.engine.output_processor.request_states
        for stream in self.running:
            if (state := states.get(stream.collector.request_id)) is not None:
                stream.label(state.detokenizer.num_output_tokens(), self._version_of(stream))

    async def added(self) -> None:
        """Returns once every admitted request has reached vLLM; the gate must be closed."""
        while self.num_adding:
            await asyncio.sleep(0)

    def tokens_per_second(self) -> float:
        self._forget()
        return sum(count for _, count in self._tokens) / RATE_WINDOW

    async def _read(self, stream: Stream) -> None:
        try:
            while stream.finish_reason is None:
                self._label(stream, await stream.collector.get())
                stream.news.set()
        except EngineDeadError:
            stream.error = BridgeError("engine_dead", "vLLM's engine died")
        except BridgeError as error:
            stream.error = error
        except Exception as error:  # whatever vLLM raised belongs to this generation alone
            stream.error = BridgeError("internal", f"{type(error).__name__}: {error}")
        stream.news.set()
        if stream in self.running:
            self._drop(stream)

    def _label(self, stream: Stream, output) -> None:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        if ids:
            stream.started = True
            if completion.logprobs is None or len(completion.logprobs) != len(ids):
                raise BridgeError("internal", "vLLM returned tokens without log-probs")
            stream.ids += ids
            stream.logp += [entry[token].logprob for token, entry in zip(ids, completion.logprobs, strict=True)]
            stream.label(stream.num_sent + len(stream.ids), self._version_of(stream))
            self._forget()
            self._tokens.append((time.monotonic(), len(ids)))
        if output.finished:
            if completion.finish_reason not in ("stop", "length"):
                raise BridgeError("internal", f"vLLM ended the generation: {completion.finish_reason}")
            stream.finish_reason = completion.finish_reason
            _cross_check(stream, completion)

    def _version_of(self, stream: Stream) -> int:
        return self.version if stream.adapter is None else stream.adapter.version

    def _forget(self) -> None:
        now = time.monotonic()
        while self._tokens and self._tokens[0][0] < now - RATE_WINDOW:
            self._tokens.popleft()

    def _leave(self, adapter: Adapter | None) -> None:
        """A request that never became a stream."""
        self.num_adding -= 1
        if adapter is not None:
            adapter.users -= 1
        self._note_idle()

    def _drop(self, stream: Stream) -> None:
        self.running.discard(stream)
        if stream.adapter is not None:
            stream.adapter.users -= 1
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.running and not self.num_adding:
            self.idle.set()


def _part(spans: list[list[int]], begin: int, end: int) -> list[list[int]]:
    """Of [version, tokens] spans, those of tokens [begin, end)."""
    part, at = [], 0
    for version, tokens in spans:
        count = min(at + tokens, end) - max(at, begin)
        if count > 0:
            part.append([version, count])
        at += tokens
    return part


def _cross_check(stream: Stream, completion) -> None:
    """Where vLLM itself reports which weights computed which tokens, it must agree."""
    reported = getattr(completion, "weight_versions", None)
    if not reported or stream.adapter is not None:
        return
    theirs = [[span.version, span.end - span.start] for span in reported]
    ours = [[str(version), count] for version, count in stream.spans]
    if theirs != ours:
        raise BridgeError("version", f"tokens labelled {ours} were computed by {theirs} according to vLLM")
