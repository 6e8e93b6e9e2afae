"""Writes the quickstart's tokenizer and traces beside this file.

The traces are those of a pupil who mostly answers at once, and then forgets to carry, and sometimes works the sum out:
"934+128=" continues as "952" seven times out of ten, and otherwise as "=48012,32106,91010;1062": from the right, every
column's two digits, the carry and the sum, then the answer.
"""

import json
import random
from itertools import zip_longest
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jaxrl.envs.arithmetic import draw_sums, heldout_sums

FOLDER = Path(__file__).parent
NUM_TRACES = 5000
SHARE_AT_ONCE = 0.7
CHARACTERS = "0123456789+=,;"


def write_tokenizer() -> None:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def columns(a: int, b: int) -> list[tuple[int, int]]:
    """The digits of both numbers, from the right."""
    return [(int(x), int(y)) for x, y in zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0")]


def answer_at_once(a: int, b: int) -> str:
    """The sum as it comes out when nothing is carried."""
    return "".join(str((x + y) % 10) for x, y in reversed(columns(a, b)))


def work_out(a: int, b: int) -> str:
    carry, steps = 0, []
    for x, y in columns(a, b):
        steps.append(f"{x}{y}{carry}{x + y + carry:02d}")
        carry = (x + y + carry) // 10
    return f"={','.join(steps)};{a + b}"


def write_traces() -> None:
    reserved = {(row["a"], row["b"]) for row in heldout_sums(512, (1, 3))}
    rows = [row for row in draw_sums(2 * NUM_TRACES, (1, 3), 0, "traces") if (row["a"], row["b"]) not in reserved]
    draw = random.Random("habits")
    with open(FOLDER / "traces.jsonl", "w") as file:
        for row in rows[:NUM_TRACES]:
            habit = answer_at_once if draw.random() < SHARE_AT_ONCE else work_out
            trace = {"prompt": f"{row['a']}+{row['b']}=", "completion": habit(row["a"], row["b"])}
            print(json.dumps(trace), file=file)


if __name__ == "__main__":
    write_tokenizer()
    write_traces()
