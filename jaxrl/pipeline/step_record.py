"""What a step of a run says of both sides."""

from dataclasses import dataclass, field

from jaxrl.pipeline.workload import DrawnGroup


@dataclass(frozen=True)
class StepRecord:
    """What a step says of both sides, since the one before ended. A real run can measure all of it."""

    step: int  # optimizer steps done with it
    time: float  # seconds, at its end
    seconds: float
    wait_seconds: float  # the trainer had nothing to train on
    train_seconds: float
    publish_seconds: float
    num_groups: int
    num_trained: int  # trained tokens
    num_placed: int  # tokens in rows
    num_batches: int
    lags: tuple[int, ...]  # of the groups, by their oldest token
    num_sampled: int  # tokens
    running: float  # mean sequences being decoded
    busy: float  # mean replicas that decode any
    waiting: float  # mean calls that wait for a slot
    in_tools: float  # mean calls an environment is at
    blocked: float  # share of the time in which a finished group held its worker because the queue was full
    held: float  # share of the time in which the lag kept workers without a group
    num_stale: int  # groups dropped
    num_barren: int
    finished: tuple[DrawnGroup, ...] = field(repr=False)  # groups that ended, whatever became of them
    trained: tuple[DrawnGroup, ...] = field(repr=False)
