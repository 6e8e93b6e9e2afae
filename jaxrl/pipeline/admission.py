"""Which groups are submitted, and when.

A group is accepted when it was trained on, is being trained on or waits in the buffer:
accepted = (step + training) · G + buffered, with training 1 during a step. A group is submitted while

    accepted + running < (lag + published + 1) · G,

with G the most groups of a step, `published` the version the sampler serves and `lag` the most that a group may have. A number of
workers and a queue are further limits: a finished group that the queue has no place for holds its worker. Accepted is
derived, never counted: a group that leaves (no variance, failed, stale) leaves the sum at once, so the run cannot stall on a leak.

sync has no admission beyond its own step: groups step · G to (step + 1) · G - 1.
"""

from dataclasses import replace

from jaxrl.pipeline.controller_state import Phase, Running, State
from jaxrl.pipeline.due import eval_due, publish_due
from jaxrl.pipeline.events import Action, SubmitGroup

# Groups without variance tolerated per step, in batches: past it the step is taken with what there is,
# even nothing, so that a policy that solves every task (or none) still ends its run.
BARREN_BATCHES = 8


def accepted(state: State) -> int:
    """Groups trained on, being trained on or waiting for it. Steps count as full ones, the one under way too: what they
    left room for, the policy they left behind will not have another step for."""
    steps = state.step + (state.phase is Phase.TRAINING or bool(state.training))
    return steps * state.config.groups_per_step + len(state.buffer)


def admit(state: State) -> tuple[State, tuple[Action, ...]]:
    """Submits what there is room for, cut and restored groups first."""
    room = _room(state)
    if room <= 0:
        return state, ()
    returning = state.returning[:room]
    fresh = tuple(range(state.next_index, state.next_index + room - len(returning)))
    new = (*returning, *(Running(index, state.published) for index in fresh))
    state = replace(
        state,
        returning=state.returning[len(returning) :],
        next_index=state.next_index + len(fresh),
        running=tuple(sorted(state.running + new, key=lambda g: g.index)),
    )
    return state, tuple(SubmitGroup(g.index) for g in new)


def sync_end(state: State) -> int:
    """One past the last group of the step."""
    return (state.step + 1) * state.config.groups_per_step


def is_barren(state: State) -> bool:
    return state.num_barren >= BARREN_BATCHES * state.config.groups_per_step


def _room(state: State) -> int:
    """How many groups to submit now."""
    c = state.config
    if state.ending is not None or state.step >= c.steps:
        return 0
    if c.rolls_on:
        if state.step == 0 and c.eval_at_start and state.evaluated != 0:
            return 0  # the evaluation before the first step has the sampler for itself
    elif state.phase in (Phase.PUBLISHING, Phase.EVALUATING) or publish_due(state) or eval_due(state):
        return 0
    if c.mode in ("sync", "partial") and state.phase is Phase.TRAINING:
        return 0
    if c.mode == "sync":
        return _sync_room(state)
    if is_barren(state):
        return 0
    # Nothing is sampled for a step after the last.
    batches = min(c.most_lag + state.published + 1, c.steps)
    room = batches * c.groups_per_step - accepted(state) - len(state.running)
    if c.workers:
        holding = max(0, len(state.buffer) - c.queue) if c.queue else 0
        room = min(room, c.workers - len(state.running) - holding)
    return room


def _sync_room(state: State) -> int:
    return 0 if state.phase is not Phase.IDLE else sync_end(state) - state.next_index + len(state.returning)
