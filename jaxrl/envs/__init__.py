"""Built-in tasks, by name."""

import inspect
from collections.abc import Callable

from jaxrl.config import ConfigError, EnvConfig
from jaxrl.envs.arithmetic import arithmetic, sums
from jaxrl.envs.gsm8k import gsm8k
from jaxrl.rollout.environment import Environment

BUILT_IN: dict[str, Callable[..., Environment]] = {"sums": sums, "arithmetic": arithmetic, "gsm8k": gsm8k}


def make_environment(config: EnvConfig, seed: int) -> Environment:
    """The built-in environment `config.name` with `config.args`. Raises ConfigError naming what is unknown."""
    if config.name not in BUILT_IN:
        raise ConfigError("env.name", f"no built-in task {config.name!r}; there are {', '.join(sorted(BUILT_IN))}, or my_task.py:rollout")
    factory = BUILT_IN[config.name]
    known = [name for name in inspect.signature(factory).parameters if name != "seed"]
    for key in config.args:
        if key not in known:
            raise ConfigError(f"env.args.{key}", f"unknown argument of {config.name}; it has: {', '.join(known) or 'none'}")
    return factory(seed=seed, **config.args)
