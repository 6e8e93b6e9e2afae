"""What the controller knows, and what of it a checkpoint keeps."""

from dataclasses import dataclass
from enum import Enum

from jaxrl.pipeline.events import ControllerConfig, Fail, Stop


class Phase(Enum):
    """What the trainer's side is at, one thing at a time. An evaluation counts only where it has the sampler for itself."""

    IDLE = "idle"
    TRAINING = "training"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    CHECKPOINTING = "checkpointing"
    OVER = "over"


@dataclass(frozen=True)
class Running:
    index: int
    version: int  # served when it was first submitted: no token of it is older
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
    returning: tuple[Running, ...] = ()  # cut, or of the restored run, and neither trained on nor gone: submitted first
    running: tuple[Running, ...] = ()  # by index
    buffer: tuple[Buffered, ...] = ()  # by index
    training: tuple[int, ...] = ()
    num_barren: int = 0  # groups without variance since the last batch
    num_failed_in_a_row: int = 0
    num_stale: int = 0
    num_zero_variance: int = 0
    num_failed: int = 0
    num_cut: int = 0  # times that a group was cut
    num_passed: int = 0  # times that a group was passed by a later one
    failed: tuple[int, ...] = ()  # sync: groups of this step that failed; they keep their place as long as the run goes on
    num_zero_variance_before: int = 0  # when this step began
    evaluating: int | None = None  # version under evaluation
    evaluated: int = -1  # last version evaluated
    checkpointed: int = -1  # last step saved
    wanted: bool = False  # pull: the sampler asked for weights since the last publish
    publish_deadline: float = 0.0
    ending: Stop | Fail | None = None  # why the run winds up early


def start(config: ControllerConfig, step: int = 0, snapshot: dict | None = None) -> State:
    """The state at the beginning of a run, or after restoring the checkpoint of `step` with its `snapshot`."""
    if snapshot is None:
        return State(config, step=step, published=step, next_index=step * config.groups_per_step)
    live = sorted(zip(snapshot["live"], snapshot["versions"], strict=True))
    return State(
        config,
        step=step,
        published=step,
        next_index=snapshot["next_index"],
        returning=tuple(Running(index, version) for index, version in live),
        num_stale=snapshot["num_stale"],
        num_zero_variance=snapshot["num_zero_variance"],
        num_zero_variance_before=snapshot["num_zero_variance"],
        num_failed=snapshot["num_failed"],
        evaluated=snapshot["evaluated"],
        checkpointed=step,
    )


def snapshot(state: State) -> dict:
    """What a checkpoint keeps of the state, JSON-able. `live` splits the issued groups: what is not in it is trained on or gone;
    `versions` are those that their oldest tokens may have.

    In sync the groups of an unfinished step are all live, so those that were counted will be counted again. A run that
    fails lets the failed ones go: with a mended environment it must not fail of them once more.
    """
    live = {g.index: g.version for g in (*state.returning, *state.running)}
    live |= {g.index: g.oldest_version for g in state.buffer} | dict.fromkeys(state.training, state.step)
    num_zero_variance, num_failed = state.num_zero_variance, state.num_failed
    if state.config.mode == "sync":
        kept = () if isinstance(state.ending, Fail) else state.failed
        live |= dict.fromkeys(kept, state.step)
        num_zero_variance, num_failed = state.num_zero_variance_before, state.num_failed - len(kept)
    return {
        "next_index": state.next_index,
        "live": sorted(live),
        "versions": [live[index] for index in sorted(live)],
        "num_stale": state.num_stale,
        "num_zero_variance": num_zero_variance,
        "num_failed": num_failed,
        "evaluated": state.evaluated,
    }
