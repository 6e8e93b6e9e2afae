"""The typed config tree: one TOML file describes a run.

A wrong key, a wrong value or a combination that cannot work fails when the file is read, with the
key's dotted name and the fix. Nothing here imports jax: reading a config is instant.
"""

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator


class ConfigError(Exception):
    """A config key that cannot work. `key` is its dotted name in the TOML file."""

    def __init__(self, key: str, problem: str):
        super().__init__(f"config key `{key}`: {problem}")
        self.key = key


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraConfig(_Table):
    rank: int = Field(default=16, ge=1, description="Rank of the update.")
    alpha: float = Field(default=32.0, gt=0, description="The update is scaled by alpha / rank.")
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Linear layers that get an adapter, by their Hugging Face names.",
    )
    adapter: str | None = Field(default=None, description="Folder of a PEFT adapter to start from.")


class ModelConfig(_Table):
    checkpoint: str | None = Field(default=None, description="Folder of a Hugging Face checkpoint (config.json, safetensors).")
    architecture: dict[str, Any] | None = Field(
        default=None, description="Keys of a Hugging Face config.json: a model with random weights, instead of a checkpoint."
    )
    tokenizer: str | None = Field(default=None, description="Folder of a Hugging Face tokenizer; the checkpoint's if left out.")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(default="float32", description="Dtype of activations and matmuls.")
    param_dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32", description="Dtype of the trained parameters and their optimizer state."
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="full",
        description="What a layer keeps for its backward pass: everything, its matmul outputs, or its input only.",
    )
    lora: LoraConfig | None = Field(default=None, description="Train low-rank adapters; the base stays frozen.")

    @model_validator(mode="after")
    def _one_source(self):
        if (self.checkpoint is None) == (self.architecture is None):
            raise ValueError("set exactly one of `checkpoint` and `architecture`")
        if self.architecture is not None and self.tokenizer is None:
            raise ValueError("`architecture` has no tokenizer of its own: set `tokenizer`")
        return self


class EnvConfig(_Table):
    name: str = Field(description="A built-in task, or your own function: my_task.py:rollout.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of a built-in task.")
    data: str | None = Field(default=None, description="JSONL file of task rows, for a function of your own.")
    heldout: str | None = Field(default=None, description="JSONL file of held-out task rows, for a function of your own.")
    workers: int = Field(default=1, ge=1, description="Processes that run environments and rewards.")
    timeout_seconds: float = Field(default=120.0, gt=0, description="Longest time one episode may take, rewards included.")
    concurrency: int = Field(default=1024, ge=1, description="Most episodes of this environment in progress at once.")


class SamplingConfig(_Table):
    max_tokens: int = Field(default=256, ge=1, description="Most tokens one model call may generate.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature; the trainer divides its logits by it too.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus truncation; 1 is off.")
    top_k: int = Field(default=0, ge=0, description="Keep the k most likely tokens; 0 is off.")
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="Drop tokens below this share of the most likely one's probability."
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Strings that end a generation, beside the end-of-sequence token."
    )


