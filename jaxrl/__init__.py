"""jaxrl: reinforcement-learning post-training for language models in pure-functional JAX."""
