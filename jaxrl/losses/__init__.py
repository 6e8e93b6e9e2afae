"""Losses: one rule per file, each a pure function of aligned arrays that returns sums.

    loss(logp, entropy, terms, config) -> (sum, metric sums)

`logp` and `entropy` are those of each term's read, in the shape of `terms`. The trainer does not know
which loss runs: it looks the name up in LOSSES.
"""

from jaxrl.losses.cispo import cispo
from jaxrl.losses.grpo import grpo
from jaxrl.losses.ppo_clip import ppo_clip
from jaxrl.losses.sft import sft

LOSSES = {"grpo": grpo, "ppo_clip": ppo_clip, "cispo": cispo, "sft": sft}
