"""Group baselines over episodes, what is left out, and the weights that follow."""

import numpy as np
import pytest

from jaxrl.config import ConfigError, parse
from jaxrl.data import Episode, Group, Trajectory
from jaxrl.losses.advantages import STD_EPSILON, group_advantages, supervised


def make_config(**algorithm):
    return parse({"model": {"checkpoint": "m"}, "env": "arithmetic", "sampling": {"max_tokens": 40}, "algorithm": algorithm})


def make_trajectory(num_trainable, reward=None, prompt=3):
    n = prompt + num_trainable
    trainable = np.arange(n) >= prompt
    zeros = np.zeros(n, np.float32)
    return Trajectory(
        np.arange(n, dtype=np.int32), trainable, zeros, zeros, np.zeros(n, np.int32),
        trainable.astype(np.uint8), np.zeros(n, np.int32), reward=reward,
    )  # fmt: skip


def make_group(index, *episodes):
    """Episodes as (reward, trajectories) or (error, trajectories)."""
    return Group(
        index,
        index,
        tuple(
            Episode(index, i, tuple(trajectories), 0.0 if isinstance(r, str) else r, error=r if isinstance(r, str) else None)
            for i, (r, trajectories) in enumerate(episodes)
        ),
    )


def test_baseline_counts_episodes_not_trajectories():
    forked = [make_trajectory(2), make_trajectory(2), make_trajectory(2)]
    group = make_group(0, (1.0, forked), (0.0, [make_trajectory(4)]))
    training, _ = group_advantages([group], make_config())
    scale = 0.5 + STD_EPSILON
    assert [t.advantage[0] for t in training] == pytest.approx([0.5 / scale] * 3 + [-0.5 / scale])
    assert [t.episode_index for t in training] == [0, 0, 0, 1]
    assert [t.trajectory_index for t in training] == [0, 1, 2, 3]


def test_without_std_and_without_baseline():
    group = make_group(0, (1.0, [make_trajectory(2)]), (0.25, [make_trajectory(2)]))
    centred, _ = group_advantages([group], make_config(scale_by_std=False))
    assert [t.advantage[0] for t in centred] == pytest.approx([0.375, -0.375])
    plain, _ = group_advantages([group], make_config(baseline="none"))
    assert [t.advantage[0] for t in plain] == [1.0, 0.25]


def test_leave_one_out():
    rewards = [1.0, 0.25, 0.5]
    group = make_group(0, *[(r, [make_trajectory(2)]) for r in rewards])
    training, _ = group_advantages([group], make_config(baseline="leave_one_out"))
    expected = [r - np.mean([x for j, x in enumerate(rewards) if j != i]) for i, r in enumerate(rewards)]
    assert [t.advantage[0] for t in training] == pytest.approx(expected)
    survivor = make_group(0, (1.0, [make_trajectory(2, reward=1.0), make_trajectory(2, reward=0.0)]), ("crash", []))
    assert group_advantages([survivor], make_config(baseline="leave_one_out")) == ([], 4)


def test_the_best_against_the_worst():
    forked = [make_trajectory(2, reward=0.9), make_trajectory(3, reward=0.7)]
    group = make_group(0, (0.5, [make_trajectory(1)]), (0.0, forked), (0.2, [make_trajectory(4)]), (0.8, [make_trajectory(5)]))
    dpo = {"loss": "dpo", "baseline": "best_worst", "normaliser": "constant", "normaliser_constant": 1}
    training, left_out = group_advantages([group], make_config(**dpo))
    assert [(t.episode_index, t.advantage[0]) for t in training] == [(1, 1.0), (1, 1.0), (2, -1.0)] and left_out == 0
    equal = make_group(0, (0.5, [make_trajectory(1)]), (0.5, [make_trajectory(4)]))
    assert group_advantages([equal], make_config(**dpo)) == ([], 5)


