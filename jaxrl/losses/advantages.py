"""From groups of episodes to trajectories with an advantage and a weight per token.

Baselines count episodes, never trajectories: a history that forked must not count twice.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl.config import Config
from jaxrl.data import Episode, Group, TrainingTrajectory, Trajectory
from jaxrl.packing.weights import fold_weights

STD_EPSILON = 1e-6  # keeps (R − mean)/(std + ε) finite; far below any spread of rewards that matters


def group_advantages(groups: Sequence[Group], config: Config) -> tuple[list[TrainingTrajectory], int]:
    """Trajectories to train on, with A = R − mean (over std + ε if `algorithm.scale_by_std`) of their
    group, or A = R without a baseline, and every denominator of the step in their weights; and the
    number of trainable tokens left out because their group has no variance.

    Failed episodes neither train nor count in a baseline. A trajectory's own reward replaces its
    episode's; an episode then enters the baseline with the mean over its trajectories. A group whose
    rewards are all equal is left out, if there is a group baseline. The standard deviation is the
    population's. Sources: GRPO (arXiv:2402.03300), Dr. GRPO (arXiv:2503.20783).
    """
    algorithm = config.algorithm
    kept: list[tuple[Trajectory, float, float, int, int]] = []  # trajectory, advantage, reward, episode, group
    tokens_left_out = first_episode = 0
    for group_index, group in enumerate(groups):
        numbered = list(enumerate(group.episodes, start=first_episode))
        first_episode += len(numbered)
        succeeded = [(i, e) for i, e in numbered if e.error is None]
        if not succeeded:
            continue
        mean, scale = 0.0, 1.0
        if algorithm.baseline == "group":
            episode_rewards = [_rewards(e) for _, e in succeeded]
            if len(set().union(*episode_rewards)) == 1:
                tokens_left_out += sum(int(t.trainable.sum()) for _, e in succeeded for t in e.trajectories)
                continue
            mean = float(np.mean([np.mean(r) for r in episode_rewards]))
            if algorithm.scale_by_std:
                variance = np.mean([np.mean(np.square(np.subtract(r, mean))) for r in episode_rewards])
                scale = float(np.sqrt(variance)) + STD_EPSILON
        for episode_index, episode in succeeded:
            for trajectory, reward in zip(episode.trajectories, _rewards(episode), strict=False):
                if trajectory.trainable.any():
                    kept.append((trajectory, (reward - mean) / scale, reward, episode_index, group_index))

    weights = fold_weights(
        [trajectory.trainable for trajectory, *_ in kept],
        algorithm.normaliser,
        algorithm.normaliser_constant or config.sampling.max_tokens,
    )
    training = [
        TrainingTrajectory(
            trajectory=trajectory,
            advantage=np.full(len(trajectory.ids), advantage, np.float32),
            weight=weight,
            trajectory_index=i,
            episode_index=episode_index,
            group_index=group_index,
            reward=reward,
        )
        for i, ((trajectory, advantage, reward, episode_index, group_index), weight) in enumerate(
            zip(kept, weights, strict=True)
        )
    ]
    return training, tokens_left_out


def supervised(trajectories: Sequence[Trajectory]) -> list[TrainingTrajectory]:
    """Given traces for the sft loss: the mean over all trainable tokens of the step. The advantage is
    1 and not read."""
    weights = fold_weights([t.trainable for t in trajectories], "tokens", 0.0)
    return [
        TrainingTrajectory(t, np.ones(len(t.ids), np.float32), weight, trajectory_index=i, episode_index=i, group_index=i)
        for i, (t, weight) in enumerate(zip(trajectories, weights, strict=True))
    ]


def _rewards(episode: Episode) -> list[float]:
    """One reward per trajectory; the episode's alone if it has no trajectory."""
    own = [episode.reward if t.reward is None else t.reward for t in episode.trajectories]
    return own or [episode.reward]
