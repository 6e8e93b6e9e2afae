"""vLLM's OpenAI server with the bridge's gateway in front: `python -P -m jaxrl_bridge.serve --model FOLDER ...`.

Every argument is vLLM's own. The server binds to loopback unless it is told another host, and on another host it wants
TLS, or JAXRL_BRIDGE_TUNNELLED=1 where something else encrypts the way to it. The key comes from JAXRL_BRIDGE_KEY.
"""

import ipaddress
import os
import runpy
import sys

GATEWAY = "jaxrl_bridge.gateway.Gateway"
WORKER = "jaxrl_bridge.worker.BridgeWorker"


def arguments(given: list[str], environment: dict[str, str]) -> list[str]:
    """vLLM's arguments. Raises ValueError, which names the flag or variable, when the server would not be safe to start."""
    if not environment.get("JAXRL_BRIDGE_KEY"):
        raise ValueError("set JAXRL_BRIDGE_KEY: the server answers nobody without a key")
    if int(_value(given, "--api-server-count") or 1) > 1:
        raise ValueError("--api-server-count must be 1: one gateway must see every generation")
    host = _value(given, "--host")
    secured = _value(given, "--ssl-certfile") is not None or environment.get("JAXRL_BRIDGE_TUNNELLED") == "1"
    if host is not None and not _loopback(host) and not secured:
        raise ValueError(
            f"--host {host} is not loopback: add --ssl-certfile and --ssl-keyfile, or set JAXRL_BRIDGE_TUNNELLED=1 "
            "if a tunnel encrypts the way to this server"
        )
    added = ["--middleware", GATEWAY, "--worker-extension-cls", WORKER]
    if host is None:
        added += ["--host", "127.0.0.1"]
    if _value(given, "--logprobs-mode") is None:
        added += ["--logprobs-mode", "processed_logprobs"]
    return [*given, *added]


def _value(given: list[str], flag: str) -> str | None:
    """The last value of a flag, written `--flag value` or `--flag=value`, with - or _ between its words."""
    value = None
    for i, argument in enumerate(given):
        name, equals, rest = argument.partition("=")
        if name.replace("_", "-") == flag:
            value = rest if equals else given[i + 1] if i + 1 < len(given) else ""
    return value


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> None:
    try:
        arguments_for_vllm = arguments(sys.argv[1:], dict(os.environ))
    except ValueError as error:
        sys.exit(f"jaxrl_bridge.serve: {error}")
    sys.argv[1:] = arguments_for_vllm
    import jaxrl_bridge.gateway  # takes the key out of the environment before vLLM starts processes of its own  # noqa: F401

    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
