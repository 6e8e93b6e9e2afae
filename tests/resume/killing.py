"""A tiny run of the real command, started in processes of its own, killed and started again.

Everything is small but whole: two model calls per episode, rewards that differ within a group, a step
large enough to change what is sampled next, checkpoints every few steps.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import zstandard
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jaxrl.checkpoint import Checkpoints
from jaxrl.data import Episode
from jaxrl.metrics import jsonl
from jaxrl.pipeline.journal import open_journal
from jaxrl.rollout.chat import CallKey
from jaxrl.rollout.partial import CallRecord

ROOT = Path(__file__).resolve().parents[2]

TASK = """
import asyncio

async def rollout(task, chat):
    first = await chat.complete(f"{task['a']}+{task['b']}=")
    second = await chat.complete("+7=")
    text = first.text + second.text
    await asyncio.sleep(len(text) * task["delay"])  # long answers are the likelier to be cut by a kill
    return sum(c in "02468" for c in text) / 16 + 0.1 * text.count("+")
"""

CONFIG = """
name = "run"
out = "{out}"
seed = 3

[model]
tokenizer = "{out}"
remat = "none"

[model.architecture]
model_type = "llama"
vocab_size = 16
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 128
tie_word_embeddings = true
eos_token_id = 1

[env]
name = "{out}/task.py:rollout"
data = "{out}/tasks.jsonl"
heldout = "{out}/heldout.jsonl"

[sampling]
max_tokens = 8

[sampler]
slots = 16
max_length = 40
page_size = 8
prefill_chunk = 16

[pipeline]
groups_per_step = 4
group_size = 4

[packing]
row_length = 256
rows = 2

[optimizer]
lr = 2e-3

[checkpoint]
every = 3
keep = 2

[eval]
every = 4
num_tasks = 4

