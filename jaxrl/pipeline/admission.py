"""Which groups are submitted, and when.

A group is accepted when it was trained on, is being trained on or waits in the buffer:
accepted = (step + training) · G + buffered, with training 1 during a step. A group is submitted while

    accepted + running < (lag + published + 1) · G,

with G the most groups of a step, `published` the version the sampler serves and `lag` the most that a group may have. A number of
workers and a queue are further limits: a finished group that the queue has no place for holds its worker. Accepted is
derived, never counted: a group that leaves (no variance, failed, stale) leaves the sum at once, so the run cannot stall on a leak.

sync has no admission beyond its own step: groups step · G to (step + 1) · G - 1.
"""

import sys
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
    """Submits what there is room for, cut and restored groups first: those have their place already, and need a worker only."""
    if _is_closed(state):
        return state, ()
    free = _free(state)
    returning = state.returning[:free]
    num_fresh = max(0, min(free, _budget(state)) - len(state.returning))
    fresh = range(state.next_index, state.next_index + num_fresh)
    new = (*returning, *(Running(index, state.published) for index in fresh))
    state = replace(
        state,
        returning=state.returning[len(returning) :],
        next_index=state.next_index + num_fresh,
        running=tuple(sorted(state.running + new, key=lambda g: g.index)),
    )
    return state, tuple(SubmitGroup(g.index) for g in new)


def sync_end(state: State) -> int:
    """One past the last group of the step."""
    return (state.step + 1) * state.config.groups_per_step


def is_barren(state: State) -> bool:
    return state.num_barren >= BARREN_BATCHES * state.config.groups_per_step


def _is_closed(state: State) -> bool:
    """Whether no group is submitted at this moment."""
    c = state.config
    if state.ending is not None or state.step >= c.steps:
        return True
    if c.rolls_on:  # the evaluation before the first step has the sampler for itself
        return state.step == 0 and c.eval_at_start and state.evaluated != 0
    if state.phase in (Phase.PUBLISHING, Phase.EVALUATING) or publish_due(state) or eval_due(state):
        return True
    if c.mode == "sync":
        return state.phase is not Phase.IDLE
    return c.mode == "partial" and state.phase is Phase.TRAINING


def _free(state: State) -> int:
    """Workers without a group."""
    c = state.config
    if not c.workers:
        return sys.maxsize
    holding = max(0, len(state.buffer) - c.queue) if c.queue else 0
    return max(0, c.workers - len(state.running) - holding)


def _budget(state: State) -> int:
    """Groups, beside those that run, that can be trained in time."""
    c = state.config
    if c.mode == "sync":
        return sync_end(state) - state.next_index + len(state.returning)
    if is_barren(state):
        return 0
    # Nothing is sampled for a step after the last.
    batches = min(c.most_lag + state.published + 1, c.steps)
    return batches * c.groups_per_step - accepted(state) - len(state.running)
