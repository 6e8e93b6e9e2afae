"""The embedded JAX sampler: paged KV cache, prefix cache, continuous batching."""

from jaxrl.engine.sampler import EmbeddedSampler

__all__ = ["EmbeddedSampler"]
