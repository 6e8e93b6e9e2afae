"""What the run does next: a pure function (state, event, now) -> (state, actions).

asyncio is its shell in a real run, a discrete-event loop can be another; neither decides anything.

Admission (async, inflight). A group is accepted when it was trained on, is being trained on or waits in
the buffer: accepted = (step + training) · G + buffered, with training 1 during a step. A group is submitted while

    accepted + running < (max_lag + published + 1) · G,

with G the most groups of a step and `published` the version the sampler serves. A number of workers and a queue
are further limits: a finished group that the queue has no place for holds its worker. Accepted is derived, never counted: a group that
leaves (no variance, failed, stale) leaves the sum at once, so the run cannot stall on a leak.

Order. Batches take the oldest buffered groups, as soon as there are enough of them, and up to G. A running group may be passed by at most window - 1
later ones, and never when that would make a group stale: a group sampled from version v can be
trained until step v + max_lag, and a batch is held back while the groups it leaves behind could no
longer all be trained in time at G a step. Dropping a stale group is what remains when all this failed.

sync has no admission beyond its own step: groups step · G to (step + 1) · G - 1, trained in index order.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import Enum

from jaxrl.pipeline.events import (
    Action,
    Broken,
    Checkpoint,
    CheckpointDone,
    ControllerConfig,
    DropGroup,
    EvalDone,
    Evaluate,
    Event,
    Fail,
    GroupFailed,
    GroupFinished,
    Publish,
    PublishDone,
    PublishFailed,
    Retune,
    Signal,
    Stop,
    SubmitGroup,
    Tick,
    Train,
    TrainDone,
    TrainFailed,
)

# Groups without variance tolerated per step, in batches: past it the step is taken with what there is,
# even nothing, so that a policy that solves every task (or none) still ends its run.
BARREN_BATCHES = 8


class Phase(Enum):
    """What the trainer's side is at. One thing at a time: train, publish, evaluate, checkpoint."""

    IDLE = "idle"
    TRAINING = "training"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    CHECKPOINTING = "checkpointing"
    OVER = "over"


@dataclass(frozen=True)
class Running:
    index: int
    version: int  # served when it was submitted: no token of it is older
    num_passed: int = 0  # later groups trained before it


@dataclass(frozen=True)
class Buffered:
    index: int
    oldest_version: int
    informative: bool = True


@dataclass(frozen=True)
class State:
    config: ControllerConfig
    step: int = 0  # optimizer steps done: the trainer's policy version
    published: int = 0  # version the sampler serves
    phase: Phase = Phase.IDLE
    next_index: int = 0
    returning: tuple[int, ...] = ()  # groups of the restored run that are neither trained on nor gone: submitted first
    running: tuple[Running, ...] = ()  # by index
    buffer: tuple[Buffered, ...] = ()  # by index
    training: tuple[int, ...] = ()
    num_barren: int = 0  # groups without variance since the last batch
    num_failed_in_a_row: int = 0
    num_stale: int = 0
    num_zero_variance: int = 0
    num_failed: int = 0
    failed: tuple[int, ...] = ()  # sync: groups of this step that failed; they keep their place as long as the run goes on
    num_zero_variance_before: int = 0  # when this step began
    evaluated: int = -1  # last version evaluated
    checkpointed: int = -1  # last step saved
    publish_deadline: float = 0.0
    ending: Stop | Fail | None = None  # why the run winds up early


def start(config: ControllerConfig, step: int = 0, snapshot: dict | None = None) -> State:
    """The state at the beginning of a run, or after restoring the checkpoint of `step` with its `snapshot`."""
    if snapshot is None:
        return State(config, step=step, published=step, next_index=step * config.groups_per_step)
    return State(
        config,
        step=step,
        published=step,
        next_index=snapshot["next_index"],
        returning=tuple(sorted(snapshot["live"])),
        num_stale=snapshot["num_stale"],
        num_zero_variance=snapshot["num_zero_variance"],
        num_zero_variance_before=snapshot["num_zero_variance"],
        num_failed=snapshot["num_failed"],
        evaluated=snapshot["evaluated"],
        checkpointed=step,
    )


