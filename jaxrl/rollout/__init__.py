"""Sampler and environment protocols, and the token-exact chat between them."""
