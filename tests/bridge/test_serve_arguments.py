"""What the bridge's server refuses to start with, and what it adds to vLLM's arguments."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "bridge_serve", Path(__file__).parents[2] / "bridge" / "server" / "jaxrl_bridge" / "serve.py"
)
serve = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(serve)
KEY = {"JAXRL_BRIDGE_KEY": "sesame"}


def test_a_server_is_on_loopback_and_behind_the_gateway():
    added = serve.arguments(["--model", "m"], KEY)
    assert added[:2] == ["--model", "m"]
    assert added[added.index("--host") + 1] == "127.0.0.1"
    assert added[added.index("--middleware") + 1] == "jaxrl_bridge.gateway.Gateway"
    assert added[added.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "sesame" not in " ".join(added)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_loopback_needs_no_tls(host):
    assert serve.arguments(["--host", host], KEY).count("--host") == 1


@pytest.mark.parametrize(
    "given", [["--host", "0.0.0.0"], ["--host=10.1.2.3"], ["--host", "::"], ["--host", "node7"], ["--host", ""]]
)
def test_another_host_wants_tls_or_a_tunnel(given):
    with pytest.raises(ValueError, match="ssl-certfile"):
        serve.arguments(given, KEY)
    serve.arguments([*given, "--ssl-certfile", "c", "--ssl-keyfile", "k"], KEY)
    serve.arguments(given, KEY | {"JAXRL_BRIDGE_TUNNELLED": "1"})


def test_no_server_without_a_key_or_with_two_gateways():
    with pytest.raises(ValueError, match="JAXRL_BRIDGE_KEY"):
        serve.arguments([], {})
    with pytest.raises(ValueError, match="--api-server-count"):
        serve.arguments(["--api_server_count=2"], KEY)
