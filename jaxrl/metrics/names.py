"""Names of the metrics that a person watches; every other metric is logged under its own name."""

REWARD = "reward/mean"  # over the episodes finished since the step before, trained on or not, failed ones left out
HELDOUT = "heldout/reward"  # mean reward on held-out tasks
LAG_MEAN = "lag/mean"  # policy versions, over the tokens trained on
LAG_MAX = "lag/max"
TRAINER_RATE = "trainer/tokens_per_second"  # tokens placed in rows over the seconds of the optimizer step
SAMPLER_RATE = "sampler/tokens_per_second"  # tokens sampled over the seconds since the step before
PARITY = "parity/logp_mean_abs"  # mean |trainer's - sampler's policy log-prob|, nats
FAILED = "episodes/failed"  # episodes that raised, hung or were cut off, in this step
LOSS = "loss"
SAMPLE_SIZE = "policy/effective_sample_size"
REACHABLE = "policy/reachable_mass"