class SamplerConfig(_Table):
    kind: Literal["embedded", "vllm"] = Field(
        default="embedded", description="What generates: the JAX engine inside this process, or vLLM servers beside it."
    )
    slots: int = Field(default=64, ge=1, description="Sequences decoded at once; of vLLM, by each server.")
    max_length: int = Field(default=1024, ge=2, description="Most tokens of a sequence, prompt included.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="Dtype of the sampler's weights and KV cache. float16 (vllm): eight times finer than bfloat16, up to 65,504.",
    )
    page_size: int = Field(default=16, ge=1, description="embedded: tokens per page of the KV cache.")
    pages: int = Field(default=0, ge=0, description="embedded: pages of the KV cache; 0: enough for every slot at max_length.")
    prefill_chunk: int = Field(default=128, ge=1, description="embedded: prompt tokens computed per prefill step.")
    python: str = Field(
        default=".vllm/bin/python",
        min_length=1,
        description="vllm: interpreter of vLLM's environment, as `make vllm-env` makes it.",
    )
    urls: tuple[str, ...] = Field(
        default=(),
        description="vllm: servers that run already, instead of starting any; their key is read from JAXRL_BRIDGE_KEY.",
    )
    replicas: int = Field(default=1, ge=1, description="vllm: servers to start.")
    devices: tuple[str, ...] = Field(
        default=(), description="vllm: CUDA_VISIBLE_DEVICES of each server, in order; empty: all see what the trainer sees."
    )
    memory: float = Field(
        default=0.4, gt=0, lt=1, description="vllm: share of a GPU's memory that a server takes, weights and KV cache together."
    )
    transport: Literal["auto", "shm", "cuda_ipc", "nccl", "http", "file"] = Field(
        default="auto",
        description="vllm: how weights reach a server. shm: memory of the host; cuda_ipc: memory of its GPU; nccl: a broadcast to "
        "GPUs of another host; file: a shared filesystem; auto: the quickest that reaches.",
    )
    shared_folder: str | None = Field(
        default=None, description="vllm: folder that trainer and servers share, for transport = file."
    )
    cache: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="vllm: what a publish under running generations does to their context: computed anew by the new weights, or kept.",
    )
    start_seconds: float = Field(default=600.0, gt=0, description="vllm: longest time a server may take to start.")
    environment: tuple[str, ...] = Field(default=(), description="vllm: environment variables of the servers, each NAME=VALUE.")
    flags: tuple[str, ...] = Field(default=(), description="vllm: more options of `vllm serve`, over those that the run sets.")

    @field_validator("environment")
    @classmethod
    def _assignments(cls, environment):
        for entry in environment:
            if not entry.partition("=")[0].isidentifier() or "=" not in entry:
                raise ValueError(f"{entry!r} sets no variable: write NAME=VALUE")
        return environment

    @field_validator("urls")
    @classmethod
    def _reachable_safely(cls, urls):
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is no URL: write http://127.0.0.1:PORT, or https://HOST")
            if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
                raise ValueError(
                    f"{url} would send the key and the weights in the clear: use https, or a tunnel to a port of this host"
                )
        return urls


class PipelineConfig(_Table):
    mode: Literal["sync", "periodic", "partial", "async", "inflight"] = Field(
        default="sync",
        description="sync: generate, train, publish, repeat. periodic: steps are taken while the rest of publish_every steps' groups run; "
        "weights are published once all have ended. partial: a step cuts the groups that run, and they continue after it. async: rollouts "
        "never stop. inflight: weights also change under running generations.",
    )
    steps: int = Field(default=100, ge=1, description="Optimizer steps of the run.")
    groups_per_step: int = Field(default=16, ge=1, description="Groups trained on in one optimizer step.")
    group_size: int = Field(default=8, ge=1, description="Episodes per task.")
    extra_episodes: int = Field(
        default=0,
        ge=0,
        description="not in sync: so many more episodes of a task are started, and the first group_size to end are its group. That "
        "favours short answers: extra/kept_tokens_mean and extra/left_out_tokens_mean say by how much.",
    )
    max_lag: int = Field(
        default=1, ge=0, description="partial, async and inflight: most policy versions between sampling and training."
    )
    window: int = Field(
        default=4, ge=1, description="partial, async and inflight: a group may be passed by at most window - 1 later ones."
    )
    min_groups: int = Field(
        default=0,
        ge=0,
        description="not in sync: a step is taken as soon as so many groups are there, without the others; 0: groups_per_step.",
    )
    workers: int = Field(default=0, ge=0, description="not in sync: groups that run at once; 0: as many as the lag allows.")
    queue: int = Field(
        default=0,
        ge=0,
        description="not in sync: finished groups that may wait before they hold their workers; 0: any number.",
    )
    publish_every: int = Field(default=1, ge=1, description="not in sync: steps between two publishes, or of a period.")
    publish: Literal["push", "pull"] = Field(
        default="push",
        description="async and inflight: weights are published when they are there, or, from publish_every steps on, when the sampler asks: "
        "when no call waits for a slot.",
    )


