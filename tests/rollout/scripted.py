"""What rollout tests share: a sampler that follows a script, and small tokenizers with real chat templates."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl.data import Source
from jaxrl.rollout.protocol import Completion, SampledTokens, SamplingParams

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = "the assistant answers a user who asks what the system is for and what is thirteen plus four, then thinks, thinks again and answers the user\n"


def save_tokenizer(folder: Path, template: str | None) -> Path:
    """A small byte-level BPE with the special tokens of ChatML and Qwen3's thought marks (not special)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if template is not None:
        settings["chat_template"] = (TEMPLATES / f"{template}.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


Script = Callable[[Sequence[int], SamplingParams], tuple[list[int], str]]


class ScriptedSampler:
    """Answers each prompt with `script(prompt_ids, params)`: (ids, finish reason). Log-probs depend on the seed alone, the
    version is the number of the call."""

    def __init__(self, script: Script, seconds: float = 0.0):
        self.script = script
        self.seconds = seconds
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.running = 0
        self.most_running = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> Completion:
        version = len(self.prompts)
        self.prompts.append(list(prompt_ids))
        self.params.append(params)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        ids, reason = self.script(prompt_ids, params)
        n = len(ids)
        policy = -np.random.default_rng(params.seed).random(n, np.float32)
        tokens = SampledTokens(np.array(ids, np.int32), policy, policy - 1, np.full(n, version), np.full(n, Source.PLAIN))
        return Completion(tokens, reason)
