"""The asyncio shell of a run: does what the controller says and tells it what happened.

    event ──> controller.step ──> actions ──> tasks and the trainer's thread ──> events

The controller decides; nothing here does. JAX calls of the trainer go to one thread, so that the event loop
never waits on a device; the sampler has a thread of its own, environments are processes.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl.checkpoint import Checkpoints
from jaxrl.config import Config, ConfigError
from jaxrl.data import Group
from jaxrl.metrics import Trackers, names
from jaxrl.packing import PackingError
from jaxrl.pipeline import controller as c
from jaxrl.pipeline.alarms import Alarms
from jaxrl.pipeline.batch import Batch, is_informative, oldest_version
from jaxrl.pipeline.data_order import fingerprint
from jaxrl.pipeline.evaluate import evaluate
from jaxrl.pipeline.events import controller_config
from jaxrl.pipeline.groups import Progress, run_group
from jaxrl.pipeline.journal import Journal
from jaxrl.pipeline.journal_writer import JournalWriter
from jaxrl.pipeline.packer import Packer, PackerError
from jaxrl.pipeline.parity_watch import ParityWatch
from jaxrl.pipeline.rollouts import extra_metrics, load_metrics, num_sampled, rollout_metrics, write_rollouts
from jaxrl.pipeline.setup import Parts
from jaxrl.pipeline.start import saved_part
from jaxrl.pipeline.training import Trained, train
from jaxrl.rollout.episodes import EpisodeRunner
from jaxrl.rollout.protocol import Sampler, SamplerError, SamplerLoad
from jaxrl.trainer.gather import gather
from jaxrl.trainer.processes import Action, Peers, Record
from jaxrl.trainer.state import TrainState, variables_of

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
LOAD_SECONDS = 0.1  # between two looks at the sampler's load
PUBLISH_SECONDS = 600.0  # the largest weights over a slow link take minutes


class RunError(Exception):
    """The run cannot go on. What was finished is in the run's folder; the same command continues it."""


def kept(config: Config) -> str:
    """What an error says last."""
    return f"{Path(config.out) / config.name} holds what was finished; the same command continues from there"