class AlgorithmConfig(_Table):
    loss: Literal["grpo", "ppo_clip", "cispo", "reinforce", "gspo", "m2po", "sao", "sat", "tba", "dpo"] = Field(
        default="grpo", description="The rule that turns ratios and advantages into a loss."
    )
    baseline: Literal["group", "leave_one_out", "best_worst", "none"] = Field(
        default="group",
        description="group: advantage = reward - mean of the group. leave_one_out: - mean of its other episodes (RLOO). best_worst: "
        "1 for its best episode, -1 for its worst, the others are left out (dpo). none: advantage = reward.",
    )
    scale_by_std: bool = Field(
        default=True, description="Divide the advantage by the group's standard deviation (off in Dr. GRPO)."
    )
    turn_scaling: Literal["none", "count", "constant"] = Field(
        default="none",
        description="What the advantage of a multi-turn episode is divided by: its number of turns, or turn_constant.",
    )
    turn_constant: float = Field(
        default=10.0, gt=0, description="Turns that an episode counts as, for turn_scaling = constant."
    )
    old_policy: Literal["sampling", "proximal", "interpolated"] = Field(
        default="sampling",
        description="What the ratio r compares with. sampling: the weights that sampled the token. proximal: those at the start of the "
        "optimizer step (decoupled PPO). interpolated: between the two, by lag (A-3PO).",
    )
    clip_low: float = Field(default=0.2, gt=0, description="The ratio is clipped at 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped at 1 + clip_high (DAPO: 0.28).")
    normaliser: Literal["tokens", "sequences", "constant"] = Field(
        default="tokens",
        description="Denominator over the step: trainable tokens (DAPO), mean over sequences of their token means (GRPO), or a constant per sequence (Dr. GRPO).",
    )
    normaliser_constant: float = Field(
        default=0.0, ge=0, description="Tokens per sequence for normaliser = constant; 0: sampling.max_tokens."
    )
    correction_level: Literal["token", "sequence"] = Field(
        default="token",
        description="Whether the weight w = exp(old policy - behaviour log-prob), which corrects for what the sampler made different, is of "
        "the token or the product over its episode.",
    )
    correction_cap: float = Field(
        default=5.0,
        gt=0,
        description="Cap of the weight w that corrects for truncated, lossy or stale sampling.",
    )
    mask_level: Literal["none", "token", "sequence", "geometric"] = Field(
        default="none",
        description="Whose w must lie within [mask_low, mask_high], else its tokens give no gradient: the token's, its episode's product, "
        "or that product's geometric mean.",
    )
    mask_low: float = Field(default=0.5, ge=0, description="Least w that is kept (IcePop: 0.2).")
    mask_high: float = Field(default=5.0, gt=0, description="Largest w that is kept.")
    veto: float = Field(
        default=0.0, ge=0, description="An episode with a token of a smaller w than this gives no gradient; 0 is off."
    )
    entropy_weight: float = Field(default=0.0, description="Weight of the entropy bonus.")
    kl_weight: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL penalty towards the reference policy: the weights at step 0, or the base under adapters.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="Estimator of that KL from sampled tokens.")
    beta: float = Field(default=0.1, gt=0, description="tba and dpo: strength of the tie to the reference policy.")


class PackingConfig(_Table):
    row_length: int = Field(default=1024, ge=2, description="Tokens per row (T).")
    rows: int = Field(default=1, ge=1, description="Rows per microbatch over the whole mesh; a multiple of data × fsdp.")
    reads: int = Field(default=0, ge=0, description="Log-prob reads per row (U); 0: row_length.")
    terms: int = Field(default=0, ge=0, description="Loss terms per row (M); 0: twice row_length.")
    segments: int = Field(default=0, ge=0, description="Tree segments per row (S); 0: an eighth of row_length, at least 64.")
    trajectories: int = Field(default=0, ge=0, description="Trajectories per row (N); 0: an eighth of row_length, at least 64.")
    min_shared: int = Field(default=1, ge=1, description="Shortest run of tokens worth sharing.")


