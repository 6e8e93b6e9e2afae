"""Addition: the smallest task with a checkable answer.

Two forms. `sums` continues the text "934+1208=" and suits a small model without a chat template;
`arithmetic` asks a chat model "What is 9 + 4?". The reward is 1 if the answer is right, else 0.
"""

import random
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from jaxrl.rollout.environment import Chat, Environment

NUMBER = re.compile(r"-?\d+")


def _ordered(digits: tuple[int, int]) -> tuple[int, int]:
    if digits[0] > digits[1]:
        raise ValueError("give the fewest digits first, then the most")
    return digits


Count = Annotated[int, Field(ge=0)]
NumDigits = Annotated[int, Field(ge=1, le=100)]
Digits = Annotated[tuple[NumDigits, NumDigits], AfterValidator(_ordered)]  # fewest, most


def draw_sums(count: int, digits: tuple[int, int], smallest: int, seed: str) -> list[dict[str, Any]]:
    """`count` rows {a, b, answer} with numbers of digits[0] to digits[1] digits, each length equally likely."""
    draw = random.Random(seed)

    def number() -> int:
        length = draw.randint(*digits)
        return draw.randint(max(smallest, 10 ** (length - 1) if length > 1 else 0), 10**length - 1)

    pairs = ((number(), number()) for _ in range(count))
    return [{"a": a, "b": b, "answer": a + b} for a, b in pairs]


def last_number(text: str) -> int | None:
    found = NUMBER.findall(text)
    return int(found[-1]) if found else None


async def continue_sum(task: Mapping[str, Any], chat: Chat) -> float:
    reply = await chat.complete(f"{task['a']}+{task['b']}=")
    return float(last_number(reply.text) == task["answer"])


async def ask_sum(task: Mapping[str, Any], chat: Chat) -> float:
    reply = await chat.ask(f"What is {task['a']} + {task['b']}?")
    return float(last_number(reply.text) == task["answer"])


def heldout_sums(count: int, digits: tuple[int, int]) -> list[dict[str, Any]]:
    """The held-out rows of `sums`: the same for every seed, so that runs and traces can keep clear of them."""
    rows = {(row["a"], row["b"]): row for row in draw_sums(2 * count, digits, 0, "heldout")}
    return list(rows.values())[:count]


def sums(seed: int, train: Count = 100_000, heldout: Count = 512, digits: Digits = (1, 3)) -> Environment:
    """ "934+1208=" for a base model. No held-out pair is among the training rows."""
    heldout_rows = heldout_sums(heldout, digits)
    reserved = {(row["a"], row["b"]) for row in heldout_rows}
    train_rows = [row for row in draw_sums(train, digits, 0, f"train {seed}") if (row["a"], row["b"]) not in reserved]
    return Environment(rollout=continue_sum, train=train_rows, heldout=heldout_rows)


def arithmetic(seed: int, train: Count = 4000, heldout: Count = 256, digits: Digits = (1, 1)) -> Environment:
    """ "What is 9 + 4?" for a chat model. One-digit sums are 81 in all: there, held-out rows repeat training rows."""
    return Environment(
        rollout=ask_sum,
        train=draw_sums(train, digits, 1, f"train {seed}"),
        heldout=draw_sums(heldout, digits, 1, f"heldout {seed}"),
    )
