"""The server side of jaxrl's vLLM bridge: what runs in vLLM's environment. docs/bridge.md is its contract."""
