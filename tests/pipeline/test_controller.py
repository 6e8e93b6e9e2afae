"""The controller under random interleavings: a world that answers its actions in any order."""

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.pipeline import controller as c
from jaxrl.pipeline.events import Knobs, Retune


def make_config(**changes) -> c.ControllerConfig:
    base = c.ControllerConfig(mode="async", steps=5, groups_per_step=3, max_lag=1, window=2, checkpoint_every=2)
    return replace(base, **changes)


@dataclass
class World:
    """Carries out actions; `tick` lets one random thing that is under way end."""

    config: c.ControllerConfig
    rng: random.Random
    barren: float = 0.0
    failing: float = 0.0
    state: c.State = None
    running: dict[int, int] = field(default_factory=dict)  # group -> version at its first submission
    cut: dict[int, int] = field(default_factory=dict)  # the same of groups that were cut
    late: list[int] = field(default_factory=list)  # cut when they had just ended
    finished: dict[int, int] = field(default_factory=dict)  # group -> oldest version
    busy: list[c.Event] = field(default_factory=list)  # what the trainer's side is at
    batches: list[tuple[int, ...]] = field(default_factory=list)
    dropped: dict[str, list[int]] = field(default_factory=dict)
    submitted: dict[int, None] = field(default_factory=dict)  # in order
    snapshots: list[tuple[int, dict]] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    ended: c.Action | None = None
    lags: list[int] = field(default_factory=list)
    passed: dict[int, int] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self):
        self.state = self.state or c.start(self.config)
        self.give(c.Tick())

    def give(self, event: c.Event) -> None:
        self.now += 1.0
        self.state, actions = c.step(self.state, event, self.now)
        for action in actions:
            self.obey(action)
        self.check()
        while self.late:
            index = self.late.pop()
            self.finished[index] = self.cut.pop(index)
            self.give(c.GroupFinished(index, self.finished[index], True))

    def obey(self, action: c.Action) -> None:
        match action:
            case c.SubmitGroup(index):
                assert index not in self.submitted or index in self.cut
                self.submitted[index] = None
                version = next(g.version for g in (*self.state.running, *self.state.returning) if g.index == index)
                assert self.cut.pop(index, version) == version  # its first tokens are as old as they were
                self.running[index] = version
            case c.CutGroup(index):
                assert self.config.mode == "partial"
                self.cut[index] = self.running.pop(index)
                if self.rng.random() < 0.2:
                    self.late.append(index)
            case c.DropGroup(index, reason):
                self.dropped.setdefault(reason, []).append(index)
                self.running.pop(index, None)
                self.cut.pop(index, None)
                self.finished.pop(index, None)
            case c.Train(step, groups):
                assert step == self.state.step == len(self.batches) + self.first_step
                assert list(groups) == sorted(groups)
                for index in groups:
                    self.lags.append(step - self.finished.pop(index))
                    for other in (*self.running, *self.cut):
                        self.passed[other] = self.passed.get(other, 0) + (other < index)
                self.batches.append(groups)
                self.busy.append(c.TrainDone())
            case c.Publish(version, in_flight):
                assert in_flight == (self.config.mode == "inflight")
                assert self.config.rolls_on or not self.running
                assert self.state.evaluating is None
                self.busy.append(c.PublishDone(version))
            case c.Evaluate(version, place):
                assert version == self.state.published
                assert self.config.rolls_on or version == self.state.step and not self.running
                assert place == self.state.next_index or self.config.rolls_on and place <= self.state.next_index
                self.evaluated.append(version)
                self.busy.append(c.EvalDone())
            case c.Checkpoint(step):
                assert step == self.state.step
                self.snapshots.append((step, c.snapshot(self.state)))
                self.busy.append(c.CheckpointDone())
            case c.Stop() | c.Fail():
                self.ended = action

    first_step: int = 0
    is_retuned: bool = False
    most_steps_between: int = 0

    def retune(self, knobs: Knobs) -> None:
        self.is_retuned = True
        self.most_steps_between = max(self.most_steps_between, self.state.config.publish_every, knobs.publish_every)
        self.give(Retune(knobs))

    def check(self) -> None:
        s, config = self.state, self.config
        if config.mode != "sync":
            steps_left = config.most_lag + s.published + 1 - s.step - bool(s.training)
            # A change to smaller steps leaves more under way than fits; it is trained on or dropped, never too old.
            assert self.is_retuned or len(s.buffer) + len(s.running) + len(self.cut) <= steps_left * config.groups_per_step
        may_wait = config.rolls_on and (config.publish == "pull" or config.eval_every)
        most = config.max_lag + 1 if may_wait else max(s.config.publish_every, self.most_steps_between)
        assert self.is_retuned and may_wait or s.step - s.published <= most
        assert {g.index for g in s.running} == set(self.running)
        assert set(self.cut) <= {g.index for g in s.returning}

    def tick(self) -> None:
        """One of the things under way ends; nothing under way is a stall."""
        waiting = [("group", i) for i in self.running] + [("busy", i) for i in range(len(self.busy))]
        if self.config.publish == "pull" and not self.state.wanted:
            waiting.append(("wanted", 0))
        if not waiting:
            self.give(c.Tick())
            assert self.running or self.busy or self.ended, "stalled"
            return
        kind, which = self.rng.choice(waiting)
        if kind == "busy":
            self.give(self.busy.pop(which))
            return
        if kind == "wanted":
            self.give(c.WeightsWanted())
            return
        version = self.running.pop(which)
        if self.rng.random() < self.failing:
            self.failed.append(which)
            self.give(c.GroupFailed(which, "boom"))
            return
        informative = self.rng.random() >= self.barren
        self.finished[which] = version
        self.give(c.GroupFinished(which, version, informative))

    def run(self, most_ticks: int = 10_000) -> "World":
        for _ in range(most_ticks):
            if self.ended:
                return self
            self.tick()
        raise AssertionError("the run did not end")


