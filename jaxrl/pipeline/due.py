"""What is due at this step beside training: a publish, an evaluation, a checkpoint.

A publish is due `publish_every` steps after the last one, in pull mode once the sampler has asked as well, and at once for an evaluation
of this step. None happens under an evaluation, whose answers all come from one version, nor, where rollouts stop for it, before
they have.
"""

from jaxrl.pipeline.controller_state import State


def publish_due(state: State) -> bool:
    c = state.config
    if state.evaluating is not None or state.published == state.step or (not c.rolls_on and state.running):
        return False
    if eval_wanted(state):
        return True
    if state.step >= c.steps or state.step - state.published < c.publish_every:  # nobody samples from the last step's weights
        return False
    return c.publish == "push" or state.wanted


def eval_due(state: State) -> bool:
    return state.published == state.step and state.evaluating is None and eval_wanted(state)


def eval_wanted(state: State) -> bool:
    """Whether this step's weights are to be evaluated and are not yet."""
    c = state.config
    if state.step in (state.evaluated, state.evaluating):
        return False
    if state.step == 0:
        return c.eval_at_start
    if state.step >= c.steps:
        return c.eval_at_end
    return c.eval_every > 0 and state.step % c.eval_every == 0


def checkpoint_due(state: State) -> bool:
    c = state.config
    due = c.checkpoint_at_start if state.step == 0 else state.step % c.checkpoint_every == 0
    return due and state.checkpointed != state.step
