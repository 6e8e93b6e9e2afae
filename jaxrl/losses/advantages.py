"""From groups of episodes to trajectories with an advantage and a weight per token.

Baselines count episodes, never trajectories: a history that forked must not count twice.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl.config import AlgorithmConfig, Config
from jaxrl.data import Episode, Group, TrainingTrajectory, Trajectory
from jaxrl.packing.weights import fold_weights

STD_EPSILON = 1e-6  # keeps (R − mean)/(std + ε) finite; far below any spread of rewards that matters


def group_advantages(groups: Sequence[Group], config: Config) -> tuple[list[TrainingTrajectory], int]:
    """Trajectories to train on, with an advantage by `algorithm.baseline` and every denominator of the step in their weights;
    and the number of trainable tokens left out because their group has no variance. With R the reward:

    - "group": A = R − mean of the group, over its std + ε if `algorithm.scale_by_std`. The standard deviation is the
      population's. GRPO (arXiv:2402.03300), Dr. GRPO (arXiv:2503.20783), DAPO (arXiv:2503.14476) [t].
    - "leave_one_out": A = R − mean of the group's other episodes. RLOO (arXiv:2402.14740) [t].
    - "best_worst": 1 for the best episode, −1 for the worst, the first of equals; the others are left out.
    - "none": A = R, REINFORCE.

    A is then divided by the turns of its episode or by a constant (`algorithm.turn_scaling`; AsyncWebRL [c]: the constant keeps
    an episode of many turns from counting less per turn).

    Failed episodes neither train nor count in a baseline. A trajectory's own reward replaces its
    episode's; an episode then enters the baseline with the mean over its trajectories. A group whose
    rewards are all equal is left out, if there is a baseline of the group.
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
        rewards = [_rewards(e) for _, e in succeeded]
        if algorithm.baseline != "none" and _has_no_variance(rewards, algorithm.baseline):
            tokens_left_out += sum(int(t.trainable.sum()) for _, e in succeeded for t in e.trajectories)
            continue
        advantages = _ADVANTAGES[algorithm.baseline](rewards, algorithm.scale_by_std)
        for (episode_index, episode), own, of_episode in zip(succeeded, rewards, advantages, strict=True):
            scale = _turn_scale(episode, algorithm)
            for trajectory, reward, advantage in zip(episode.trajectories, own, of_episode, strict=False):
                if trajectory.trainable.any() and advantage is not None:
                    kept.append((trajectory, advantage / scale, reward, episode_index, group_index))

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


# Advantages of the baselines: one per reward of each episode of a group, in the same nesting; None: left out.
Rewards = Sequence[Sequence[float]]
Advantages = list[list[float | None]]


def _from_group(rewards: Rewards, scale_by_std: bool) -> Advantages:
    mean = float(np.mean([np.mean(r) for r in rewards]))
    variance = np.mean([np.mean(np.square(np.subtract(r, mean))) for r in rewards])
    scale = float(np.sqrt(variance)) + STD_EPSILON if scale_by_std else 1.0
    return [[(reward - mean) / scale for reward in own] for own in rewards]


def _from_others(rewards: Rewards, scale_by_std: bool) -> Advantages:
    means = [float(np.mean(own)) for own in rewards]
    others = [(sum(means) - mean) / (len(means) - 1) for mean in means]
    return [[reward - other for reward in own] for own, other in zip(rewards, others, strict=True)]


def _best_and_worst(rewards: Rewards, scale_by_std: bool) -> Advantages:
    means = [float(np.mean(own)) for own in rewards]
    advantage = {int(np.argmax(means)): 1.0, int(np.argmin(means)): -1.0}
    return [[advantage.get(i)] * len(own) for i, own in enumerate(rewards)]


def _from_nothing(rewards: Rewards, scale_by_std: bool) -> Advantages:
    return [list(own) for own in rewards]


_ADVANTAGES = {"group": _from_group, "leave_one_out": _from_others, "best_worst": _best_and_worst, "none": _from_nothing}


def _has_no_variance(rewards: Rewards, baseline: str) -> bool:
    if baseline == "group":
        return len(set().union(*rewards)) == 1
    return len(rewards) == 1 or len({float(np.mean(own)) for own in rewards}) == 1  # these compare episodes


def _turn_scale(episode: Episode, algorithm: AlgorithmConfig) -> float:
    if algorithm.turn_scaling == "none":
        return 1.0
    if algorithm.turn_scaling == "constant":
        return algorithm.turn_constant
    return max(1, sum(len(np.unique(t.turn[t.trainable])) for t in episode.trajectories))


def _rewards(episode: Episode) -> list[float]:
    """One reward per trajectory; the episode's alone if it has no trajectory."""
    own = [episode.reward if t.reward is None else t.reward for t in episode.trajectories]
    return own or [episode.reward]