MODES = ("sync", "periodic", "partial", "async", "inflight")


@st.composite
def any_config(draw, modes=MODES) -> c.ControllerConfig:
    mode = draw(st.sampled_from(modes))
    max_lag, groups = draw(st.integers(0, 3)), draw(st.integers(1, 5))
    return c.ControllerConfig(
        mode=mode,
        steps=draw(st.integers(1, 6)),
        groups_per_step=groups,
        max_lag=max_lag,
        window=draw(st.integers(1, 4)),
        checkpoint_every=draw(st.integers(1, 4)),
        eval_every=draw(st.integers(0, 3)),
        eval_at_start=draw(st.booleans()),
        eval_at_end=draw(st.booleans()),
        checkpoint_at_start=draw(st.booleans()),
        min_groups=0 if mode == "sync" else draw(st.sampled_from([0, 0, (groups + 1) // 2])),
        workers=0 if mode == "sync" else draw(st.sampled_from([0, 0, 1, 3, 8])),
        publish_every=1 if mode == "sync" else draw(st.integers(1, 3 if mode == "periodic" else max_lag + 1)),
        publish=draw(st.sampled_from(["push", "pull"])) if mode in ("async", "inflight") else "push",
    )


configs = any_config()


@given(configs, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 0.9, 1.0]), st.sampled_from([0.0, 0.1]))
@settings(max_examples=300, deadline=None)
def test_every_interleaving_ends_and_keeps_the_bounds(config, seed, barren, failing):
    world = World(config, random.Random(seed), barren, failing).run()
    if isinstance(world.ended, c.Fail):
        assert failing and world.failed  # a whole step's groups failed
        return
    assert world.ended == c.Stop("finished")
    assert len(world.batches) == config.steps
    trained = [index for batch in world.batches for index in batch]
    assert len(set(trained)) == len(trained)
    if config.mode == "sync":
        for step, batch in enumerate(world.batches):
            expected = range(step * config.groups_per_step, (step + 1) * config.groups_per_step)
            assert batch == tuple(i for i in expected if i not in world.failed)
        assert set(world.lags) <= {0}
        return
    assert max(world.lags, default=0) <= config.most_lag
    assert config.mode == "periodic" or max(world.passed.values(), default=0) < config.window
    assert sum(world.passed.values()) == world.state.num_passed
    assert "stale" not in world.dropped  # a group is held for rather than dropped
    if barren == 0.0:
        assert all(config.fewest <= len(batch) <= config.groups_per_step for batch in world.batches)


@given(configs, st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_evaluations_and_checkpoints_come_when_they_are_due(config, seed):
    world = World(config, random.Random(seed)).run()
    evaluated = {0} if config.eval_at_start else set()
    evaluated |= {s for s in range(1, config.steps + 1) if config.eval_every and s % config.eval_every == 0}
    evaluated |= {config.steps} if config.eval_at_end else set()
    # The last step's weights reach the sampler only for an evaluation at the end.
    assert set(world.evaluated) in (evaluated, evaluated - ({config.steps} if not config.eval_at_end else set()))
    assert len(world.evaluated) == len(set(world.evaluated))
    saved = {0} if config.checkpoint_at_start else set()
    saved |= {s for s in range(1, config.steps) if s % config.checkpoint_every == 0} | {config.steps}
    assert [step for step, _ in world.snapshots] == sorted(saved)


def test_100_000_ticks_with_90_percent_dropped_never_stall():
    config = make_config(mode="inflight", steps=10**9, groups_per_step=8, max_lag=2, window=4, checkpoint_every=50)
    world = World(config, random.Random(0), barren=0.9)
    steps = []
    for tick in range(100_000):
        world.tick()
        if tick % 10_000 == 9_999:
            steps.append(world.state.step)
    # A batch takes 80 groups, and every step some ticks for training, publishing and saving.
    assert all(later - earlier > 80 for earlier, later in zip(steps, steps[1:], strict=False))
    assert len(world.dropped["zero_variance"]) > 70_000
    assert "stale" not in world.dropped and max(world.lags) <= 2


@given(configs, st.integers(0, 2**32 - 1), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_resume_loses_and_repeats_nothing(config, seed, killed_at):
    rng = random.Random(seed)
    first = World(config, rng, barren=0.2)
    for _ in range(killed_at):
        if first.ended is None:
            first.tick()
    step, snapshot = first.snapshots[-1] if first.snapshots else (0, None)
    second = World(config, rng, barren=0.2, state=c.start(config, step, snapshot), first_step=step).run()
    trained = [i for batch in first.batches[:step] for i in batch] + [i for batch in second.batches for i in batch]
    assert len(trained) == len(set(trained))
    # Up to the last group trained on, every group was trained on, or left for a reason.
    issued = set(range(max(trained, default=-1) + 1))
    gone = {i for w in (first, second) for groups in w.dropped.values() for i in groups}
    alive = set(second.running) | set(second.cut) | set(second.finished)
    assert issued <= set(trained) | gone | alive
    assert len(second.batches) == config.steps - step


@given(configs, st.integers(0, 2**32 - 1), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_a_signal_saves_and_stops_without_waiting_for_the_sampler(config, seed, at):
    world = World(config, random.Random(seed))
    for _ in range(at):
        if world.ended is None:
            world.tick()
    if world.ended:
        return
    world.give(c.Signal("SIGTERM"))
    while world.ended is None:
        event = next(e for e in world.busy if isinstance(e, c.TrainDone | c.CheckpointDone))
        world.busy.remove(event)
        world.give(event)
    assert world.ended == c.Stop("stopped by SIGTERM")
    assert world.snapshots[-1][0] == world.state.step


def test_a_publish_that_never_ends_is_a_named_error_and_the_weights_are_saved():
    world = World(make_config(steps=3), random.Random(0))
    while not any(isinstance(e, c.PublishDone) for e in world.busy):
        world.tick()
    world.busy.clear()
    world.now += world.config.publish_timeout + 1
    world.give(c.Tick())
    assert world.snapshots[-1][0] == 1
    world.give(world.busy.pop())
    assert isinstance(world.ended, c.Fail) and "PublishTimeout" in world.ended.reason and "version 1" in world.ended.reason


def test_a_publish_of_another_version_is_a_named_error_and_the_weights_are_saved():
    world = World(make_config(steps=3), random.Random(0))
    while not any(isinstance(e, c.PublishDone) for e in world.busy):
        world.tick()
    world.busy.clear()
    world.give(c.PublishDone(0))
    assert world.snapshots[-1][0] == 1
    world.give(world.busy.pop())
    assert isinstance(world.ended, c.Fail) and "version 1 was published, the sampler serves 0" in world.ended.reason


def test_a_whole_step_of_failed_groups_ends_the_run_with_the_cause():
    world = World(make_config(groups_per_step=2), random.Random(0))
    for index in (0, 1):
        world.running.pop(index)
        world.give(c.GroupFailed(index, "ZeroDivisionError in reward"))
    world.give(world.busy.pop())
    assert isinstance(world.ended, c.Fail) and "ZeroDivisionError in reward" in world.ended.reason


def test_a_straggler_is_waited_for_once_its_window_is_used_up():
    world = World(make_config(groups_per_step=1, max_lag=3, window=3), random.Random(0))
    for index in (1, 2):
        world.finished[index] = world.running.pop(index)
        world.give(c.GroupFinished(index, 0, True))
        while world.busy:
            world.give(world.busy.pop())
    assert world.batches == [(1,), (2,)]
    world.finished[3] = world.running.pop(3)
    world.give(c.GroupFinished(3, 0, True))
    assert world.batches == [(1,), (2,)]  # a third would be one too many
    world.finished[0] = world.running.pop(0)
    world.give(c.GroupFinished(0, 0, True))
    assert world.batches[2] == (0,)


def test_what_is_stale_after_all_is_dropped_and_replaced():
    # Restored groups may be older than the bound allows: their tokens were sampled before the checkpoint.
    config = make_config(groups_per_step=2, max_lag=1, steps=10)
    kept = {
        "next_index": 12,
        "live": [8, 9],
        "versions": [3, 3],
        "num_stale": 0,
        "num_zero_variance": 0,
        "num_failed": 0,
        "evaluated": -1,
    }
    world = World(config, random.Random(0), state=c.start(config, 5, kept), first_step=5)
    assert list(world.submitted) == [8, 9, 12, 13]
    world.finished[8] = 3
    del world.running[8]
    world.give(c.GroupFinished(8, 3, True))
    assert world.dropped["stale"] == [8] and list(world.submitted)[-1] == 14
    assert world.state.num_stale == 1


def test_a_failed_step_leaves_the_saved_run_alone_when_its_state_is_gone():
    world = World(make_config(), random.Random(0))
    while not any(isinstance(e, c.TrainDone) for e in world.busy):
        world.tick()
    world.give(c.TrainFailed("device lost", state_intact=False))
    assert world.ended == c.Fail("device lost") and not world.snapshots


def test_a_nan_step_saves_the_weights_from_before_it():
    world = World(make_config(), random.Random(0))
    while not any(isinstance(e, c.TrainDone) for e in world.busy):
        world.tick()
    world.busy.clear()
    world.give(c.TrainFailed("the gradient is not finite", state_intact=True))
    assert world.snapshots[-1][0] == 0
    assert set(world.batches[0]) <= set(world.snapshots[-1][1]["live"])  # the step's groups were not used up
    world.give(world.busy.pop())
    assert world.ended == c.Fail("the gradient is not finite")


def test_a_sync_step_that_a_signal_cut_counts_its_groups_once():
    """Group 0 has no variance, group 1 fails, a signal comes, and the next start gets both again from the journal."""
    config = make_config(mode="sync", eval_at_start=False)
    first = World(config, random.Random(0))
    end = {0: c.GroupFinished(0, 0, False), 1: c.GroupFailed(1, "no"), 2: c.GroupFinished(2, 0, True)}
    for index in (0, 1):
        first.running.pop(index)
        first.give(end[index])
    first.give(c.Signal("SIGTERM"))
    ((step, snapshot),) = first.snapshots
    assert snapshot["live"] == [0, 1, 2] and (snapshot["num_zero_variance"], snapshot["num_failed"]) == (0, 0)
    resumed = c.start(config, step, snapshot)
    second = World(config, random.Random(0), state=resumed)
    assert list(second.submitted) == [0, 1, 2]
    for index, event in end.items():
        second.running.pop(index)
        second.finished[index] = 0
        second.give(event)
    assert second.batches == [(0, 2)]
    assert (second.state.num_zero_variance, second.state.num_failed) == (1, 1)


def test_groups_whose_failure_ended_the_run_do_not_come_back():
    config = make_config(mode="sync")
    world = World(config, random.Random(0))
    for index in range(3):
        world.running.pop(index)
        world.give(c.GroupFailed(index, "no such tool"))
    snapshot = world.snapshots[-1][1]
    assert snapshot["live"] == [] and snapshot["num_failed"] == 3


@st.composite
def knobs_for(draw, max_lag: int) -> Knobs:
    groups = draw(st.integers(1, 5))
    fewest = draw(st.integers(1, groups))
    workers = draw(st.integers(0, 6))
    queue = draw(st.integers(max(0, fewest - workers), 6)) if workers else 0
    return Knobs(fewest, groups, workers, queue, draw(st.integers(1, max_lag + 1)))


@given(st.data(), configs.filter(lambda config: config.mode != "sync"), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3]))
@settings(max_examples=200, deadline=None)
def test_settings_change_at_any_moment_and_nothing_is_lost_repeated_or_too_old(data, config, seed, barren):
    """With a crash and a resume in between."""
    rng = random.Random(seed)
    first = World(config, rng, barren)

    def go_on(world: World, ticks: int) -> None:
        for _ in range(ticks):
            if world.ended is None:
                world.tick()

    go_on(first, data.draw(st.integers(0, 20)))
    if first.ended is None:
        first.retune(data.draw(knobs_for(config.max_lag)))
    go_on(first, data.draw(st.integers(0, 30)))
    step, snapshot = first.snapshots[-1] if first.snapshots else (0, None)
    tuned = replace(config, **vars(data.draw(knobs_for(config.max_lag))))
    second = World(tuned, rng, barren, state=c.start(tuned, step, snapshot), first_step=step, is_retuned=True)
    go_on(second, data.draw(st.integers(0, 20)))
    if second.ended is None:
        second.retune(data.draw(knobs_for(config.max_lag)))
    second.run()
    assert second.ended == c.Stop("finished")
    assert len(second.batches) == config.steps - step
    trained = [i for batch in first.batches[:step] for i in batch] + [i for batch in second.batches for i in batch]
    assert len(trained) == len(set(trained))
    gone = {i for w in (first, second) for groups in w.dropped.values() for i in groups}
    assert set(range(max(trained, default=-1) + 1)) <= set(trained) | gone | set(second.running) | set(second.cut) | set(
        second.finished
    )
    assert max(first.lags + second.lags, default=0) <= 3


def test_a_finished_group_that_the_queue_has_no_place_for_holds_its_worker():
    world = World(make_config(groups_per_step=3, max_lag=3, workers=2, queue=1, window=9), random.Random(0))
    assert list(world.submitted) == [0, 1]

    def finish(index):
        world.finished[index] = world.running.pop(index)
        world.give(c.GroupFinished(index, 0, True))

    finish(0)
    assert list(world.submitted) == [0, 1, 2]
    finish(1)
    assert list(world.submitted) == [0, 1, 2]
    finish(2)
    assert world.batches == [(0, 1, 2)] and list(world.submitted) == [0, 1, 2, 3, 4]


def test_a_step_takes_what_there_is_between_its_fewest_and_its_most_groups():
    world = World(make_config(groups_per_step=4, min_groups=2, max_lag=3, window=9, workers=6), random.Random(0))
    for index in range(5):
        world.finished[index] = world.running.pop(index)
        world.give(c.GroupFinished(index, 0, True))
    assert world.batches == [(0, 1)]
    world.give(world.busy.pop())
    while world.busy and len(world.batches) == 1:
        world.give(world.busy.pop())
    assert world.batches == [(0, 1), (2, 3, 4)]


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"min_groups": 4}, "min_groups"),
        ({"publish_every": 3}, "publish_every"),
        ({"workers": 1, "queue": 1}, "workers"),
    ],
)
def test_settings_under_which_a_run_would_wait_for_ever_are_refused(changes, names):
    with pytest.raises(ValueError, match=names):
        make_config(**changes)