def snapshot(state: State) -> dict:
    """What a checkpoint keeps of the state, JSON-able. `live` splits the issued groups: what is not in it is trained on or gone.

    In sync the groups of an unfinished step are all live, so those that were counted will be counted again. A run that
    fails lets the failed ones go: with a mended environment it must not fail of them once more.
    """
    live = [*state.returning, *(g.index for g in state.running), *(g.index for g in state.buffer), *state.training]
    num_zero_variance, num_failed = state.num_zero_variance, state.num_failed
    if state.config.mode == "sync":
        kept = () if isinstance(state.ending, Fail) else state.failed
        live += kept
        num_zero_variance, num_failed = state.num_zero_variance_before, state.num_failed - len(kept)
    return {
        "next_index": state.next_index,
        "live": sorted(live),
        "num_stale": state.num_stale,
        "num_zero_variance": num_zero_variance,
        "num_failed": num_failed,
        "evaluated": state.evaluated,
    }


def accepted(state: State) -> int:
    """Groups trained on, being trained on or waiting for it. Steps count as full ones, the one under way too: what they
    left room for, the policy they left behind will not have another step for."""
    steps = state.step + (state.phase is Phase.TRAINING or bool(state.training))
    return steps * state.config.groups_per_step + len(state.buffer)


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """The next state and what to do. `now` is in seconds on any clock that never goes back."""
    if state.phase is Phase.OVER:
        return state, ()
    state, actions = _apply(state, event, now)
    state, submitted = _admit(state)
    state, chosen = _next(state)
    state, freed = _admit(state)  # workers whose groups a batch took out of a full queue
    return state, actions + submitted + chosen + freed


