"""GSM8K: grade-school word problems with a number for an answer, checked by math-verify.

Source of the data: envs/data/gsm8k/SOURCE.md.
"""

import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.rollout.environment import Chat, Environment, Outcome

DATA = Path(__file__).parent / "data" / "gsm8k"
INSTRUCTION = "Think step by step, then give the final answer as a number inside \\boxed{}."


def read_rows(split: str) -> list[dict[str, Any]]:
    """Rows {question, answer} of `split` (train or test); the answer is the number after "####"."""
    with lzma.open(DATA / f"{split}.jsonl.xz", "rt") as file:
        rows = [json.loads(line) for line in file]
    return [{"question": r["question"], "answer": r["answer"].rsplit("####", 1)[1].strip().replace(",", "")} for r in rows]


def is_correct(text: str, answer: str) -> bool:
    """Whether the final answer in `text` equals `answer`, by value."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # 2 s to import, workers only

    # math-verify's own timeouts use signals; an environment's worker process is killed from outside instead.
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return verify(parse(answer, parsing_timeout=None), parse(text, targets, parsing_timeout=None), timeout_seconds=None)


async def solve(task: Mapping[str, Any], chat: Chat) -> Outcome:
    reply = await chat.ask(f"{task['question']}\n{INSTRUCTION}")
    return Outcome(
        reward=float(is_correct(reply.text, task["answer"])),
        metrics={"boxed": float("\\boxed" in reply.text), "finished": float(reply.finish_reason == "stop")},
    )


def gsm8k(seed: int) -> Environment:
    return Environment(rollout=solve, train=read_rows("train"), heldout=read_rows("test"))
