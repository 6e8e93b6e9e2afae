"""A Hugging Face tokenizer folder as the run needs it: text to ids in increments, ids to text, the chat template.

Nothing here imports torch or jax: environment workers load it too.
"""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # or it says that torch is missing, once a process

from transformers import AutoTokenizer, PreTrainedTokenizerBase  # noqa: E402

from jaxrl.config import ConfigError  # noqa: E402

KEY = "model.tokenizer"
# Text put before what is encoded or decoded, and taken off again: the first that the vocabulary can hold is used.
ANCHORS = ("\n", "a", "0", "=", ".")


class ChatTemplateError(Exception):
    """The tokenizer has no chat template, or the template refused the messages."""


@dataclass(frozen=True)
class Tokenizer:
    """`bos`: ids that begin a plain text, at most one. `anchor`: (text, its ids) or None, see `encode` and `decode`."""

    hf: PreTrainedTokenizerBase
    folder: Path
    bos: tuple[int, ...]
    anchor: tuple[str, tuple[int, ...]] | None

    def encode(self, text: str, *, start: bool) -> list[int]:
        """Ids of `text`, without special tokens of the tokenizer's own. Past the start of a sequence a tokenizer that
        puts a space before every text (SentencePiece's) must not: it is encoded behind an anchor then."""
        if not text:
            return []
        if start or self.anchor is None:
            return self._encode(text)
        anchor_text, anchor_ids = self.anchor
        ids = self._encode(anchor_text + text)
        return ids[len(anchor_ids) :] if tuple(ids[: len(anchor_ids)]) == anchor_ids else self._encode(text)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids from the middle of a sequence: a leading space is kept. `special`: with special tokens."""
        anchor_text, anchor_ids = self.anchor or ("", ())
        text = self._decode([*anchor_ids, *ids], special)
        return text[len(anchor_text) :] if text.startswith(anchor_text) else self._decode(ids, special)

    def render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> str:
        """Text of the chat template. `generate`: with the prompt of the assistant's turn. Raises ChatTemplateError."""
        if not self.hf.chat_template:
            raise ChatTemplateError(
                f"the tokenizer in {self.folder} has no chat template: use chat.complete(), or a `{KEY}` folder whose "
                "tokenizer_config.json (or chat_template.jinja) has one"
            )
        try:
            return self.hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generate)
        except Exception as error:  # templates raise whatever jinja and their own raise_exception raise
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(_ids(self.hf, text))

    def _decode(self, ids: Sequence[int], special: bool) -> str:
        return self.hf.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)


@functools.lru_cache(maxsize=64)
def _ids(hf: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Remembered, because the episodes of a group begin with the same prompt: 5,000 tokens take 20 ms each time."""
    return tuple(hf.encode(text, add_special_tokens=False))


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Loads a folder with tokenizer.json. Raises ConfigError naming model.tokenizer if it is missing or unreadable."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(KEY, f"no such folder: {folder}")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(KEY, f"{folder} has no tokenizer.json: save the tokenizer there with save_pretrained")
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever transformers raises about the files is the user's to read
        raise ConfigError(KEY, f"{folder} does not load as a tokenizer: {error}") from error
    plain = Tokenizer(hf, folder, bos=(), anchor=None)
    begins = hf.encode("", add_special_tokens=True)
    bos = tuple(begins[:1]) if begins and begins[0] == hf.bos_token_id else ()
    anchors = ((text, tuple(plain._encode(text))) for text in ANCHORS)
    return Tokenizer(hf, folder, bos, next((a for a in anchors if a[1] and plain._decode(a[1], False) == a[0]), None))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError if the tokenizer has an id that the model has no embedding for."""
    token, largest = max(tokenizer.hf.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise ConfigError(
            KEY,
            f"the tokenizer in {tokenizer.folder} goes up to id {largest} ({token!r}), the model's vocab_size is "
            f"{vocab_size}: use the model's own tokenizer",
        )


def eos_token_ids(tokenizer: Tokenizer, checkpoint: str | Path | None = None) -> tuple[int, ...]:
    """Ids that end a generation: of generation_config.json (the checkpoint's, else the tokenizer folder's), the
    tokenizer's, and the token with which the chat template ends an assistant's turn. Raises ConfigError if there is none."""
    found: list[int] = []
    for folder in (checkpoint, tokenizer.folder):
        if folder is not None and (path := Path(folder) / "generation_config.json").is_file():
            eos = json.loads(path.read_text()).get("eos_token_id")
            found += eos if isinstance(eos, list) else [] if eos is None else [eos]
            break
    if tokenizer.hf.eos_token_id is not None:
        found.append(tokenizer.hf.eos_token_id)
    end_of_turn = _end_of_turn(tokenizer)
    if end_of_turn is not None:
        found.append(end_of_turn)
    if not found:
        raise ConfigError(KEY, f"{tokenizer.folder} names no end-of-sequence token: set eos_token in tokenizer_config.json")
    return tuple(sorted(set(found)))


def _end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token right behind an assistant's text in the chat template, if there is one."""
    if not tokenizer.hf.chat_template:
        return None
    answer = "An answer."
    messages = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": answer}]
    _, _, rest = tokenizer.render(messages, generate=False).rpartition(answer)
    ids = tokenizer.encode(rest, start=False)
    special = {i for i, token in tokenizer.hf.added_tokens_decoder.items() if token.special}
    return ids[0] if ids and ids[0] in special else None
