"""Environments by name: a built-in one through its factory, or a function in the user's own file."""

import importlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl.config import ConfigError, EnvConfig
from jaxrl.rollout.environment import Environment


def is_file_environment(config: EnvConfig) -> bool:
    """Whether `name` points into a file of the user's: my_task.py:rollout."""
    return ".py:" in config.name or config.name.endswith(".py")


def load_environment(config: EnvConfig, factory: str, seed: int) -> Environment:
    """The environment of `config`. `factory`: "module:function" that makes the built-in ones from (config, seed).
    Raises ConfigError naming env.name, env.data or env.heldout."""
    if is_file_environment(config):
        return load_file_environment(config)
    module, _, function = factory.partition(":")
    return getattr(importlib.import_module(module), function)(config, seed)


def load_file_environment(config: EnvConfig) -> Environment:
    """The function of "path.py:function", with rows from the JSONL files `data` and `heldout`, else from the module's own
    tasks("train") and tasks("heldout")."""
    path, _, name = config.name.rpartition(".py:")
    if not path or not name:
        raise ConfigError("env.name", f"{config.name!r} names no function: write my_task.py:rollout")
    if config.args:
        raise ConfigError(
            "env.args", f"a function of your own takes none: put them into the rows of env.data or into {path}.py"
        )
    module = _load_module(Path(path + ".py"))
    rollout = getattr(module, name, None)
    if rollout is None:
        defined = [n for n, f in vars(module).items() if inspect.iscoroutinefunction(f)]
        raise ConfigError(
            "env.name", f"{path}.py has no function {name!r}; its async functions: {', '.join(defined) or 'none'}"
        )
    if not inspect.iscoroutinefunction(rollout):
        raise ConfigError("env.name", f"{config.name} is not async: write `async def {name}(task, chat)`")
    try:
        inspect.signature(rollout).bind(None, None)
    except TypeError as error:
        raise ConfigError("env.name", f"{config.name} is called as {name}(task, chat): {error}") from None
    train = _rows("env.data", config.data, module, "train")
    if not train:
        raise ConfigError("env.data", f"no task rows: name a JSONL file, or define tasks(split) in {path}.py")
    return Environment(rollout, train, _rows("env.heldout", config.heldout, module, "heldout"))


def _load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError("env.name", f"no such file: {path} (relative to {Path.cwd()})")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # the file may import its neighbours
    name = f"jaxrl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError("env.name", f"{path} does not import: {type(error).__name__}: {error}") from error
    return module


def _rows(key: str, file: str | None, module: ModuleType, split: str) -> list[dict[str, Any]]:
    """Of the JSONL file, else of the module's tasks(split), else none."""
    if file is not None:
        return read_jsonl(key, Path(file))
    if not hasattr(module, "tasks"):
        return []
    call = f"tasks({split!r}) in {module.__file__}"
    try:
        rows = list(module.tasks(split))
    except (Exception, SystemExit) as error:
        raise ConfigError("env.name", f"{call} gave no list of rows: {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError("env.name", f"row {number} of {call} is {row!r}: a task row is a dict")
        try:
            json.dumps(row)  # rows travel to the workers so
        except (TypeError, ValueError) as error:
            raise ConfigError("env.name", f"row {number} of {call} is not JSON: {error}") from None
    return rows


def read_jsonl(key: str, path: Path) -> list[dict[str, Any]]:
    """One JSON object a line; empty lines are skipped. Raises ConfigError naming `key` and the line."""
    if not path.is_file():
        raise ConfigError(key, f"no such file: {path} (relative to {Path.cwd()})")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(key, f"{path} is not UTF-8: {error}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
            raise ConfigError(key, f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(key, f"{path}, line {number} is not an object: a task row is {{...}}")
        rows.append(row)
    return rows