def _apply(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """The event's own effect."""
    match event:
        case GroupFinished():
            return _finished(state, event)
        case GroupFailed():
            return _failed(state, event), ()
        case TrainDone():
            done = {"training": (), "failed": (), "num_barren": 0, "num_zero_variance_before": state.num_zero_variance}
            return _trained(replace(state, phase=Phase.IDLE, step=state.step + 1, **done), now)
        case TrainFailed(cause, state_intact):
            if not state_intact:
                return replace(state, phase=Phase.OVER), (Fail(cause),)
            return _end(replace(state, phase=Phase.IDLE), Fail(cause)), ()
        case PublishDone(version):
            if version != state.step:
                return _end(state, Fail(f"PublishError: version {state.step} was published, the sampler serves {version}")), ()
            phase = Phase.IDLE if state.phase is Phase.PUBLISHING else state.phase
            return replace(state, published=version, phase=phase), ()
        case PublishFailed(version, cause):
            return _end(state, Fail(f"PublishError: version {version} did not reach the sampler: {cause}")), ()
        case EvalDone():
            if state.phase is not Phase.EVALUATING:  # abandoned: a late answer must not free the trainer
                return state, ()
            return replace(state, phase=Phase.IDLE, evaluated=state.step), ()
        case Broken(cause):
            return _end(state, Fail(cause)), ()
        case CheckpointDone():
            return replace(state, phase=Phase.IDLE, checkpointed=state.step), ()
        case Retune(knobs):
            assert state.config.mode != "sync", "a sync run has nothing to tune"
            return replace(state, config=replace(state.config, **vars(knobs))), ()
        case Signal(name):
            return _end(state, Stop(f"stopped by {name}")), ()
        case Tick():
            if state.phase is Phase.PUBLISHING and now > state.publish_deadline:
                seconds = f"{state.config.publish_timeout:g} s"
                return _end(state, Fail(f"PublishTimeout: the sampler did not take version {state.step} within {seconds}")), ()
            return state, ()


def _end(state: State, ending: Stop | Fail) -> State:
    """The run winds up; the first reason stands."""
    return state if state.ending is not None else replace(state, ending=ending)


def _trained(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    c = state.config
    unneeded: tuple[Action, ...] = ()
    if state.step >= c.steps:
        unneeded = tuple(DropGroup(g.index, "unneeded") for g in (*state.running, *state.buffer))
        state = replace(state, running=(), buffer=(), returning=())
    if state.ending is not None or (state.step >= c.steps and not c.eval_at_end):
        return state, unneeded  # nobody will sample from these weights
    if state.step - state.published < c.publish_every and not _eval_wanted(state):
        return state, unneeded
    publishing = replace(state, phase=Phase.PUBLISHING, publish_deadline=now + c.publish_timeout)
    return publishing, (*unneeded, Publish(state.step, c.mode == "inflight"))


def _finished(state: State, event: GroupFinished) -> tuple[State, tuple[Action, ...]]:
    if state.step >= state.config.steps:
        return state, ()  # it was cancelled and made it all the same
    state = _left_running(state, event.index, num_failed_in_a_row=0)
    if not event.informative:
        state = replace(state, num_barren=state.num_barren + 1, num_zero_variance=state.num_zero_variance + 1)
        if state.config.mode != "sync":  # in sync it keeps its place: the step is these groups, whatever they hold
            return state, (DropGroup(event.index, "zero_variance"),)
    group = Buffered(event.index, event.oldest_version, event.informative)
    return replace(state, buffer=tuple(sorted((*state.buffer, group), key=lambda g: g.index))), ()


def _failed(state: State, event: GroupFailed) -> State:
    if state.step >= state.config.steps:
        return state
    in_a_row = state.num_failed_in_a_row + 1
    state = _left_running(state, event.index, num_failed_in_a_row=in_a_row, num_failed=state.num_failed + 1)
    if state.config.mode == "sync":
        state = replace(state, failed=(*state.failed, event.index))
    if in_a_row < state.config.groups_per_step:
        return state
    return _end(state, Fail(f"every episode of the last {in_a_row} groups failed; the last cause: {event.cause}"))


def _left_running(state: State, index: int, **changes) -> State:
    running = tuple(g for g in state.running if g.index != index)
    assert len(running) == len(state.running) - 1, f"group {index} is not running"
    return replace(state, running=running, **changes)


def _room(state: State) -> int:
    """How many groups to submit now."""
    c = state.config
    if state.ending is not None or state.step >= c.steps or (state.step == 0 and _eval_due(state)):
        return 0  # the evaluation before the first step has the sampler for itself
    if c.mode == "sync":
        if state.phase is not Phase.IDLE or _eval_due(state):
            return 0
        return _sync_end(state) - state.next_index + len(state.returning)
    if _is_barren(state):
        return 0
    # Nothing is sampled for a step after the last.
    batches = min(c.max_lag + state.published + 1, c.steps)
    room = batches * c.groups_per_step - accepted(state) - len(state.running)
    if c.workers:
        holding = max(0, len(state.buffer) - c.queue) if c.queue else 0
        room = min(room, c.workers - len(state.running) - holding)
    return room


def _sync_end(state: State) -> int:
    """One past the last group of the step."""
    return (state.step + 1) * state.config.groups_per_step


def _is_barren(state: State) -> bool:
    return state.num_barren >= BARREN_BATCHES * state.config.groups_per_step


def _admit(state: State) -> tuple[State, tuple[Action, ...]]:
    room = _room(state)
    if room <= 0:
        return state, ()
    returning = state.returning[:room]
    fresh = tuple(range(state.next_index, state.next_index + room - len(returning)))
    new = tuple(Running(index, state.published) for index in returning + fresh)
    state = replace(
        state,
        returning=state.returning[len(returning) :],
        next_index=state.next_index + len(fresh),
        running=tuple(sorted(state.running + new, key=lambda g: g.index)),
    )
    return state, tuple(SubmitGroup(g.index) for g in new)


def _next(state: State) -> tuple[State, tuple[Action, ...]]:
    """What the trainer's side does now, if it is free."""
    c = state.config
    if state.ending is not None:
        return _wind_up(state, state.ending)
    if state.phase is not Phase.IDLE:
        return state, ()
    if _eval_due(state):
        return replace(state, phase=Phase.EVALUATING), (Evaluate(state.step),)
    if state.step >= c.steps:
        return _wind_up(state, Stop("finished"))
    due = c.checkpoint_at_start if state.step == 0 else state.step % c.checkpoint_every == 0
    if due and state.checkpointed != state.step:
        return replace(state, phase=Phase.CHECKPOINTING), (Checkpoint(state.step),)
    if c.mode == "sync":
        return _train_sync(state)
    return _train_windowed(state)


def _eval_due(state: State) -> bool:
    return state.published == state.step and _eval_wanted(state)


def _eval_wanted(state: State) -> bool:
    c = state.config
    if state.evaluated == state.step:
        return False
    if state.step == 0:
        return c.eval_at_start
    return (state.step >= c.steps and c.eval_at_end) or (c.eval_every > 0 and state.step % c.eval_every == 0)


def _wind_up(state: State, ending: Stop | Fail) -> tuple[State, tuple[Action, ...]]:
    """Save what is not saved yet, then end. Only a step or a save under way is waited for, never a sampler."""
    if state.phase in (Phase.TRAINING, Phase.CHECKPOINTING, Phase.OVER):
        return state, ()
    if state.checkpointed != state.step:
        return replace(state, phase=Phase.CHECKPOINTING), (Checkpoint(state.step),)
    return replace(state, phase=Phase.OVER), (ending,)


def _train_sync(state: State) -> tuple[State, tuple[Action, ...]]:
    if state.running or state.returning or state.next_index < _sync_end(state):
        return state, ()
    return _train(state, state.buffer)


def _train_windowed(state: State) -> tuple[State, tuple[Action, ...]]:
    c = state.config
    stale = tuple(g for g in state.buffer if state.step - g.oldest_version > c.max_lag)
    state = replace(state, buffer=tuple(g for g in state.buffer if g not in stale), num_stale=state.num_stale + len(stale))
    state, submitted = _admit(state)
    actions = (*(DropGroup(g.index, "stale") for g in stale), *submitted)
    batch = state.buffer[: c.groups_per_step]
    is_enough = len(batch) >= c.fewest or _is_barren(state)
    if not is_enough or not _may_pass(state, batch) or not _leaves_time(state, batch):
        return state, actions
    state, train = _train(state, batch)
    return state, actions + train


def _may_pass(state: State, batch: tuple[Buffered, ...]) -> bool:
    """Whether no running group is passed by more than window - 1 later ones."""
    taken = [g.index for g in batch]
    return all(g.num_passed + _num_later(taken, g.index) < state.config.window for g in state.running)


def _num_later(taken: list[int], index: int) -> int:
    """Groups after `index` among those of a batch, which are sorted."""
    return len(taken) - bisect_right(taken, index)


def _leaves_time(state: State, batch: tuple[Buffered, ...]) -> bool:
    """Whether the groups left behind can all be trained before they are stale, at G a step.

    Of those that can be trained in t more steps at most there may be t · G. Only running groups are a
    reason to hold a batch back: what is buffered and late gains nothing by waiting.
    """
    c = state.config
    left = [(g.version, True) for g in state.running] + [(g.oldest_version, False) for g in state.buffer[len(batch) :]]
    waiting_helps = False
    for rank, (version, is_running) in enumerate(sorted(left)):
        waiting_helps |= is_running
        if waiting_helps and rank >= c.groups_per_step * (version + c.max_lag - state.step):
            return False
    return True


def _train(state: State, batch: tuple[Buffered, ...]) -> tuple[State, tuple[Action, ...]]:
    indices = [g.index for g in batch]
    taken = set(indices)
    state = replace(
        state,
        phase=Phase.TRAINING,
        training=tuple(indices),
        buffer=tuple(g for g in state.buffer if g.index not in taken),
        running=tuple(replace(g, num_passed=g.num_passed + _num_later(indices, g.index)) for g in state.running),
    )
    return state, (Train(state.step, state.training),)