class AttentionConfig(_Table):
    impl: Literal["auto", "reference"] = Field(
        default="auto",
        description="Implementation of tree attention and of the head over reads. reference: plain JAX; auto: the Hopper or "
        "Triton kernels on GPUs and Pallas on TPUs where head size and dtype allow, else plain JAX.",
    )
    block_q: int = Field(default=0, ge=0, description="Query block of the plain JAX implementation; 0: by platform.")
    block_k: int = Field(default=0, ge=0, description="Key block of the plain JAX implementation; 0: by platform.")
    transport: Literal["auto", "gather", "ring"] = Field(
        default="auto",
        description="How keys and values reach the devices of mesh.context. gather: all at once; ring: from neighbour to "
        "neighbour while the kernel works; auto: ring on TPUs, gather elsewhere.",
    )


class OptimizerConfig(_Table):
    kind: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: on the linear layers; embedding, head, norms and biases keep AdamW."
    )
    lr: float = Field(default=1e-5, ge=0, description="Peak learning rate. Muon's updates have the size of AdamW's.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Course of the learning rate after warm-up; linear and cosine end at 0."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay; not on norms and biases.")
    b1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    b2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="muon: decay of the momentum.")
    clip_norm: float = Field(default=1.0, ge=0, description="Largest global gradient norm; 0 is off.")
    delay_correction: float = Field(
        default=0.0,
        ge=0,
        description="Extrapolates each update by this times its change since the last: for gradients one update late, 1.",
    )
    lag_scaling: float = Field(
        default=0.0, ge=0, description="The learning rate is divided by 1 + lag_scaling · mean lag of the step's tokens."
    )


class MeshConfig(_Table):
    data: int = Field(default=-1, ge=-1, description="Replicas; -1: whatever the other axes leave.")
    fsdp: int = Field(default=1, ge=1, description="Ways parameters and rows are split.")
    context: int = Field(default=1, ge=1, description="Ways the tokens of a row are split.")
    tensor: int = Field(default=1, ge=1, description="Ways heads, MLP and vocabulary are split.")
    expert: int = Field(default=1, ge=1, description="Ways experts are split.")


class SftConfig(_Table):
    data: str = Field(description="JSONL file of traces: rows with `prompt` and `completion`, or with `messages`.")
    steps: int = Field(default=100, ge=1, description="Optimizer steps of the warm start.")
    batch_size: int = Field(default=64, ge=1, description="Traces per step.")
    lr: float = Field(default=1e-3, gt=0, description="Peak learning rate; decays to 0 by a cosine.")
    warmup_steps: int = Field(default=10, ge=0, description="Steps of linear warm-up.")


class CheckpointConfig(_Table):
    every: int = Field(default=50, ge=1, description="Steps between checkpoints; the last step is always saved.")
    keep: int = Field(default=2, ge=1, description="Most recent checkpoints kept.")
    keep_best: bool = Field(default=True, description="Also keep the checkpoint with the best held-out (else training) reward.")


class EvalConfig(_Table):
    every: int = Field(
        default=0,
        ge=0,
        description="Steps between held-out evaluations; 0: only with `at_start` and at the end, if num_tasks > 0.",
    )
    num_tasks: int = Field(default=0, ge=0, description="Held-out tasks; 0: no evaluation.")
    samples: int = Field(default=1, ge=1, description="Episodes per held-out task.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature of the evaluation; 0 is greedy.")
    at_start: bool = Field(default=True, description="Also evaluate before the first step.")


class LogConfig(_Table):
    tensorboard: bool = Field(default=True, description="Write TensorBoard event files.")
    wandb: str = Field(default="", description="Project of Weights & Biases that metrics go to; empty: none.")
    rollouts: int = Field(default=4, ge=0, description="Readable rollouts written per step.")
    live: bool = Field(default=True, description="Show the live progress view when the output is a terminal.")


