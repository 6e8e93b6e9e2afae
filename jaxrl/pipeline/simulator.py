"""A run without a model: discrete events under the controller of the real one.

    controller ──actions──> simulated sampler, environments, trainer, publisher ──events──> controller

Decoding is processor sharing. A replica that decodes b sequences gives each a token every decode(b) seconds; its clock
counts the tokens a sequence present all the time would have got, so that a sequence that enters at clock V leaves at
V + its length whatever comes and goes meanwhile. Every event costs O(log n), and controller time.

Left out: prefill (in the decode curve, where it was calibrated), what a prefix cache saves, and failures of machines.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxrl.pipeline import controller as c
from jaxrl.pipeline.events import ControllerConfig, Knobs, Retune
from jaxrl.pipeline.first_to_end import first_to_end
from jaxrl.pipeline.step_record import StepRecord
from jaxrl.pipeline.workload import DrawnGroup, Machine, Workload, draw_group, interpolate, restrict


class SimulatedFailure(Exception):
    """The controller ended the run: every episode of a step failed."""


Tuner = Callable[[StepRecord, Knobs], Knobs | None]


@dataclass(eq=False)
class _Episode:
    group: int
    number: int
    call: int = 0
    left: float | None = None  # tokens of the call that a cut left; None: all
    is_stopped: bool = False  # what was announced of it is void


@dataclass(eq=False)
class _Replica:
    clock: float = 0.0  # tokens
    at: float = 0.0  # when the clock was set, seconds
    stamp: int = 0  # of the event that announces its next end; older ones are void
    ends: list[tuple[float, int, _Episode]] = field(default_factory=list)  # heap by clock


class Simulation:
    """One run. `run` it once."""

    def __init__(
        self, config: ControllerConfig, workload: Workload, machine: Machine, seed: int = 0, tuner: Tuner | None = None
    ):
        self.workload, self.machine, self.seed, self.tuner = workload, machine, seed, tuner
        self.controller = c.start(config)
        self.now = 0.0
        self.records: list[StepRecord] = []
        self.ended: str | None = None
        self._events: list[tuple[float, int, Callable, tuple]] = []  # heap
        self._count = 0
        self._replicas = [_Replica() for _ in range(machine.replicas)]
        self._free = [(0, r) for r in range(machine.replicas)]  # heap by sequences; an entry that is out of date is skipped
        self._decode = [interpolate(machine.decode, b) for b in range(machine.slots + 1)]
        self._waiting: list[tuple[int, int, _Episode]] = []  # calls without a slot, heap by group
        self._queued: list[tuple[int, int, _Episode]] = []  # episodes over the concurrency, heap
        self._in_progress = 0
        self._groups: dict[int, DrawnGroup] = {}
        self._episodes: dict[int, list[_Episode]] = {}  # of a group, that have not ended
        self._ended: dict[int, list[tuple[int, bool]]] = {}  # number and success of the others, as they ended
        self._oldest: dict[int, int] = {}  # version of the first token of a group
        self._lag_from: dict[int, int] = {}  # the same of finished groups
        self._draining: tuple[int, float] | None = None  # version to publish once no call runs, and when that began
        self._is_paused = False  # no call starts
        self._training: tuple[float, float] | None = None  # seconds left at time, while it runs
        self._train_stamp = 0
        self._was_decoding = False
        self._batch: tuple[DrawnGroup, ...] = ()
        self._lags: tuple[int, ...] = ()
        self._train_began = 0.0
        self._num_running = self._num_busy = self._in_tools = 0
        self._reset()

    def run(self) -> list[StepRecord]:
        """The steps, until the run ends. Raises SimulatedFailure for what the controller fails a run for."""
        self._give(c.Tick())
        while self.ended is None:
            if not self._events:
                raise AssertionError(f"the run stalled at step {self.controller.step}: nothing is under way")
            time, _, handler, arguments = heapq.heappop(self._events)
            self._pass(time)
            handler(*arguments)
            if (
                self.controller.config.publish == "pull"
                and not self._waiting
                and not self.controller.wanted
                and self.ended is None
            ):
                self._give(c.WeightsWanted())
        return self.records

    # Time.

    def _pass(self, time: float) -> None:
        span = time - self.now
        if span > 0:
            sums, config, state = self._sums, self.controller.config, self.controller
            sums[0] += span * self._num_running
            sums[1] += span * self._num_busy
            sums[2] += span * len(self._waiting)
            sums[3] += span * self._in_tools
            if config.workers:
                room = config.workers - len(state.running)
                holding = max(0, len(state.buffer) - config.queue) if config.queue else 0
                sums[4] += span * (holding > 0)
                sums[5] += span * (room > holding)
            self.now = time

    def _at(self, seconds: float, handler: Callable, *arguments) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, handler, arguments))

    def _reset(self) -> None:
        self._sums = [0.0] * 6
        self._finished: list[DrawnGroup] = []
        self._num_sampled = 0
        self._publish_seconds = 0.0
        self._other_seconds = 0.0
        self._since = self.now
        self._before = self.controller

    # The controller.

    def _give(self, event: c.Event) -> None:
        self.controller, actions = c.step(self.controller, event, self.now)
        for action in actions:
            self._do(action)

    def _do(self, action: c.Action) -> None:
        match action:
            case c.SubmitGroup(index):
                self._submit(index)
            case c.CutGroup(index):
                self._episodes[index] = self._stop(index)
            case c.DropGroup(index, _):
                self._groups.pop(index, None)
                self._lag_from.pop(index, None)
            case c.Train(_, groups):
                self._train(groups)
            case c.Publish(version, in_flight):
                if in_flight:
                    self._at(self.machine.publish_seconds, self._published, version, self.now)
                else:
                    self._draining, self._is_paused = (version, self.now), True
                    self._drained()
            case c.Evaluate():
                if self.controller.phase is c.Phase.EVALUATING:  # the trainer waits for it
                    self._other_seconds += self.machine.evaluate_seconds
                self._at(self.machine.evaluate_seconds, self._give, c.EvalDone())
            case c.Checkpoint(_):
                self._other_seconds += self.machine.checkpoint_seconds
                self._at(self.machine.checkpoint_seconds, self._give, c.CheckpointDone())
            case c.Stop(reason):
                self.ended = reason
            case c.Fail(reason):
                raise SimulatedFailure(reason)

    # The sampler and the environments.

    def _submit(self, index: int) -> None:
        if index not in self._groups:
            self._groups[index] = draw_group(self.workload, self.seed, index, self.controller.step)
            self._ended[index] = []
            self._episodes[index] = [_Episode(index, k) for k in range(self.workload.group_size + self.workload.extra)]
        for episode in self._episodes[index]:
            heapq.heappush(self._queued, (index, episode.number, episode))
        self._start_episodes()

    def _stop(self, index: int) -> list[_Episode]:
        """Takes the group's episodes out of the sampler and the environments. Returns them as they go on: a call
        behind its tokens; a tool that was at work is asked again."""
        stopped, going_on = self._episodes.pop(index), {}
        for episode in stopped:
            episode.is_stopped = True
            going_on[episode.number] = _Episode(index, episode.number, episode.call, episode.left)
        num_queued = len(self._queued)
        self._queued = [entry for entry in self._queued if not entry[2].is_stopped]
        self._in_progress -= len(stopped) - (num_queued - len(self._queued))
        self._waiting = [entry for entry in self._waiting if not entry[2].is_stopped]
        heapq.heapify(self._queued)
        heapq.heapify(self._waiting)
        for which, replica in enumerate(self._replicas):
            if not any(episode.is_stopped for _, _, episode in replica.ends):
                continue
            self._advance(replica)
            for end, _, episode in replica.ends:
                if episode.is_stopped:
                    left = max(0.0, end - replica.clock)
                    self._num_sampled += round(self._call_tokens(episode) - left)
                    going_on[episode.number].left = left
                    self._num_running -= 1
            replica.ends = [entry for entry in replica.ends if not entry[2].is_stopped]
            heapq.heapify(replica.ends)
            heapq.heappush(self._free, (len(replica.ends), which))
            self._num_busy -= not replica.ends
            self._announce(which)
        self._drained()
        self._start_episodes()
        self._start_calls()
        self._share()
        return [going_on[number] for number in sorted(going_on)]

    def _call_tokens(self, episode: _Episode) -> float:
        """That the call samples from its start, or from where a cut left it, on."""
        return (
            float(self._groups[episode.group].lengths[episode.number, episode.call]) if episode.left is None else episode.left
        )

    def _start_episodes(self) -> None:
        while self._queued and self._in_progress < self.machine.concurrency:
            self._in_progress += 1
            self._call(heapq.heappop(self._queued)[2])

    def _call(self, episode: _Episode) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (episode.group, self._count, episode))
        self._start_calls()

    def _start_calls(self) -> None:
        if self._is_paused:
            return
        free, replicas = self._free, self._replicas
        while self._waiting:
            while free and len(replicas[free[0][1]].ends) != free[0][0]:
                heapq.heappop(free)
            if not free:
                return
            number, which = heapq.heappop(free)
            replica = replicas[which]
            group, _, episode = heapq.heappop(self._waiting)
            self._oldest.setdefault(group, self.controller.published)
            self._advance(replica)
            self._count += 1
            tokens = self._call_tokens(episode) if group in self._groups else 1.0
            heapq.heappush(replica.ends, (replica.clock + tokens, self._count, episode))
            self._num_running += 1
            self._num_busy += number == 0
            if number + 1 < self.machine.slots:
                heapq.heappush(free, (number + 1, which))
            self._announce(which)
        self._share()

    def _advance(self, replica: _Replica) -> None:
        if replica.ends:
            replica.clock += (self.now - replica.at) / self._token_seconds(replica)
        replica.at = self.now

    def _token_seconds(self, replica: _Replica) -> float:
        slowed = self.machine.overlap if self._training is not None else 1.0
        return self._decode[len(replica.ends)] / slowed

    def _announce(self, which: int) -> None:
        replica = self._replicas[which]
        replica.stamp += 1
        if replica.ends:
            seconds = max(0.0, replica.ends[0][0] - replica.clock) * self._token_seconds(replica)
            self._at(seconds, self._call_ended, which, replica.stamp)

    def _call_ended(self, which: int, stamp: int) -> None:
        replica = self._replicas[which]
        if stamp != replica.stamp:
            return
        self._advance(replica)
        _, _, episode = heapq.heappop(replica.ends)
        number = len(replica.ends)
        heapq.heappush(self._free, (number, which))
        self._num_running -= 1
        self._num_busy -= number == 0
        self._announce(which)
        group = self._groups.get(episode.group)
        if group is not None:
            self._num_sampled += round(self._call_tokens(episode))
            episode.left = 0.0
            self._in_tools += 1
            self._at(float(group.latencies[episode.number, episode.call]), self._answered, episode)
        self._drained()
        self._start_calls()
        self._share()

    def _answered(self, episode: _Episode) -> None:
        self._in_tools -= 1
        if episode.is_stopped:
            return
        episode.call += 1
        episode.left = None
        if episode.group in self._groups and episode.call < self.workload.calls:
            self._call(episode)
            return
        self._in_progress -= 1
        self._start_episodes()
        if episode.group not in self._groups:
            return
        self._episodes[episode.group].remove(episode)
        ended = self._ended[episode.group]
        ended.append((episode.number, not self._groups[episode.group].failed[episode.number]))
        wanted = self.workload.group_size
        kept = first_to_end([succeeded for _, succeeded in ended], wanted, wanted + self.workload.extra)
        if kept is not None:
            self._group_ended(episode.group, [ended[place][0] for place in kept])

    def _group_ended(self, index: int, kept: Sequence[int]) -> None:
        if self._episodes[index]:
            self._stop(index)
        self._episodes.pop(index, None)
        del self._ended[index]
        group = self._groups[index] = restrict(self.workload, self._groups[index], kept)
        oldest = self._oldest.pop(index)
        self._finished.append(group)
        if group.failed.all():
            del self._groups[index]
            self._give(c.GroupFailed(index, "simulated failure"))
        else:
            self._lag_from[index] = oldest
            self._give(c.GroupFinished(index, oldest, not group.is_barren))

    # The trainer's side.

    def _train(self, groups: Sequence[int]) -> None:
        self._batch = tuple(self._groups.pop(index) for index in groups)
        self._lags = tuple(self.controller.step - self._lag_from.pop(index) for index in groups)
        tokens = sum(group.tokens for group in self._batch)
        seconds = self.machine.step_seconds + self.machine.batch_seconds * self.machine.num_batches(tokens)
        self._train_began = self.now
        self._change_training((seconds, self.now))

    def _change_training(self, training: tuple[float, float] | None) -> None:
        """The trainer starts or ends: where it shares a processor, the sampler's speed changes."""
        shares = self.machine.overlap != 1.0
        if shares:
            for replica in self._replicas:
                self._advance(replica)
        self._training = training
        if shares:
            for which in range(len(self._replicas)):
                self._announce(which)
        self._was_decoding = self._num_running > 0
        self._expect_trained()

    def _share(self) -> None:
        """The sampler began or ended to decode: where it shares a processor, the trainer's speed changes."""
        is_decoding = self._num_running > 0
        if self._training is None or self.machine.overlap == 1.0 or is_decoding == self._was_decoding:
            return
        left, at = self._training
        self._training = (left - (self.now - at) * self._train_speed(), self.now)
        self._was_decoding = is_decoding
        self._expect_trained()

    def _train_speed(self) -> float:
        return self.machine.overlap if self._was_decoding else 1.0

    def _expect_trained(self) -> None:
        self._train_stamp += 1
        if self._training is not None:
            self._at(max(0.0, self._training[0]) / self._train_speed(), self._trained, self._train_stamp)

    def _trained(self, stamp: int) -> None:
        if stamp != self._train_stamp:
            return
        self._change_training(None)
        self._record()
        self._give(c.TrainDone())
        if self.tuner is not None and self.ended is None:
            config = self.controller.config
            knobs = Knobs(config.min_groups, config.groups_per_step, config.workers, config.queue, config.publish_every)
            changed = self.tuner(self.records[-1], knobs)
            if changed is not None:
                self._give(Retune(changed))

    def _record(self) -> None:
        seconds = self.now - self._since
        trained = self.now - self._train_began
        tokens = sum(group.tokens for group in self._batch)
        wait = max(0.0, seconds - trained - self._publish_seconds - self._other_seconds)
        running, busy, waiting, in_tools, blocked, held = (value / max(seconds, 1e-9) for value in self._sums)
        self.records.append(
            StepRecord(
                step=self.controller.step + 1,
                time=self.now,
                seconds=seconds,
                wait_seconds=wait,
                train_seconds=trained,
                publish_seconds=self._publish_seconds,
                num_groups=len(self._batch),
                num_trained=sum(group.trained for group in self._batch if not group.is_barren),
                num_placed=tokens,
                num_batches=self.machine.num_batches(tokens),
                lags=self._lags,
                num_sampled=self._num_sampled,
                running=running,
                busy=busy,
                waiting=waiting,
                in_tools=in_tools,
                blocked=blocked,
                held=held,
                num_stale=self.controller.num_stale - self._before.num_stale,
                num_barren=self.controller.num_zero_variance - self._before.num_zero_variance,
                finished=tuple(self._finished),
                trained=self._batch,
            )
        )
        self._reset()

    def _drained(self) -> None:
        if self._num_running == 0 and self._draining is not None:
            (version, began), self._draining = self._draining, None
            self._at(self.machine.publish_seconds, self._published, version, began)

    def _published(self, version: int, began: float) -> None:
        self._publish_seconds += self.now - began
        self._is_paused = False
        self._give(c.PublishDone(version))
        self._start_calls()


def simulate(
    config: ControllerConfig, workload: Workload, machine: Machine, seed: int = 0, tuner: Tuner | None = None
) -> list[StepRecord]:
    """The steps of a run of `config`. Raises SimulatedFailure for a run that fails."""
    return Simulation(config, workload, machine, seed, tuner).run()
