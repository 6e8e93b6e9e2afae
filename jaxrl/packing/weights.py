"""Folds every denominator of an optimizer step into one weight per token, before the step is cut into
rows and microbatches: losses are then plain sums."""

from collections.abc import Sequence

import numpy as np


def fold_weights(trainable: Sequence[np.ndarray], normaliser: str, constant: float = 0.0) -> list[np.ndarray]:
    """Weights of the tokens of all trajectories of a step, float32 [L] each, 0 where not trainable.

    trainable: bool [L] each. normaliser, with n the trajectories that have a trainable token:
    - "tokens": 1 / (trainable tokens of the step), DAPO's token mean;
    - "sequences": 1 / (n · trainable tokens of the trajectory), GRPO's mean of means;
    - "constant": 1 / (n · constant), Dr. GRPO, constant in tokens.
    Raises ValueError for another normaliser or a constant that is not positive.
    """
    counts = np.array([np.count_nonzero(mask) for mask in trainable], np.float64)
    num_sequences = np.count_nonzero(counts)
    counted = np.maximum(counts, 1)  # a trajectory without trainable tokens has no weight to divide
    if normaliser == "tokens":
        per_token = np.full(len(counts), 1 / max(counts.sum(), 1))
    elif normaliser == "sequences":
        per_token = 1 / (max(num_sequences, 1) * counted)
    elif normaliser == "constant":
        if constant <= 0:
            raise ValueError(f'normaliser "constant" needs a positive number of tokens per sequence, got {constant}')
        per_token = np.full(len(counts), 1 / (max(num_sequences, 1) * constant))
    else:
        raise ValueError(f'unknown normaliser "{normaliser}": use "tokens", "sequences" or "constant"')
    return [np.where(mask, weight, 0).astype(np.float32) for mask, weight in zip(trainable, per_token, strict=True)]
