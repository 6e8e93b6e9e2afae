"""The command line of a run: a TOML file, and any key of it by its dotted name."""

import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from jaxrl.config import Config, ConfigError, parse, read

USAGE = """usage: python -m jaxrl.train CONFIG [--KEY VALUE ...]

CONFIG is a TOML file that describes the run. Keys below can also be set on the command line, over what
the file says: --pipeline.steps 10 --log.live false --sampling.stop '["\\n"]'. Starting the same command
again continues the run in OUT/NAME.
"""

SHORT = {"env": "name", "sampler": "kind"}  # a table that a string may stand for, and the key it then sets


def read_command(arguments: Sequence[str]) -> Config:
    """The Config of a command line. Raises ConfigError naming what is wrong."""
    file, overrides = None, []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if file is not None:
                raise ConfigError("CONFIG", f"one config file, not two: {file} and {word}")
            file = Path(word)
            continue
        key, has_value, value = word[2:].partition("=")
        if not has_value and not rest:
            raise ConfigError(key, f"needs a value: --{key} VALUE")
        overrides.append((key.replace("-", "_"), value if has_value else rest.pop(0)))
    if file is None:
        raise ConfigError("CONFIG", "no config file given: python -m jaxrl.train CONFIG (--help lists every key)")
    tables = read(file)
    for key, text in overrides:
        _set(tables, key, text)
    return parse(tables)


def _set(tables: dict[str, Any], key: str, text: str) -> None:
    """Sets a dotted key. What the key takes decides whether the text is a string or a TOML value."""
    path = key.split(".")
    table = tables
    for i, part in enumerate(path[:-1]):
        where = ".".join(path[: i + 1])
        if where in SHORT and isinstance(table.get(part), str):
            table[part] = {SHORT[where]: table[part]}
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(key, f"`{where}` is no table, it has no keys")
    known = {".".join(where): annotation for where, annotation, _ in leaves(Config)}
    annotation = known.get(key)
    value = text if _takes_text(annotation) else _toml_value(text)
    # One entry needs no brackets.
    table[path[-1]] = [value] if get_origin(annotation) is tuple and isinstance(value, str) else value


def _takes_text(annotation: Any) -> bool:
    if get_origin(annotation) in (tuple, dict):
        return False
    return annotation is str or str in get_args(annotation) or get_origin(annotation) is Literal


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def leaves(table: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(path, type, field) of every key that is not a table of its own."""
    for name, field in table.model_fields.items():
        below = next((t for t in (field.annotation, *get_args(field.annotation)) if _is_table(t)), None)
        if below is None:
            yield (*prefix, name), field.annotation, field
        else:
            yield from leaves(below, (*prefix, name))


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def help_text() -> str:
    """Every key with its type, default and meaning."""
    lines, last_table = [USAGE], None
    for path, annotation, field in leaves(Config):
        if path[:-1] != last_table:
            last_table = path[:-1]
            lines.append(f"\n[{'.'.join(last_table)}]" if last_table else "\nThe run")
        default = (
            "required"
            if field.default is PydanticUndefined and field.default_factory is None
            else field.get_default(call_default_factory=True)
        )
        shown = (
            ""
            if default is None or default in ({}, ())
            else f" [{default if isinstance(default, str) else _toml_like(default)}]"
        )
        lines.append(f"  --{'.'.join(path)} {_type_name(annotation)}{shown}")
        lines += textwrap.wrap(field.description, 96, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _toml_like(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ", ".join(f'"{v}"' for v in value) + "]" if isinstance(value, tuple) else str(value)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    kinds = [t for t in (annotation, *get_args(annotation)) if t in (int, float, bool, str)]
    if get_origin(annotation) is tuple:
        return "LIST"
    return (
        {int: "INT", float: "FLOAT", bool: "true|false", str: "TEXT"}[kinds[0]]
        if kinds and "dict" not in str(annotation)
        else "TABLE"
    )
