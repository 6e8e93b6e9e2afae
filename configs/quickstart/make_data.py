"""Writes the quickstart's tokenizer and traces beside this file.

A trace works a sum out from the right and then states it: "934+1208=" continues as "2412;2142".
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jaxrl.envs.arithmetic import draw_sums, heldout_sums

FOLDER = Path(__file__).parent
NUM_TRACES = 2000
CHARACTERS = "0123456789+=;"


def write_tokenizer() -> None:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_traces() -> None:
    reserved = {(row["a"], row["b"]) for row in heldout_sums(512, (1, 3))}
    rows = [row for row in draw_sums(2 * NUM_TRACES, (1, 3), 0, "traces") if (row["a"], row["b"]) not in reserved]
    with open(FOLDER / "traces.jsonl", "w") as file:
        for row in rows[:NUM_TRACES]:
            answer = str(row["answer"])
            print(json.dumps({"prompt": f"{row['a']}+{row['b']}=", "completion": f"{answer[::-1]};{answer}"}), file=file)


if __name__ == "__main__":
    write_tokenizer()
    write_traces()
