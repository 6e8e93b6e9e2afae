"""What the run does next: a pure function (state, event, now) -> (state, actions).

asyncio is its shell in a real run, a discrete-event loop can be another; neither decides anything.

| mode | rollouts | weights are published | the lag of a group is at most |
| --- | --- | --- | --- |
| sync | those of the step, which waits for all of them | after every step | 0 |
| periodic | those of publish_every steps, in any order | after these steps, when none runs | publish_every - 1 |
| partial | go on between steps only; a step cuts what runs, which continues after it | after publish_every steps | max_lag |
| async | never stop | after publish_every steps, between generations | max_lag |
| inflight | never stop | after publish_every steps, under running generations | max_lag |

Which groups are submitted: `admission`. Which a step takes: `order`. What is due beside: `due`. In pull mode a publish also waits
until the sampler asks (`WeightsWanted`); meanwhile training goes on as far as the lag allows.

An evaluation takes the sampler for itself where rollouts stop anyway. In async and inflight it runs beside them, in the queue's place
of a group submitted when it began: groups before it go first, later ones do not delay it. Training goes on; only publishing waits.
The trainer waits for an evaluation where a checkpoint of its step is due (the best is chosen by it), or the next evaluation.
"""

from dataclasses import replace

from jaxrl.pipeline.admission import accepted, admit
from jaxrl.pipeline.controller_state import Buffered, Phase, Running, State, snapshot, start
from jaxrl.pipeline.due import checkpoint_due, eval_due, eval_wanted, publish_due
from jaxrl.pipeline.events import (
    Action,
    Broken,
    Checkpoint,
    CheckpointDone,
    ControllerConfig,
    CutGroup,
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
    WeightsWanted,
)
from jaxrl.pipeline.order import take_step

__all__ = [
    "Action",
    "Broken",
    "Buffered",
    "Checkpoint",
    "CheckpointDone",
    "ControllerConfig",
    "CutGroup",
    "DropGroup",
    "EvalDone",
    "Evaluate",
    "Event",
    "Fail",
    "GroupFailed",
    "GroupFinished",
    "Phase",
    "Publish",
    "PublishDone",
    "PublishFailed",
    "Retune",
    "Running",
    "Signal",
    "State",
    "Stop",
    "SubmitGroup",
    "Tick",
    "Train",
    "TrainDone",
    "TrainFailed",
    "WeightsWanted",
    "accepted",
    "snapshot",
    "start",
    "step",
]


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """The next state and what to do. `now` is in seconds on any clock that never goes back."""
    if state.phase is Phase.OVER:
        return state, ()
    state, actions = _apply(state, event, now)
    state, submitted = admit(state)
    state, chosen = _next(state, now)
    state, freed = admit(state)  # workers whose groups a batch took out of a full queue
    return state, actions + submitted + chosen + freed


def _apply(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """The event's own effect."""
    match event:
        case GroupFinished():
            return _finished(state, event)
        case GroupFailed():
            return _failed(state, event), ()
        case TrainDone():
            return _trained(state)
        case TrainFailed(cause, state_intact):
            if not state_intact:
                return replace(state, phase=Phase.OVER), (Fail(cause),)
            return _end(replace(state, phase=Phase.IDLE), Fail(cause)), ()
        case PublishDone(version):
            if version != state.step:
                return _end(state, Fail(f"PublishError: version {state.step} was published, the sampler serves {version}")), ()
            phase = Phase.IDLE if state.phase is Phase.PUBLISHING else state.phase
            return replace(state, published=version, phase=phase, wanted=False), ()
        case PublishFailed(version, cause):
            return _end(state, Fail(f"PublishError: version {version} did not reach the sampler: {cause}")), ()
        case WeightsWanted():
            return replace(state, wanted=True), ()
        case EvalDone():
            if state.evaluating is None:  # abandoned: a late answer must not free the trainer
                return state, ()
            phase = Phase.IDLE if state.phase is Phase.EVALUATING else state.phase
            return replace(state, phase=phase, evaluated=state.evaluating, evaluating=None), ()
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


def _trained(state: State) -> tuple[State, tuple[Action, ...]]:
    state = replace(
        state,
        phase=Phase.IDLE,
        step=state.step + 1,
        training=(),
        failed=(),
        num_barren=0,
        num_zero_variance_before=state.num_zero_variance,
    )
    if state.step < state.config.steps:
        return state, ()
    unneeded = tuple(DropGroup(g.index, "unneeded") for g in (*state.running, *state.returning, *state.buffer))
    return replace(state, running=(), buffer=(), returning=()), unneeded


def _finished(state: State, event: GroupFinished) -> tuple[State, tuple[Action, ...]]:
    if state.step >= state.config.steps:
        return state, ()  # it was cancelled and made it all the same
    state = _left(state, event.index, num_failed_in_a_row=0)
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
    state = _left(state, event.index, num_failed_in_a_row=in_a_row, num_failed=state.num_failed + 1)
    if state.config.mode == "sync":
        state = replace(state, failed=(*state.failed, event.index))
    if in_a_row < state.config.groups_per_step:
        return state
    return _end(state, Fail(f"every episode of the last {in_a_row} groups failed; the last cause: {event.cause}"))


def _left(state: State, index: int, **changes) -> State:
    """A group ended: one that runs, or that had just ended when it was cut."""
    running, returning = (tuple(g for g in groups if g.index != index) for groups in (state.running, state.returning))
    gone = len(state.running) + len(state.returning) - len(running) - len(returning)
    assert gone == 1, f"group {index} is not running"
    return replace(state, running=running, returning=returning, **changes)


def _next(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """What the trainer's side does now, if it is free."""
    c = state.config
    if state.ending is not None:
        return _wind_up(state, state.ending)
    if state.phase is not Phase.IDLE:
        return state, ()
    if publish_due(state):
        publishing = replace(state, phase=Phase.PUBLISHING, publish_deadline=now + c.publish_timeout)
        return publishing, (Publish(state.step, c.mode == "inflight"),)
    if not eval_due(state):
        return _go_on(state)
    state = replace(state, evaluating=state.step)
    evaluate = Evaluate(state.step, state.next_index)
    if not c.rolls_on:
        return replace(state, phase=Phase.EVALUATING), (evaluate,)
    state, actions = _go_on(state)
    return state, (evaluate, *actions)


def _go_on(state: State) -> tuple[State, tuple[Action, ...]]:
    """Ends, saves or trains, unless an evaluation is waited for."""
    if eval_wanted(state):
        return state, ()  # these weights have to reach the sampler first
    if state.step >= state.config.steps:
        return (state, ()) if state.evaluating is not None else _wind_up(state, Stop("finished"))
    if checkpoint_due(state):
        if state.evaluating == state.step:
            return state, ()
        return replace(state, phase=Phase.CHECKPOINTING), (Checkpoint(state.step),)
    return take_step(state)


def _wind_up(state: State, ending: Stop | Fail) -> tuple[State, tuple[Action, ...]]:
    """Save what is not saved yet, then end. Only a step or a save under way is waited for, never a sampler."""
    if state.phase in (Phase.TRAINING, Phase.CHECKPOINTING, Phase.OVER):
        return state, ()
    state = replace(state, evaluating=None)
    if state.checkpointed != state.step:
        return replace(state, phase=Phase.CHECKPOINTING), (Checkpoint(state.step),)
    return replace(state, phase=Phase.OVER), (ending,)
