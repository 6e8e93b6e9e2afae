"""The peer of `bench shared-prefix`: TRL's GRPOTrainer with vLLM in its own process. Runs in an environment without jaxrl.

    python shared_prefix_peer.py SETTING MODEL PROMPTS.jsonl PROMPTS_PER_STEP ANSWERS ANSWER_TOKENS STEPS

Settings, all with bf16 weights and optimizer, no KL term and the same random rewards:

    plain       microbatches of 16, gradient checkpointing, the correction for what vLLM's probabilities differ by (a forward pass
                over everything more)
    fast        no correction; answers all of one length, as the prompts are: then no mask of padding keeps torch from its flash kernel
    unsaved     fast without gradient checkpointing, in the largest microbatch that then fits beside vLLM
    flash       fast with the package flash_attn
    compiled    fast under torch.compile

Prints a JSON line per optimizer step: seconds since the one before (of the first: since training began), and the peak of memory.
"""

import json
import os
import random
import sys
import tempfile
import time

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "WANDB_DISABLED": "true"}

FAST = {"vllm_importance_sampling_correction": False, "generation_kwargs": {"ignore_eos": True}}
SETTINGS = {
    "plain": {},
    "fast": FAST,
    "unsaved": FAST | {"gradient_checkpointing": False, "per_device_train_batch_size": 4},
    "flash": FAST | {"attention": "flash_attention_2"},
    "compiled": FAST | {"torch_compile": True},
}


def main(setting: str, model: str, data: str, prompts: int, answers: int, answer_tokens: int, steps: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    started = time.perf_counter()
    options = dict(SETTINGS[setting])
    attention = options.pop("attention", "sdpa")
    batch = options.pop("per_device_train_batch_size", answers)
    with open(data, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    tokenizer = AutoTokenizer.from_pretrained(model)
    longest = max(len(tokenizer.encode(row["prompt"])) for row in rows)
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            max_steps=steps,
            num_generations=answers,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=prompts * answers // batch,
            max_completion_length=answer_tokens,
            learning_rate=1e-6,
            temperature=1.0,
            beta=0.0,
            bf16=True,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=longest + answer_tokens,
            model_init_kwargs={"dtype": "bfloat16", "attn_implementation": attention},
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **({"gradient_checkpointing": True} | options),
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [random.random() for _ in completions],
            args=config,
            train_dataset=Dataset.from_list(rows),
        )
        trainer.add_callback(_callback(TrainerCallback, torch, setting, started))
        trainer.train()


def _callback(base: type, torch, setting: str, started: float):
    class Steps(base):
        def on_train_begin(self, args, state, control, **_):
            _print(what="peer", setting=setting, start_seconds=time.perf_counter() - started)
            self.last = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            torch.cuda.synchronize()
            now = time.perf_counter()
            peak = torch.cuda.max_memory_allocated() / 2**30
            _print(what="step", setting=setting, step=state.global_step, seconds=now - self.last, peak_gib=peak)
            self.last = now

    return Steps()


def _print(**values) -> None:
    line = {"bench": "shared-prefix", "side": "trl"} | {
        k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()
    }
    print("\n" + json.dumps(line), flush=True)  # a line of its own, whatever is printed beside it


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
