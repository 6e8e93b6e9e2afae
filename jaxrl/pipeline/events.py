"""What goes into the controller and what comes out: its settings, the events it hears of, the actions it asks for."""

from dataclasses import dataclass
from typing import Literal

from jaxrl.config import Config


@dataclass(frozen=True)
class ControllerConfig:
    mode: Literal["sync", "periodic", "partial", "async", "inflight"]
    steps: int
    groups_per_step: int  # most groups of a step
    max_lag: int  # not in sync and periodic
    window: int
    checkpoint_every: int
    eval_every: int = 0  # 0: no evaluation on the way
    eval_at_start: bool = False
    eval_at_end: bool = False
    checkpoint_at_start: bool = False
    publish_timeout: float = 600.0  # seconds
    # Not in sync:
    min_groups: int = 0  # fewest groups of a step; 0: groups_per_step
    workers: int = 0  # groups that run at once; 0: as many as the lag allows
    queue: int = 0  # finished groups that wait before they hold their workers; 0: no end. Only with workers
    publish_every: int = 1  # steps between publishes; of a period
    publish: Literal["push", "pull"] = "push"  # pull: when the sampler asks. In async and inflight

    def __post_init__(self):
        """Raises ValueError for settings under which a run would wait for ever."""
        if not 0 <= self.min_groups <= self.groups_per_step:
            raise ValueError(f"min_groups = {self.min_groups} is not within 0 and groups_per_step = {self.groups_per_step}")
        if self.mode not in ("sync", "periodic") and not 1 <= self.publish_every <= self.max_lag + 1:
            raise ValueError(f"publish_every = {self.publish_every} is not within 1 and max_lag + 1 = {self.max_lag + 1}")
        if self.workers and self.queue and self.workers + self.queue < self.fewest:
            raise ValueError(f"workers + queue = {self.workers + self.queue} never hold the {self.fewest} groups of a step")

    @property
    def rolls_on(self) -> bool:
        """Whether rollouts never stop."""
        return self.mode in ("async", "inflight")

    @property
    def most_lag(self) -> int:
        """Of a group when it is trained on."""
        if self.mode == "periodic":
            return self.publish_every - 1
        return 0 if self.mode == "sync" else self.max_lag

    @property
    def fewest(self) -> int:
        return self.min_groups or self.groups_per_step


def controller_config(config: Config) -> ControllerConfig:
    """The controller of a run without evaluations and checkpoints on the way: the settings of its steps alone."""
    p = config.pipeline
    return ControllerConfig(
        mode=p.mode,
        steps=p.steps,
        groups_per_step=p.groups_per_step,
        max_lag=p.max_lag,
        window=p.window,
        min_groups=p.min_groups,
        workers=p.workers,
        queue=p.queue,
        publish_every=p.publish_every,
        publish=p.publish,
        checkpoint_every=p.steps + 1,
    )


@dataclass(frozen=True)
class Knobs:
    """What may change while a run goes on; fields as of ControllerConfig."""

    min_groups: int
    groups_per_step: int
    workers: int
    queue: int
    publish_every: int


# Events: what happened.


@dataclass(frozen=True)
class GroupFinished:
    index: int
    oldest_version: int  # of its trainable tokens
    informative: bool  # False: every advantage is 0


@dataclass(frozen=True)
class GroupFailed:
    """Every episode of the group failed."""

    index: int
    cause: str


@dataclass(frozen=True)
class TrainDone:
    pass


@dataclass(frozen=True)
class TrainFailed:
    cause: str
    state_intact: bool  # the weights before the step are still there, and can be saved


@dataclass(frozen=True)
class PublishDone:
    version: int


@dataclass(frozen=True)
class PublishFailed:
    version: int
    cause: str


@dataclass(frozen=True)
class WeightsWanted:
    """Pull: the sampler is ready for newer weights."""


@dataclass(frozen=True)
class EvalDone:
    pass


@dataclass(frozen=True)
class Broken:
    """Something other than the trainer cannot go on: the sampler, say."""

    cause: str


@dataclass(frozen=True)
class CheckpointDone:
    pass


@dataclass(frozen=True)
class Signal:
    name: str


@dataclass(frozen=True)
class Retune:
    """From now on, these settings. Nothing that runs is cancelled; what is too much leaves as it is used up."""

    knobs: Knobs


@dataclass(frozen=True)
class Tick:
    """Time passed, or the run begins."""


Event = (
    GroupFinished
    | GroupFailed
    | TrainDone
    | TrainFailed
    | PublishDone
    | PublishFailed
    | WeightsWanted
    | EvalDone
    | Broken
    | CheckpointDone
    | Signal
    | Retune
    | Tick
)


# Actions: what the shell has to do.


@dataclass(frozen=True)
class SubmitGroup:
    index: int


@dataclass(frozen=True)
class CutGroup:
    """The group stops and keeps what it has sampled; it goes on there when it is submitted again."""

    index: int


@dataclass(frozen=True)
class DropGroup:
    """The group will not be trained on: forget its episodes."""

    index: int
    reason: Literal["zero_variance", "stale", "unneeded"]


@dataclass(frozen=True)
class Train:
    """One optimizer step on these groups, in this order; the policy version becomes step + 1."""

    step: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Publish:
    version: int
    in_flight: bool


@dataclass(frozen=True)
class Evaluate:
    """Held-out tasks; nothing is published before EvalDone, so one exact version answers them all."""

    version: int
    place: int  # index of the group whose priority it has: it waits for those before it, and they do not wait for it


@dataclass(frozen=True)
class Checkpoint:
    step: int


@dataclass(frozen=True)
class Stop:
    """The run is over: cancel what still runs."""

    reason: str


@dataclass(frozen=True)
class Fail:
    """The run cannot go on."""

    reason: str


Action = SubmitGroup | CutGroup | DropGroup | Train | Publish | Evaluate | Checkpoint | Stop | Fail