class Shell:
    """The running parts, and what only the shell has to remember between two steps."""

    def __init__(
        self,
        parts: Parts,
        folder: Path,
        peers: Peers,
        state: TrainState,
        frozen: Any,
        host: dict[str, Any] | None,
        sampler: Sampler,
        runner: EpisodeRunner,
        packer: Packer,
        checkpoints: Checkpoints,
        journal: Journal,
        trackers: Trackers,
        on_trainer: Callable[..., Awaitable[Any]],
        events: asyncio.Queue[c.Event | Exception],
        began: float,
    ):
        config = parts.config
        self.parts, self.config, self.folder, self.peers = parts, config, folder, peers
        self.state = state
        self.frozen = frozen  # the base under adapters, where the sampler can take it from
        self.sampler, self.runner, self.checkpoints, self.journal = sampler, runner, checkpoints, journal
        self.packer = packer
        self.trackers, self.on_trainer, self.events = trackers, on_trainer, events
        host = host or {"controller": None, "heldout_before": None, "heldout": None, "seconds": 0.0, "dataset": None}
        self.dataset = host["dataset"] or fingerprint(parts.environment.train)
        self.heldout_before, self.heldout = host["heldout_before"], host["heldout"]
        self.reward: float | None = None
        self.began = began - host["seconds"]
        self.controller = c.start(_controller_config(config), int(state.step), host["controller"])
        live = {group.index for group in self.controller.returning}
        self.progress: dict[int, Progress] = defaultdict(Progress)  # of groups that have begun and not ended
        for group in journal.replay(lambda i: i in live or i >= self.controller.next_index):
            self.progress[group.index].episodes = {episode.index: episode for episode in group.episodes}
        for index, calls in journal.partials(lambda i: i in live or i >= self.controller.next_index).items():
            self.progress[index].calls |= calls
        self.writer = JournalWriter(journal)
        self.finished: dict[int, Group] = {}  # waiting to be trained on, or being trained on
        self.recent: list[Group] = []  # finished since the last step
        self.saved_snapshot: dict[str, Any] | None = None  # of the save under way
        self.alarms = Alarms(config.sampling)
        self.parity = ParityWatch(config, lambda token: parts.tokenizer.decode([token], special=True))
        self.left_out: list[int] = []  # tokens of the episodes that their groups left out
        self.tasks: dict[asyncio.Task, int | None] = {}  # with the group it runs
        self.cut: dict[int, list[asyncio.Task]] = {}  # what still ends of groups that were cut
        self.counted = self.controller  # at the step before: its counters run through the whole run
        self.loads: list[SamplerLoad] = []  # seen since the last step
        self.last_step_at = time.monotonic()
        self.seconds = {"publish": 0.0, "checkpoint": 0.0, "evaluate": 0.0}

    async def run(self) -> dict[str, Any]:
        watching = asyncio.create_task(self._watch_load())
        try:
            return await self._loop()
        finally:
            for task in (watching, *self.tasks):
                task.cancel()
            await asyncio.gather(watching, *self.tasks, return_exceptions=True)
            await self.writer.close()

    async def _watch_load(self) -> None:
        while True:
            self.loads.append(self.sampler.load())
            if self.config.pipeline.publish == "pull" and not self.controller.wanted and self.loads[-1].num_waiting == 0:
                self.events.put_nowait(c.WeightsWanted())
            await asyncio.sleep(LOAD_SECONDS)

    async def _loop(self) -> dict[str, Any]:
        event: c.Event | Exception = c.Tick()
        while True:
            if isinstance(event, Exception):
                raise event
            self.controller, actions = c.step(self.controller, event, time.monotonic())
            for action in actions:
                if isinstance(action, c.Stop):
                    await self.on_trainer(self._finish_save)
                    self.peers.send(Record(Action.STOP, self.controller.step, detail=action.reason))
                    return self._summary(action.reason)
                if isinstance(action, c.Fail):
                    raise RunError(f"{action.reason}\n{kept(self.config)}")
                self._do(action)
            try:
                event = await asyncio.wait_for(self.events.get(), TICK_SECONDS)
            except TimeoutError:
                event = c.Tick()

    def _do(self, action: c.Action) -> None:
        match action:
            case c.SubmitGroup(index):
                self._spawn(self._run_group(index), index)
            case c.CutGroup(index):
                self.cut[index] = self._cancel(index)
            case c.DropGroup(index, _):
                self.finished.pop(index, None)
                self.progress.pop(index, None)
                self._cancel(index)
            case c.Train(step, indices):
                self._spawn(self._train(step, indices))
            case c.Publish(version, in_flight):
                self._spawn(self._publish(version, in_flight))
            case c.Evaluate(version, place):
                self._spawn(self._evaluate(version, place))
            case c.Checkpoint(step):
                self._spawn(self._checkpoint(step, c.snapshot(self.controller)))

    def _cancel(self, index: int) -> list[asyncio.Task]:
        tasks = [task for task, group in self.tasks.items() if group == index]
        for task in tasks:
            task.cancel()
        return tasks

    def _spawn(self, work: Awaitable[c.Event], group: int | None = None) -> None:
        task = asyncio.ensure_future(work)
        self.tasks[task] = group
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task) -> None:
        """A task's result is the event it ends with. A sampler that fails leaves weights to save; any other exception
        ends the run as it is."""
        del self.tasks[task]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.events.put_nowait(task.result())
            return
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        is_outside = isinstance(error, SamplerError | ConfigError)
        self.events.put_nowait(c.Broken(f"{type(error).__name__}: {error}") if is_outside else error)

    async def _run_group(self, index: int) -> c.Event:
        if cut := self.cut.pop(index, []):
            await asyncio.wait(cut)
        tasks, progress = self.parts.environment.train, self.progress[index]
        ran = await run_group(index, tasks, self.runner, self.writer, progress, self.config, self.parts.limits)
        group = ran.group
        self.progress.pop(index, None)
        self.left_out += ran.left_out
        errors = [e.error for e in group.episodes if e.error is not None]
        self.recent.append(group)
        if len(errors) == len(group.episodes):
            log.warning("group %d: every episode failed, the first: %s", index, errors[0])
            return c.GroupFailed(index, errors[0])
        informative = is_informative(group, self.config)
        self.finished[index] = group
        return c.GroupFinished(index, oldest_version(group) if informative else self.controller.published, informative)

    async def _train(self, step: int, indices: tuple[int, ...]) -> c.Event:
        groups = [self.finished.pop(index) for index in indices]
        began = time.monotonic()
        try:
            batch = await self.packer.make_batch(groups, step)
        except (PackingError, PackerError) as error:
            return c.TrainFailed(f"{type(error).__name__}: {error}", state_intact=True)
        packed = time.monotonic()
        done = await self.on_trainer(self._optimizer_step, batch, step + 1)
        trained = time.monotonic()
        if done.bad_rows is not None:
            return c.TrainFailed(
                f"NaNError: step {step + 1} has a loss or gradient that is not finite; the weights are those of step {step}. "
                f"The row is in {done.bad_rows}: lower optimizer.lr under another `name`, or look at its rewards and log-probs",
                state_intact=True,
            )
        recent, self.recent = self.recent, []
        left_out, self.left_out = self.left_out, []
        loads, self.loads = self.loads, []
        before, self.counted = self.counted, self.controller
        since = trained - self.last_step_at
        values = {
            **rollout_metrics(recent),
            **done.metrics,
            **batch.metrics,
            **load_metrics(loads),
            **extra_metrics(recent, left_out),
            "groups/finished": float(len(recent)),
            "groups/zero_variance": float(self.counted.num_zero_variance - before.num_zero_variance),
            "groups/dropped_stale": float(self.counted.num_stale - before.num_stale),
            "groups/failed": float(self.counted.num_failed - before.num_failed),
            "groups/cut": float(self.counted.num_cut - before.num_cut),
            "groups/passed": float(self.counted.num_passed - before.num_passed),
            names.TRAINER_RATE: batch.num_tokens / (trained - packed),
            names.SAMPLER_RATE: sum(num_sampled(e) for g in recent for e in g.episodes) / since,
            "time/step": since,
            "time/wait": began - self.last_step_at - sum(self.seconds.values()),
            "time/pack": packed - began,
            "time/train": trained - packed,
            **{f"time/{name}": seconds for name, seconds in self.seconds.items()},
        }
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.last_step_at = trained
        self.reward = values.get(names.REWARD, self.reward)
        self.trackers.log(step + 1, values)
        self.alarms.check(step + 1, values)
        if self.config.log.rollouts:
            write_rollouts(self.folder / "rollouts", step + 1, groups, self.parts.tokenizer, self.config.log.rollouts)
        return c.TrainDone()

    def _optimizer_step(self, batch: Batch, step: int) -> Trained:
        examined = self.parity.batch(batch, step)
        self.peers.send(Record(Action.TRAIN, step, len(batch.rows), examined), batch.rows)
        done = train(self.parts.trainer, self.state, batch, step, examined, self.folder)
        self.state = done.state
        self.parity.note(done.metrics)
        if done.logprobs is not None:
            self.parity.examine(batch.rows[examined], done.logprobs, step)
        return done

    def _weights(self, version: int) -> Any:
        self.peers.send(Record(Action.PUBLISH, version))
        return variables_of(gather(self.state.trainable), self.frozen)

    async def _publish(self, version: int, in_flight: bool) -> c.Event:
        began = time.monotonic()
        weights = await self.on_trainer(self._weights, version)
        try:
            report = await self.sampler.publish(weights, version, in_flight)
        except SamplerError as error:
            return c.PublishFailed(version, str(error))
        self.seconds["publish"] += time.monotonic() - began
        return c.PublishDone(report.version)

    async def _evaluate(self, version: int, place: int) -> c.Event:
        began = time.monotonic()
        metrics = await evaluate(self.config, self.parts.environment.heldout, self.runner, version, place)
        if self.controller.evaluating != version:
            return c.EvalDone()  # abandoned: the run is being saved, and evaluates again when it goes on
        self.heldout = metrics[names.HELDOUT]
        if version == 0:
            self.heldout_before = self.heldout
        self.trackers.log(version, metrics)
        if self.controller.phase is c.Phase.EVALUATING:  # the trainer waited for it alone
            self.seconds["evaluate"] += time.monotonic() - began
        return c.EvalDone()

    async def _checkpoint(self, step: int, snapshot: dict[str, Any]) -> c.Event:
        began = time.monotonic()
        metric = self.reward
        if self.config.eval.every and self.config.eval.num_tasks:
            metric = (
                self.heldout if self.controller.evaluated == step else None
            )  # what was measured on other weights is not theirs
        host = {
            "controller": snapshot,
            "dataset": self.dataset,
            "heldout_before": self.heldout_before,
            "heldout": self.heldout,
            "seconds": time.monotonic() - self.began,
        }
        await self.on_trainer(self._save, step, host, metric)
        self.seconds["checkpoint"] += time.monotonic() - began
        return c.CheckpointDone()

    def _save(self, step: int, host: dict[str, Any], metric: float | None) -> None:
        self._finish_save()
        self.peers.send(Record(Action.CHECKPOINT, step, metric=metric))
        self.checkpoints.save(step, saved_part(self.parts, self.state), host, metric)
        self.saved_snapshot = host["controller"]

    def _finish_save(self) -> None:
        """Waits for the save under way; the journal then forgets the groups that it stands for."""
        self.checkpoints.wait()
        if self.saved_snapshot is not None:
            live, next_index = set(self.saved_snapshot["live"]), self.saved_snapshot["next_index"]
            self.journal.forget(lambda index: index < next_index and index not in live)
            self.saved_snapshot = None

    def _summary(self, reason: str) -> dict[str, Any]:
        return {
            "run": str(self.folder),
            "ended": reason,
            "steps": self.controller.step,
            "heldout_before": self.heldout_before,
            "heldout_after": self.heldout,
            "seconds": round(time.monotonic() - self.began, 1),
        }


def _controller_config(config: Config) -> c.ControllerConfig:
    e = config.eval
    return replace(
        controller_config(config),
        checkpoint_every=config.checkpoint.every,
        eval_every=e.every if e.num_tasks else 0,
        eval_at_start=e.at_start and e.num_tasks > 0,
        eval_at_end=e.num_tasks > 0,
        checkpoint_at_start=config.sft is not None,
        # A publish may wait for the generations of running episodes to end.
        publish_timeout=PUBLISH_SECONDS + config.env.timeout_seconds,
    )