[log]
rollouts = 100
"""


def make_run(folder: Path, delay: float = 0.0, slow: dict | None = None) -> Path:
    """A folder with a config, a tokenizer of single characters, a task and its rows; `delay` is in seconds
    per character of an answer; `slow` is for slow.py, which then runs in the command's place. The run itself will be in folder/run."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = [{"a": int(a), "b": int(b), "delay": delay} for a, b in rng.integers(0, 100, (4096, 2))]
    for name, part in (("heldout", rows[:4]), ("tasks", rows[4:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "task.py").write_text(TASK)
    (folder / "config.toml").write_text(CONFIG.format(out=folder))
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789+=ab"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if slow is not None:
        (folder / "slow.json").write_text(json.dumps({"fresh": False, "forgets": False} | slow))
    return folder


def start(folder: Path, *options: str, devices: int = 1) -> subprocess.Popen:
    """The command, in a session of its own; its output is added to folder/log.txt."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-resume"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    how = [str(ROOT / "tests" / "resume" / "slow.py")] if (folder / "slow.json").exists() else ["-m", "jaxrl.train"]
    command = [sys.executable, *how, str(folder / "config.toml"), *options]
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def finish(folder: Path, *options: str, devices: int = 1) -> None:
    wait_for(start(folder, *options, devices=devices), folder)


def wait_for(process: subprocess.Popen, folder: Path, timeout: float = 300) -> None:
    try:
        code = process.wait(timeout)
    finally:
        process.kill()
    assert code == 0, f"exit {code}\n{log_tail(folder)}"


def log_tail(folder: Path) -> str:
    return (folder / "log.txt").read_text()[-4000:]


@dataclass(frozen=True)
class Kill:
    seconds: float  # after the start
    logged: int  # steps in metrics.jsonl
    saved: int  # step of the newest complete checkpoint; -1: none
    num_orphans: int  # environment workers that outlived the run by more than 5 s


def kill_once(
    folder: Path, rng: np.random.Generator, *options: str, when: str = "later", gently: bool = False, devices: int = 1
) -> Kill | None:
    """Starts the run and kills it with SIGKILL (`gently`: stops it with SIGTERM) at a random moment. when: "starting", somewhere in
    its first seconds; "sampling", up to a second and a half after the first tokens; "later", after 1 to 6 more lines of
    metrics, with something of a running episode on disk if it runs slowly, and up to a fifth of a second. None if it ended first."""
    lines, tokens = num_lines(folder) + int(rng.integers(1, 7)), num_tokens(folder)
    process = start(folder, *options, devices=devices)
    began = time.monotonic()
    if when == "starting":
        ended = _ends(process, lambda: False, rng.uniform(0, 8))
    elif when == "sampling":
        ended = _ends(process, lambda: num_tokens(folder) != tokens, 300) or _ends(process, lambda: False, rng.uniform(0, 1.5))
    else:
        ended = _ends(process, lambda: num_lines(folder) >= lines, 300)
        if (folder / "slow.json").exists():
            ended = ended or _ends(process, lambda: bool(journaled(folder)[1]), 60)
        ended = ended or _ends(process, lambda: False, rng.uniform(0, 0.2))
    seconds = time.monotonic() - began
    process.send_signal(signal.SIGTERM if gently else signal.SIGKILL)
    process.wait(60)
    if ended or gently:
        assert process.returncode == 0, f"exit {process.returncode}\n{log_tail(folder)}"
    if ended:
        return None
    steps = [line["step"] for line in metrics(folder)]
    for _ in range(50):
        if not workers_of(process.pid):
            break
        time.sleep(0.1)
    saved = saved_steps(folder)
    return Kill(round(seconds, 2), max(steps, default=0), saved[-1] if saved else -1, len(workers_of(process.pid)))


def _ends(process: subprocess.Popen, is_time, seconds: float) -> bool:
    """True if the process ended by itself."""
    until = time.monotonic() + seconds
    while not is_time() and time.monotonic() < until:
        if process.poll() is not None:
            return True
        time.sleep(0.01)
    return False


def num_lines(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def num_tokens(folder: Path) -> int:
    """Tokens of running episodes on disk."""
    return sum(len(call.tokens.ids) for calls in journaled(folder)[1].values() for call in calls.values())


def metrics(folder: Path) -> list[dict]:
    path = folder / "run" / "metrics.jsonl"
    return list(jsonl.read(path)) if path.exists() else []


def workers_of(parent: int) -> list[int]:
    """Environment workers of a process that still run: they carry its id on their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f'"parent": {parent},'.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def final_arrays(folder: Path) -> dict[str, bytes]:
    """Path -> dtype, shape and bytes of every array of the newest checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it restores onto the devices it was saved on, and warns that others may lack them
        state = ocp.PyTreeCheckpointer().restore(folder / "run" / "checkpoints" / str(saved_steps(folder)[-1]) / "state")
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return {path: f"{x.dtype}{x.shape}".encode() + x.tobytes() for path, x in arrays.items()}


def host_state(folder: Path) -> dict:
    """What the newest checkpoint knows beside the arrays; {} before the first."""
    checkpoints = Checkpoints(folder / "run" / "checkpoints", keep=1, keep_best=False, read_only=True)
    step = checkpoints.latest()
    host = {} if step is None else checkpoints.host(step)
    checkpoints.close()
    return host


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    return sorted(int(path.name) for path in (folder / "run" / "checkpoints").glob("*") if path.name.isdigit())


def timeless(lines: list[dict]) -> list[dict]:
    """Metrics without those that tell how long something took."""
    return [
        {
            k: v
            for k, v in line.items()
            if k != "time" and not k.startswith(("time/", "load/")) and not k.endswith("_per_second")
        }
        for line in lines
    ]


def rollout_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "run" / "rollouts").glob("*"))}


def trained_episodes(folder: Path) -> dict[int, dict[tuple[int, int], dict]]:
    """step -> (group, episode) -> its line in rollouts/, of all that the run as it stands has trained on.
    The tokenizer has one character per token, so equal text is equal tokens."""
    found = {}
    for name, data in rollout_files(folder).items():
        lines = map(json.loads, zstandard.decompress(data).decode().splitlines())
        found[int(name[5:11])] = {(line["group"], line["episode"]): line for line in lines}
    return found


Calls = dict[CallKey, CallRecord]


def journaled(folder: Path) -> tuple[dict[tuple[int, int], Episode], dict[tuple[int, int], Calls]]:
    """By (group, episode): the finished episodes, and the calls of the others; from a copy: the run repairs its own."""
    with tempfile.TemporaryDirectory() as copy:
        for path in (folder / "run" / "journal").glob("*"):
            try:
                shutil.copy(path, copy)
            except FileNotFoundError:
                continue  # forgotten meanwhile
        journal = open_journal(copy)
        finished = {(g.index, e.index): e for g in journal.replay() for e in g.episodes}
        partial = {(g, e): calls for g, episodes in journal.partials().items() for e, calls in episodes.items()}
        journal.close()
    return finished, partial