class Config(_Table):
    """A run, as its TOML file describes it."""

    name: str = Field(default="run", min_length=1, description="Name of the run.")
    out: str = Field(default="runs", description="Folder under which the run's own folder OUT/NAME is made.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of everything random in the run.")
    model: ModelConfig
    env: EnvConfig
    sampling: SamplingConfig = SamplingConfig()
    sampler: SamplerConfig = SamplerConfig()
    pipeline: PipelineConfig = PipelineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    packing: PackingConfig = PackingConfig()
    attention: AttentionConfig = AttentionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    sft: SftConfig | None = Field(default=None, description="Supervised warm start before the first rollout.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()

    @field_validator("env", mode="before")
    @classmethod
    def _env_by_name(cls, value):
        return {"name": value} if isinstance(value, str) else value

    @field_validator("sampler", mode="before")
    @classmethod
    def _sampler_by_kind(cls, value):
        return {"kind": value} if isinstance(value, str) else value


def _check_combinations(config: Config) -> None:
    """Raises ConfigError for keys that are fine alone and wrong together."""
    p, a, longest = config.pipeline, config.algorithm, config.sampling.max_tokens
    if a.baseline != "none" and p.group_size == 1:
        raise ConfigError(
            "pipeline.group_size",
            'a group baseline of one episode is always 0: use group_size ≥ 2 or algorithm.baseline = "none"',
        )
    _check_algorithm(config)
    if p.min_groups > p.groups_per_step:
        raise ConfigError("pipeline.min_groups", f"{p.min_groups} is more than pipeline.groups_per_step = {p.groups_per_step}")
    if p.mode == "sync" and p.extra_episodes:
        raise ConfigError(
            "pipeline.extra_episodes",
            'which episodes end first depends on the clock, and pipeline.mode = "sync" repeats every bit: use another mode, or leave it out',
        )
    if p.mode not in ("sync", "periodic") and p.publish_every > p.max_lag + 1:
        raise ConfigError(
            "pipeline.publish_every",
            f"{p.publish_every} steps make every group older than max_lag = {p.max_lag}: at most {p.max_lag + 1}",
        )
    fewest = p.min_groups or p.groups_per_step
    if p.workers and p.queue and p.workers + p.queue < fewest:
        raise ConfigError(
            "pipeline.queue", f"{p.workers} workers and a queue of {p.queue} never hold the {fewest} groups of a step"
        )
    for key, tokens in (("packing.row_length", config.packing.row_length), ("sampler.max_length", config.sampler.max_length)):
        if longest >= tokens:
            raise ConfigError(key, f"{tokens} tokens cannot hold a prompt and sampling.max_tokens = {longest}: raise it")
    for key, slots in (("packing.reads", config.packing.reads), ("packing.terms", config.packing.terms)):
        if 0 < slots < longest:
            raise ConfigError(key, f"{slots} cannot hold the sampling.max_tokens = {longest} of one answer: raise it")
    sampler = config.sampler
    least = -(-sampler.max_length // sampler.page_size) + 1
    if 0 < sampler.pages < least:
        raise ConfigError(
            "sampler.pages", f"{sampler.pages} cannot hold one sequence of sampler.max_length: use at least {least}, or 0"
        )
    if sampler.kind == "vllm":
        _check_vllm(config)
    elif sampler.dtype == "float16":
        raise ConfigError("sampler.dtype", 'float16 is for sampler.kind = "vllm": use bfloat16 or float32')
    for key, why in _without_effect(config):
        if _value(config, key) != _default(key):
            raise ConfigError(key, f"has no effect with {why}: leave it out")


def _check_algorithm(config: Config) -> None:
    a = config.algorithm
    if a.mask_low >= a.mask_high:
        raise ConfigError("algorithm.mask_low", f"{a.mask_low:g} is not below algorithm.mask_high = {a.mask_high:g}")
    if (a.loss == "dpo") != (a.baseline == "best_worst"):
        raise ConfigError("algorithm.baseline", 'loss = "dpo" and baseline = "best_worst" go together: set both or neither')
    if a.loss == "tba" and a.baseline != "none":
        raise ConfigError("algorithm.baseline", 'loss = "tba" has a baseline of its own: use "none"')
    if a.loss == "tba" and config.pipeline.group_size == 1:
        raise ConfigError("pipeline.group_size", 'loss = "tba" compares the episodes of a task: use group_size ≥ 2')
    if a.loss in ("tba", "dpo") and (a.normaliser, a.normaliser_constant) != ("constant", 1):
        raise ConfigError(
            "algorithm.normaliser", f'loss = "{a.loss}" sums over episodes: use "constant" with normaliser_constant = 1'
        )


def _check_vllm(config: Config) -> None:
    sampler = config.sampler
    for key in ("top_p", "top_k", "min_p"):
        if _value(config, f"sampling.{key}") != (off := _default(f"sampling.{key}")):
            raise ConfigError(
                f"sampling.{key}",
                f"truncates, and vLLM tells a token's log-prob after truncation only, while the loss needs the one before it: "
                f'set it to {off:g} (off), or use sampler.kind = "embedded"',
            )
    for key in ("model.dtype", "model.param_dtype"):
        if _value(config, key) == "float64":
            raise ConfigError(key, 'vLLM does not compute in float64: use float32, or sampler.kind = "embedded"')
    if len(set(sampler.urls)) < len(sampler.urls):
        raise ConfigError("sampler.urls", "names a server twice")
    if sampler.devices and len(sampler.devices) != sampler.replicas:
        raise ConfigError(
            "sampler.devices", f"{len(sampler.devices)} entries for sampler.replicas = {sampler.replicas}: one for each server"
        )
    if sampler.transport == "file" and sampler.shared_folder is None:
        raise ConfigError("sampler.shared_folder", 'sampler.transport = "file" needs a folder that trainer and servers share')


_PAUSED = ("periodic", "partial")  # the sampler is idle whenever weights come
_TIED = ("tba", "dpo")  # losses over whole responses, tied to the reference policy
_UNREAD_BY_LOSS = {
    "cispo": ("clip_low",),
    "reinforce": ("clip_low", "clip_high"),
    "m2po": ("clip_low", "clip_high"),
} | dict.fromkeys(
    _TIED,
    ("clip_low", "clip_high", "old_policy", "correction_level", "correction_cap", "mask_level", "veto", "entropy_weight", "kl_weight"),
)  # fmt: skip


def _without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """(key, what it has no effect with) of the keys that this config's modes never read. Setting one to anything but its
    default is an error, so that nobody tunes what does nothing."""
    algorithm, held_out = config.algorithm, config.eval.num_tasks
    if config.pipeline.mode == "sync":
        unread = ("max_lag", "window", "min_groups", "workers", "queue", "publish_every", "publish")
        yield from ((f"pipeline.{key}", 'pipeline.mode = "sync"') for key in unread)
    elif config.pipeline.workers == 0:
        yield "pipeline.queue", "pipeline.workers = 0"
    if config.pipeline.mode in _PAUSED:
        yield "pipeline.publish", f'pipeline.mode = "{config.pipeline.mode}"'
    if config.pipeline.mode == "periodic":
        yield from ((f"pipeline.{key}", 'pipeline.mode = "periodic"') for key in ("max_lag", "window"))
    if algorithm.baseline != "group":
        yield "algorithm.scale_by_std", f'algorithm.baseline = "{algorithm.baseline}"'
    if algorithm.normaliser != "constant":
        yield "algorithm.normaliser_constant", f'algorithm.normaliser = "{algorithm.normaliser}"'
    unread = _UNREAD_BY_LOSS.get(algorithm.loss, ()) + (() if algorithm.loss in _TIED else ("beta",))
    yield from ((f"algorithm.{key}", f'algorithm.loss = "{algorithm.loss}"') for key in unread)
    if algorithm.turn_scaling != "constant":
        yield "algorithm.turn_constant", f'algorithm.turn_scaling = "{algorithm.turn_scaling}"'
    if algorithm.mask_level == "none":
        yield from ((f"algorithm.{key}", 'algorithm.mask_level = "none"') for key in ("mask_low", "mask_high"))
    if algorithm.kl_weight == 0:
        yield "algorithm.kl_estimator", "algorithm.kl_weight = 0"
    sampler = config.sampler
    embedded, started = (
        ("page_size", "pages", "prefill_chunk"),
        ("python", "replicas", "devices", "memory", "flags", "environment", "start_seconds"),
    )
    vllm = (*started, "urls", "transport", "shared_folder", "cache")
    for key in vllm if sampler.kind == "embedded" else embedded:
        yield f"sampler.{key}", f'sampler.kind = "{sampler.kind}"'
    if sampler.urls:
        yield from ((f"sampler.{key}", "sampler.urls: those servers run already") for key in started)
    if sampler.transport not in ("auto", "file"):
        yield "sampler.shared_folder", f'sampler.transport = "{sampler.transport}"'
    if config.optimizer.kind == "adamw":
        yield "optimizer.momentum", 'optimizer.kind = "adamw"'
    if config.pipeline.mode == "sync":
        yield "optimizer.lag_scaling", 'pipeline.mode = "sync"'
    if config.mesh.context == 1:
        yield "attention.transport", "mesh.context = 1"
    if held_out == 0:
        yield from ((f"eval.{key}", "eval.num_tasks = 0") for key in ("every", "samples", "temperature", "at_start"))
        yield "env.heldout", "eval.num_tasks = 0"


def _value(config: Config, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(config, table), name)


def _default(key: str) -> Any:
    table, name = key.split(".")
    return Config.model_fields[table].annotation.model_fields[name].default


def _check_values(tables: Any, path: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for a value that no key can take. Sizes and counts are 32-bit integers on the device."""
    for key, value in tables.items() if isinstance(tables, dict) else enumerate(tables):
        where = (*path, str(key))
        if isinstance(value, dict | list):
            _check_values(value, where)
        elif isinstance(value, str) and "\0" in value:
            raise ConfigError(".".join(where), f"{value!r} has a NUL in it, which no file name and no text here can have")
        elif isinstance(value, int) and not -(2**31) <= value < 2**31:
            raise ConfigError(".".join(where), "is an integer beyond 32 bits: at most 2147483647 can be used")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(".".join(where), f"is {value}: use a finite number")


def parse(tables: dict[str, Any]) -> Config:
    """A Config from the tables of a TOML file. Raises ConfigError naming the first wrong key."""
    _check_values(tables)
    try:
        config = Config.model_validate(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(file)"
        if first["type"] == "extra_forbidden":
            raise ConfigError(key, _unknown_key(first["loc"])) from None
        if first["type"] == "missing":
            raise ConfigError(key, "is required") from None
        raise ConfigError(key, f"{first['msg'].removeprefix('Value error, ')} (got {first['input']!r})") from None
    _check_combinations(config)
    return config


def _unknown_key(location: tuple) -> str:
    """What to say about an unknown key: the keys its table has."""
    table: type[BaseModel] | None = Config
    for part in location[:-1]:
        annotation = table.model_fields[part].annotation if table else None
        options = [annotation, *getattr(annotation, "__args__", ())]
        table = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
    return f"unknown key; this table has: {', '.join(sorted(table.model_fields))}" if table else "unknown key"


def load(path: str | Path) -> Config:
    """Reads a TOML file. Relative paths in it stay relative to the working directory. Raises
    ConfigError if the file is missing, is not TOML or describes no run."""
    return parse(read(path))


def read(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError if it is missing or is not TOML."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError("CONFIG", f"no such file: {path}")
    try:
        return tomllib.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number of thousands of digits
        raise ConfigError("CONFIG", f"{path} is not TOML: {error}") from None