def test_turns_share_the_advantage_of_their_episode():
    """Three turns, one of them in a fork: a third each, or a tenth by the constant."""
    long, fork = make_trajectory(4), make_trajectory(2)
    long.turn[:] = [-1, -1, -1, 0, 0, 1, 1]
    group = make_group(0, (1.0, [long, fork]), (0.0, [make_trajectory(2)]))
    for keys, scale in (({"turn_scaling": "count"}, 3), ({"turn_scaling": "constant"}, 10), ({}, 1)):
        training, _ = group_advantages([group], make_config(scale_by_std=False, **keys))
        other = 1 if keys.get("turn_scaling") == "count" else scale
        assert [t.advantage[-1] for t in training] == pytest.approx([0.5 / scale] * 2 + [-0.5 / other])


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        ("algorithm.baseline", {"loss": "dpo"}),
        ("algorithm.baseline", {"baseline": "best_worst"}),
        ("algorithm.baseline", {"loss": "tba"}),
        ("algorithm.normaliser", {"loss": "tba", "baseline": "none"}),
        ("algorithm.mask_low", {"mask_level": "token", "mask_low": 5.0}),
        ("algorithm.mask_high", {"mask_high": 2.0}),
        ("algorithm.beta", {"beta": 0.5}),
        ("algorithm.kl_estimator", {"kl_estimator": "k1"}),
        ("algorithm.clip_low", {"loss": "m2po", "clip_low": 0.1}),
        ("algorithm.scale_by_std", {"baseline": "leave_one_out", "scale_by_std": False}),
        ("algorithm.turn_constant", {"turn_constant": 3.0}),
        (
            "algorithm.veto",
            {"loss": "tba", "baseline": "none", "normaliser": "constant", "normaliser_constant": 1, "veto": 0.1},
        ),
    ],
)
def test_combinations_that_cannot_work_are_named(key, algorithm):
    with pytest.raises(ConfigError) as error:
        make_config(**algorithm)
    assert error.value.key == key


def test_zero_variance_groups_leave_the_denominator():
    same = make_group(0, (0.1, [make_trajectory(5)]), (0.1, [make_trajectory(7)]), (0.1, [make_trajectory(1)]))
    mixed = make_group(1, (1.0, [make_trajectory(3)]), (0.0, [make_trajectory(5)]))
    training, left_out = group_advantages([same, mixed], make_config())
    assert left_out == 13
    assert {t.group_index for t in training} == {1} and [t.episode_index for t in training] == [3, 4]
    assert sum(t.weight.sum() for t in training) == pytest.approx(1)
    # Without a group baseline there is nothing to leave out.
    everything, left_out = group_advantages([same, mixed], make_config(baseline="none"))
    assert len(everything) == 5 and left_out == 0


def test_failed_episodes_are_no_zero_rewards():
    group = make_group(0, (1.0, [make_trajectory(2)]), (0.5, [make_trajectory(2)]), ("timeout", [make_trajectory(2)]))
    lost = make_group(1, ("crash", []), ("crash", []))
    training, left_out = group_advantages([group, lost], make_config(scale_by_std=False))
    assert [t.advantage[0] for t in training] == pytest.approx([0.25, -0.25])
    assert left_out == 0
    survivor = make_group(0, (1.0, [make_trajectory(2)]), ("timeout", []))
    assert group_advantages([survivor], make_config()) == ([], 2)


def test_a_trajectorys_own_reward_overrides():
    """Two players per episode: every episode is a draw on the mean, yet the group has variance."""
    episodes = [(0.0, [make_trajectory(2, reward=+1.0), make_trajectory(2, reward=-1.0)]) for _ in range(2)]
    training, left_out = group_advantages([make_group(0, *episodes)], make_config())
    scale = 1 + STD_EPSILON
    assert [t.advantage[0] for t in training] == pytest.approx([1 / scale, -1 / scale] * 2)
    assert [t.reward for t in training] == [1.0, -1.0] * 2 and left_out == 0


def test_weights():
    group = make_group(0, (1.0, [make_trajectory(2), make_trajectory(0)]), (0.0, [make_trajectory(6)]))
    for algorithm, expected in [
        ({"normaliser": "tokens"}, [1 / 8, 1 / 8]),
        ({"normaliser": "sequences"}, [1 / 4, 1 / 12]),
        ({"normaliser": "constant"}, [1 / 80, 1 / 80]),  # sampling.max_tokens = 40
        ({"normaliser": "constant", "normaliser_constant": 10}, [1 / 20, 1 / 20]),
    ]:
        training, _ = group_advantages([group], make_config(**algorithm))
        assert [t.weight[-1] for t in training] == pytest.approx(expected)
        assert all(not t.weight[:3].any() for t in training)


def test_nothing_to_train_on():
    assert group_advantages([], make_config()) == ([], 0)


def test_supervised_weights_are_a_token_mean():
    training = supervised([make_trajectory(2), make_trajectory(6)])
    assert [t.weight[-1] for t in training] == pytest.approx([1 / 8, 1 / 8])
