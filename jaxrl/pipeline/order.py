"""Which groups a step takes.

sync: its own, in index order, when all are there.

The others take the oldest buffered groups as soon as there are enough of them, and up to G. A running group may be passed
by at most window - 1 later ones, and never when that would make a group stale: a group sampled from version v can
be trained until step v + lag, and a batch is held back while the groups it leaves behind could no
longer all be trained in time at G a step. Dropping a stale group is what remains when all this failed.

periodic: the order within a period is free, since none of its groups outlives it; its last step waits for every group that runs.
partial: when a step is taken, what still runs is cut.
"""

from bisect import bisect_right
from dataclasses import replace

from jaxrl.pipeline.admission import admit, is_barren, sync_end
from jaxrl.pipeline.controller_state import Buffered, Phase, State
from jaxrl.pipeline.events import Action, CutGroup, DropGroup, Train


def take_step(state: State) -> tuple[State, tuple[Action, ...]]:
    """Starts the optimizer step that the groups at hand allow, if they do."""
    if state.config.mode == "sync":
        if state.running or state.returning or state.next_index < sync_end(state):
            return state, ()
        return _train(state, state.buffer)
    state, dropped = _drop_stale(state)
    state, submitted = admit(state)
    batch = state.buffer[: state.config.groups_per_step]
    if not _is_ready(state, batch):
        return state, (*dropped, *submitted)
    state, cut = _cut(state) if state.config.mode == "partial" else (state, ())
    state, train = _train(state, batch)
    return state, (*dropped, *submitted, *cut, *train)


def _drop_stale(state: State) -> tuple[State, tuple[Action, ...]]:
    stale = tuple(g for g in state.buffer if state.step - g.oldest_version > state.config.most_lag)
    state = replace(state, buffer=tuple(g for g in state.buffer if g not in stale), num_stale=state.num_stale + len(stale))
    return state, tuple(DropGroup(g.index, "stale") for g in stale)


def _is_ready(state: State, batch: tuple[Buffered, ...]) -> bool:
    c = state.config
    if len(batch) < c.fewest and not is_barren(state):
        return False
    if c.mode == "periodic":
        ends_period = state.step + 1 - state.published >= c.publish_every
        return not (ends_period and state.running) and _leaves_time(state, batch)
    return _may_pass(state, batch) and _leaves_time(state, batch)


def _may_pass(state: State, batch: tuple[Buffered, ...]) -> bool:
    """Whether no running group is passed by more than window - 1 later ones."""
    taken = [g.index for g in batch]
    return all(g.num_passed + _num_later(taken, g.index) < state.config.window for g in state.running)


def _num_later(taken: list[int], index: int) -> int:
    """Groups after `index` among those of a batch, which are sorted."""
    return len(taken) - bisect_right(taken, index)


def _leaves_time(state: State, batch: tuple[Buffered, ...]) -> bool:
    """Whether the groups left behind can all be trained before they are stale, at G a step.

    Of those that can be trained in t more steps at most there may be t · G. Only running groups that are not too old already
    are a reason to hold a batch back: what is buffered and late gains nothing by waiting.
    """
    c = state.config
    left = [(g.version, True) for g in state.running] + [(g.oldest_version, False) for g in state.buffer[len(batch) :]]
    waiting_helps = False
    for rank, (version, is_running) in enumerate(sorted(left)):
        waiting_helps |= is_running and version + c.most_lag >= state.step
        if waiting_helps and rank >= c.groups_per_step * (version + c.most_lag - state.step):
            return False
    return True


def _cut(state: State) -> tuple[State, tuple[Action, ...]]:
    """What runs stops and keeps what it has; it is submitted first when rollouts go on."""
    running = state.running
    state = replace(
        state,
        running=(),
        returning=tuple(sorted(state.returning + running, key=lambda g: g.index)),
        num_cut=state.num_cut + len(running),
    )
    return state, tuple(CutGroup(g.index) for g in running)


def _train(state: State, batch: tuple[Buffered, ...]) -> tuple[State, tuple[Action, ...]]:
    indices = [g.index for g in batch]
    taken = set(indices)
    running, returning = (
        tuple(replace(g, num_passed=g.num_passed + _num_later(indices, g.index)) for g in groups)
        for groups in (state.running, state.returning)
    )
    state = replace(
        state,
        phase=Phase.TRAINING,
        training=tuple(indices),
        buffer=tuple(g for g in state.buffer if g.index not in taken),
        running=running,
        returning=returning,
        num_passed=state.num_passed + sum(_num_later(indices, g.index) for g in (*running, *returning)),
    )
    return state, (Train(state.step, state.training),)
