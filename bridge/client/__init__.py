"""The JAX side of the vLLM bridge: servers, weights, generations. Imports neither torch nor vllm."""
