"""Built-in tasks, by name."""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import ConfigDict, Field, ValidationError, create_model

from jaxrl.config import ConfigError, EnvConfig
from jaxrl.envs.arithmetic import arithmetic, sums
from jaxrl.envs.gsm8k import gsm8k
from jaxrl.rollout.environment import Environment

BUILT_IN: dict[str, Callable[..., Environment]] = {"sums": sums, "arithmetic": arithmetic, "gsm8k": gsm8k}


def make_environment(config: EnvConfig, seed: int) -> Environment:
    """The built-in environment `config.name` with `config.args`. Raises ConfigError naming what is unknown or wrong."""
    if config.name not in BUILT_IN:
        raise ConfigError(
            "env.name",
            f"no built-in task {config.name!r}; there are {', '.join(sorted(BUILT_IN))}, or my_task.py:rollout",
        )
    for key in ("data", "heldout"):
        if getattr(config, key) is not None:
            raise ConfigError(f"env.{key}", f"{config.name} makes its own rows: leave it out, or name my_task.py:rollout")
    environment = BUILT_IN[config.name](seed=seed, **_arguments(config))
    if not environment.train:
        raise ConfigError("env.args", f"{config.name} has no training rows left beside the held-out ones: lower heldout")
    return environment


def _arguments(config: EnvConfig) -> dict[str, Any]:
    """`config.args` as the annotations of the task's parameters have them."""
    factory = BUILT_IN[config.name]
    kinds = get_type_hints(factory, include_extras=True)
    known = {name: p for name, p in inspect.signature(factory).parameters.items() if name != "seed"}
    table = create_model(
        config.name,
        __config__=ConfigDict(extra="forbid"),
        **{name: (kinds[name], Field(p.default)) for name, p in known.items()},
    )
    try:
        given = table.model_validate(config.args)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("env.args", *first["loc"])))
        if first["type"] == "extra_forbidden":
            raise ConfigError(key, f"unknown argument of {config.name}; it has: {', '.join(known) or 'none'}") from None
        raise ConfigError(key, f"{first['msg'].removeprefix('Value error, ')} (got {first['input']!r})") from None
    return {name: getattr(given, name) for name in known}
