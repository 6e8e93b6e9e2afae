"""The folder of a run: its resolved config, and whether a second start may continue it."""

import fcntl
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxrl.config import Config, ConfigError, parse

JOURNAL_HEADER = 16  # bytes of a journal's segment without a record
# What may change between a run and its continuation: how far it goes, where it runs, what it shows.
SERVERS = (
    "python",
    "urls",
    "replicas",
    "devices",
    "memory",
    "transport",
    "shared_folder",
    "start_seconds",
    "environment",
    "flags",
)
MAY_CHANGE = ("name", "out", "pipeline.steps", "mesh", "log", *(f"sampler.{key}" for key in SERVERS))


def open_run(config: Config) -> Path:
    """OUT/NAME with config.toml in it. A folder of an earlier start must describe the same run: raises
    ConfigError naming the first key that differs."""
    folder = Path(config.out) / config.name
    file = folder / "config.toml"
    if file.exists() and _has_begun(folder):
        _check_same(parse(tomllib.loads(file.read_text())), config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(to_toml(config.model_dump(exclude_none=True)))
    part.replace(file)
    return folder


def _has_begun(folder: Path) -> bool:
    """Whether an earlier start left anything to continue; one that was refused may come back with another config."""
    metrics = folder / "metrics.jsonl"
    episodes = [file for file in (folder / "journal").glob("*") if file.stat().st_size > JOURNAL_HEADER]
    return bool(episodes) or any((folder / "checkpoints").glob("[0-9]*")) or (metrics.exists() and metrics.stat().st_size > 0)


def lock(folder: Path) -> IO:
    """Held until it is closed or the process dies. Makes the folder. Raises ConfigError if another process runs in it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / "lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError("name", f"another process runs in {folder}: stop it first, or choose another name") from None
    return file


def _check_same(before: Config, now: Config, folder: Path) -> None:
    for key, old, new in differences(before, now):
        if not any(key == free or key.startswith(free + ".") for free in MAY_CHANGE):
            raise ConfigError(
                key,
                f"is {new!r}, but {folder} holds a run with {old!r}: set it back to continue that run, or choose another `name`",
            )


def differences(before: Config, now: Config) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value before, value now) of what two configs do not share; None for a key without a value."""
    old, new = dict(_flat(before.model_dump())), dict(_flat(now.model_dump()))
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def to_toml(tables: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> str:
    """TOML text of nested tables. None is left out: TOML has no word for it."""
    plain = {key: value for key, value in tables.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items() if value is not None]
    text = "".join(line + "\n" for line in lines)
    for key, value in tables.items():
        if isinstance(value, Mapping):
            path = (*prefix, _key(key))
            text += f"\n[{'.'.join(path)}]\n" + to_toml(value, path)
    return text


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()  # True, inf, 1e-05, 3
