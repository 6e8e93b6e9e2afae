"""The seam between a task and everything else: what an environment is and what it is given.

An environment is task rows and an async function. The function gets one row and a chat, talks to the
policy through the chat, and returns a reward:

    async def rollout(task, chat):
        reply = await chat.ask(task["question"])
        return float(task["answer"] in reply.text)

It runs in a worker process, so it may block, raise or hang: that costs its episode only.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Reply:
    """What the policy answered in one model call."""

    text: str  # special tokens left out; a stop string that ended it is the end of it
    finish_reason: str  # "stop" or "length"
    num_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What an episode was worth. `metrics` are averaged over episodes and logged."""

    reward: float
    step_rewards: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Chat(Protocol):
    """A token-exact conversation with the policy: ids come from the sampler and the template, never
    from decoding and encoding again. A history the template rewrites starts a new trajectory."""

    messages: list[dict[str, Any]]  # may be edited; what the next call renders is what counts

    async def ask(
        self, content: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        """Adds a user message (or messages: a tool's, or none), generates the assistant's, adds it and returns it."""

    async def complete(self, text: str = "", *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply:
        """Appends text as it is, without a template, and generates: for base models."""

    def fork(self) -> "Chat":
        """A second conversation of the same episode that starts from this one's history."""


Rollout = Callable[[Mapping[str, Any], Chat], Awaitable[float | Outcome]]


@dataclass(frozen=True)
class Environment:
    rollout: Rollout
    train: Sequence[Mapping[str, Any]]
    heldout: Sequence[Mapping[str, Any]] = ()
