"""The token-exact chat: ids come from the sampler and from increments of the template, never from encoding again.

A line is one sequence of tokens in pieces: what the template added, and what a model call sampled, each with the text it
has in the template's rendering. For the next call the messages are rendered and the text is laid along the line. If every
piece is still there, what lies beyond is encoded and appended. If the template rewrote the history (Qwen3 drops earlier
thoughts) or the environment edited it, the line ends and a new one starts from the pieces that still hold: a rewrite.

A sampled token is trainable in the line that sampled it, once; in lines that inherit it, it is history.
"""

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.rollout.environment import Reply
from jaxrl.rollout.tokenizer import Tokenizer

CallKey = tuple[tuple[int, ...], int]  # (path of the chat: () or one number per fork, number of the call within it)


class PromptTooLong(Exception):
    """No token can be generated behind the prompt. The message names the lengths and the config key."""


@dataclass(frozen=True)
class LengthLimit:
    """Most tokens of a sequence, and the config key that says so."""

    tokens: int
    key: str


@dataclass(frozen=True)
class Call:
    """What a chat asks of the sampler."""

    key: CallKey
    prompt_ids: list[int]
    max_tokens: int
    stop: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Piece:
    text: str  # as the template renders it
    ids: list[int]
    call: CallKey | None = None  # None: from the template or the environment


@dataclass
class Line:
    """The first `inherited` pieces were sampled, and are trained on, elsewhere."""

    pieces: list[Piece] = field(default_factory=list)
    inherited: int = 0


@dataclass
class Book:
    """All lines of an episode and what its chats have in common."""

    tokenizer: Tokenizer
    generate: Callable[[Call], Awaitable[Answer]]
    limit: LengthLimit
    max_tokens: int
    eos_ids: frozenset[int]
    lines: list[Line] = field(default_factory=list)
    num_calls: int = 0
    num_rewrites: int = 0
    num_truncated: int = 0


class Conversation:
    """environment.Chat. One call at a time; `fork` for calls side by side."""

    def __init__(
        self, book: Book, path: tuple[int, ...] = (), messages: Sequence[Mapping[str, Any]] = (), line: Line | None = None
    ):
        self.messages: list[dict[str, Any]] = copy.deepcopy(list(messages))
        self.num_inherited_messages = len(self.messages)
        self.plain: list[dict[str, Any]] = []  # what complete() wrote and read, for the transcript
        self.forks: list[Conversation] = []
        self._book = book
        self._path = path
        self._calls = 0
        self._busy = False
        self._line = line or Line()
        book.lines.append(self._line)

    async def ask(
        self, content: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        """Adds a user message (or messages; none to go on from `messages`), generates the assistant's, adds it and
        returns it. If it raises, `messages` is as it was."""
        new = [{"role": "user", "content": content}] if isinstance(content, str) else [dict(m) for m in content]
        text = self._book.tokenizer.render([*self.messages, *new], generate=True)
        kept, whole, offset = _lay_along(self._line.pieces, text, self._book)
        added = Piece(text[offset:], self._book.tokenizer.encode(text[offset:], start=not kept))
        reply = await self._call(kept, whole, added, max_tokens, stop)
        self.messages += [*new, {"role": "assistant", "content": reply.text}]
        return reply

    async def complete(self, text: str = "", *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply:
        """Appends text as it is, without a template, and generates. `messages` plays no part. The sequence begins with
        the tokenizer's BOS if it has one."""
        pieces = self._line.pieces
        ids = self._book.tokenizer.encode(text, start=not pieces)
        added = Piece(text, ids if pieces else [*self._book.tokenizer.bos, *ids])
        if not pieces and not added.ids:
            raise ValueError("chat.complete() needs text to start from: the tokenizer has no BOS token")
        reply = await self._call(pieces, True, added, max_tokens, stop)
        self.plain += [{"role": "text", "content": text}, {"role": "completion", "content": reply.text}]
        return reply

    def fork(self) -> "Conversation":
        """A second conversation of the same episode that starts from this one's history."""
        line = Line(list(self._line.pieces), len(self._line.pieces))
        fork = Conversation(self._book, (*self._path, len(self.forks)), self.messages, line)
        self.forks.append(fork)
        return fork

    async def _call(self, kept: list[Piece], whole: bool, added: Piece, max_tokens: int | None, stop: Sequence[str]) -> Reply:
        if self._busy:
            raise RuntimeError("this chat is waiting for an answer already: use chat.fork() for calls side by side")
        book = self._book
        prompt_ids = [i for piece in [*kept, added] for i in piece.ids]
        room = book.limit.tokens - len(prompt_ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens and {book.limit.key} = {book.limit.tokens} leaves no room for an "
                f"answer: raise {book.limit.key} or shorten the task"
            )
        max_tokens = book.max_tokens if max_tokens is None else max_tokens
        if max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: a call generates at least one token")
        call = Call((self._path, self._calls), prompt_ids, min(max_tokens, room), tuple(stop))
        self._busy = True
        try:
            answer = await book.generate(call)
        finally:
            self._busy = False
        if not whole:
            book.num_rewrites += 1
            self._line = Line(kept, len(kept))
            book.lines.append(self._line)
        content, terminator = _texts(answer, book)
        if added.ids:
            self._line.pieces.append(added)
        self._line.pieces.append(Piece(content + terminator, answer.ids, call.key))
        self._calls += 1
        book.num_calls += 1
        book.num_truncated += answer.finish_reason == "length"
        return Reply(content, answer.finish_reason, len(answer.ids))


def _texts(answer: Answer, book: Book) -> tuple[str, str]:
    """The answer's text without special tokens, and the text of the end-of-sequence token that ended it, if one did."""
    ended = bool(answer.ids) and answer.ids[-1] in book.eos_ids
    ids = answer.ids[:-1] if ended else answer.ids
    return book.tokenizer.decode(ids), book.tokenizer.decode(answer.ids[-1:], special=True) if ended else ""


def _lay_along(pieces: list[Piece], text: str, book: Book) -> tuple[list[Piece], bool, int]:
    """(the leading pieces that `text` still has, whether these are all, how much of `text` they cover). An answer that
    ended with another token than the template's is kept without it: its text is unchanged."""
    offset = 0
    for i, piece in enumerate(pieces):
        if not text.startswith(piece.text, offset):
            kept = pieces[:i]
            if piece.call is not None and piece.ids and piece.ids[-1] in book.eos_ids:
                content = piece.text.removesuffix(book.tokenizer.decode(piece.ids[-1:], special=True))
                if content and text.startswith(content, offset) and not _continues(text, offset + len(content)):
                    kept = [*kept, Piece(content, piece.ids[:-1], piece.call)]
                    offset += len(content)
            return kept, False, offset
        offset += len(piece.text)
    return list(pieces), True, offset


def _continues(text: str, offset: int) -> bool:
    """Whether a word goes on at `offset`: the answer was edited, not only ended otherwise."""
    return offset < len(text) and text[offset - 1].isalnum() and text[offset].isalnum()
