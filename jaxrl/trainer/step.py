"""The optimizer step: gradients summed over microbatches, then one update. State in, state out.

    train_step:  for every batch of rows:  terms, without gradient                (only if the loss sums across rows)
                 coefficients of all terms
                 totals = zeros
                 for every batch of rows:  totals += loss and gradient sums      (jitted, accumulator donated)
                 state = optimizer(state, totals), unless a number is not finite (jitted, state donated)

Losses are sums whose denominators the packer folded into the terms' weights, so adding microbatches
up is all there is to accumulation. Nothing here waits for the device: metrics are jax arrays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.attention import compiler_options
from jaxrl.config import AlgorithmConfig, Config, ConfigError
from jaxrl.data import PackedRows
from jaxrl.losses import LOSSES, Loss, needs_reference, step_coefficients
from jaxrl.losses.aligned import Aligned, ReadLogprobs
from jaxrl.losses.steps import StepTerms
from jaxrl.losses.sums import LossSums, add_sums, means, reduce_sums
from jaxrl.mesh import row_sharding
from jaxrl.models.architecture import Architecture
from jaxrl.models.decoder import Decoder, abstract_variables, shardings
from jaxrl.trainer.coefficients import Coefficients, Measured, make_coefficients, measured
from jaxrl.trainer.forward import Variables, read_rows, row_logprobs, row_losses, row_terms
from jaxrl.trainer.optimizer import lag_factor, like_params, make_optimizer, make_schedule
from jaxrl.trainer.placement import PlacedRows, check_mesh, put_rows
from jaxrl.trainer.state import TrainState, variables_of

Metrics = dict[str, jax.Array]  # scalars


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Totals:
    """What the microbatches of a step add up to. Floats are float32, or float64 with such parameters."""

    gradients: Any
    loss: jax.Array
    sums: LossSums
    num_batches: jax.Array  # int32
    nonfinite_batch: jax.Array  # int32: the first batch with a loss or gradient that is not finite, or -1
    nonfinite_row: jax.Array  # int32: the first such row of it, by its loss; -1 if only gradients are


@dataclass(frozen=True)
class Update:
    """The jitted parts of an optimizer step under one loss and one schedule."""

    zero: Callable[[], Totals]
    measure: Callable[[TrainState, PlacedRows], Measured] | None  # None: the loss sums across no rows
    coefficients: Callable[[Sequence[Measured], Sequence[PackedRows]], list[Coefficients]] | None
    accumulate: Callable[[TrainState, Totals, PlacedRows, Coefficients], Totals]
    apply: Callable[[TrainState, Totals], tuple[TrainState, Metrics]]


@dataclass(frozen=True)
class Trainer:
    """Made by `make_trainer`. Holds compiled functions and shardings, no state."""

    config: Config
    mesh: Mesh
    decoder: Decoder
    init: Callable[[Variables], TrainState]
    _forward: Callable[[Variables, PlacedRows], jax.Array]
    _reinforce: Update
    _supervise: Update | None  # None without an `sft` table

    def train_step(self, state: TrainState, batches: Sequence[PackedRows]) -> tuple[TrainState, Metrics]:
        """One optimizer update by the config's loss over all `batches` (numpy, each [packing.rows, T]).

        `state` is donated: use the returned one. If a loss or a gradient is not finite the returned
        state equals the one given, `nonfinite` is 1, and `nonfinite_batch` and `nonfinite_row` say where.
        """
        return self._step(self._reinforce, state, batches)

    def sft_step(self, state: TrainState, batches: Sequence[PackedRows]) -> tuple[TrainState, Metrics]:
        """The same step with the sft loss and the learning rate of the config's `sft` table. Begin the
        reinforcement afterwards from `init(variables(state))`: its optimizer state and step start anew."""
        if self._supervise is None:
            raise ConfigError("sft", "an sft step needs this table: set sft.data")
        return self._step(self._supervise, state, batches)

    def _step(self, update: Update, state: TrainState, batches: Sequence[PackedRows]) -> tuple[TrainState, Metrics]:
        if not batches:
            raise ValueError("an optimizer step needs at least one batch of rows")
        coefficients: list[Coefficients] = [{}] * len(batches)
        if update.measure is not None:
            coefficients = update.coefficients([update.measure(state, self._put(rows)) for rows in batches], batches)
        totals = update.zero()
        for rows, own in zip(batches, coefficients, strict=True):
            totals = update.accumulate(state, totals, self._put(rows), own)
        return update.apply(state, totals)

    def logprobs(self, state: TrainState, rows: PackedRows) -> jax.Array:
        """Log-prob of every read, [R, U] in nats at the read's temperature, on every process. No gradient."""
        return self._forward(self.variables(state), self._put(rows))

    def variables(self, state: TrainState) -> Variables:
        """{"params": base} or {"params": base, "lora": adapters}. The arrays are the state's own: the next
        step donates them, so whoever keeps them copies them first."""
        return variables_of(state.trainable, state.frozen)

    def _put(self, rows: PackedRows) -> PlacedRows:
        expected = (self.config.packing.rows, self.config.packing.row_length)
        if rows.tokens.shape != expected:
            raise ValueError(f"rows of shape {rows.tokens.shape}: packing.rows and packing.row_length make it {expected}")
        return put_rows(rows, self.mesh)


def make_trainer(config: Config, architecture: Architecture, mesh: Mesh) -> Trainer:
    """Compiles nothing yet. Raises ConfigError, naming the key, if the model or the rows cannot be
    split over the mesh."""
    check_mesh(config, architecture, mesh)
    model = config.model
    decoder = Decoder(architecture, jnp.dtype(model.dtype), jnp.dtype(model.param_dtype), model.remat, model.lora, mesh=mesh)
    placed = shardings(decoder, mesh)
    trainable = "params" if model.lora is None else "lora"

    schedule = make_schedule(
        config.optimizer.lr, config.optimizer.schedule, config.optimizer.warmup_steps, config.pipeline.steps
    )
    reinforce = _make_update(LOSSES[config.algorithm.loss], schedule, config, decoder, placed[trainable])
    supervise = None
    if config.sft is not None:
        schedule = make_schedule(config.sft.lr, "cosine", config.sft.warmup_steps, config.sft.steps)
        supervise = _make_update(LOSSES["sft"], schedule, config, decoder, placed[trainable])

    def forward(variables, rows):
        return row_logprobs(variables, rows, decoder, config.attention, mesh)[0]

    return Trainer(
        config=config,
        mesh=mesh,
        decoder=decoder,
        init=_make_init(config, decoder, placed, trainable),
        _forward=jax.jit(forward, out_shardings=_replicated(mesh), compiler_options=_compiler_options(config, decoder)),
        _reinforce=reinforce,
        _supervise=supervise,
    )


def _make_update(loss: Loss, schedule: optax.Schedule, config: Config, decoder: Decoder, placed: Any) -> Update:
    """The parts of a step. `placed` are the shardings of the trainable parameters, and of their gradients."""
    mesh, algorithm = decoder.mesh, config.algorithm
    optimizer = make_optimizer(config.optimizer, schedule, placed)
    dtype = jnp.promote_types(config.model.param_dtype, jnp.float32)
    shapes = abstract_variables(decoder)["params" if config.model.lora is None else "lora"]
    placed_totals = Totals(placed, *[_replicated(mesh)] * 5)

    solve = step_coefficients(loss, algorithm)
    penalised = loss.is_sampled and algorithm.kl_weight > 0  # the value itself reads the reference

    def read(trainable: Any, state: TrainState, rows: PlacedRows, reference: bool) -> ReadLogprobs:
        variables = variables_of(trainable, state.frozen)
        reads = read_rows(variables, rows, decoder, config.attention, mesh, candidates=loss.needs_candidates)
        if not reference or rows.reads.reference_logp.shape[1]:
            return reads
        base = {"params": state.reference or state.frozen}
        of_reference, _ = row_logprobs(base, rows, decoder.clone(lora=None), config.attention, mesh)
        return reads._replace(reference=jax.lax.stop_gradient(of_reference))

    def measure(state: TrainState, rows: PlacedRows) -> Measured:
        reads = read(state.trainable, state, rows, needs_reference(loss, algorithm))
        return measured(row_terms(reads, rows, state.step), rows)

    def zero() -> Totals:
        return Totals(
            gradients=jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), shapes),
            loss=jnp.zeros((), dtype),
            sums=jax.tree.map(lambda _: jnp.zeros((), dtype), _sums_of(loss, algorithm, penalised)),
            num_batches=jnp.int32(0),
            nonfinite_batch=jnp.int32(-1),
            nonfinite_row=jnp.int32(-1),
        )

    def accumulate(state: TrainState, totals: Totals, rows: PlacedRows, coefficients: Coefficients) -> Totals:
        def batch_loss(trainable):
            terms = row_terms(read(trainable, state, rows, penalised), rows, state.step, coefficients)
            losses_R, sums_R = row_losses(terms if penalised else terms._replace(reference_logp=None), loss, algorithm)
            return losses_R.sum(), (losses_R, sums_R)

        (batch_sum, (losses_R, sums_R)), gradients = jax.value_and_grad(batch_loss, has_aux=True)(state.trainable)
        bad_R = ~jnp.isfinite(losses_R)
        is_bad = bad_R.any() | ~jnp.isfinite(optax.tree.norm(gradients))
        is_first = is_bad & (totals.nonfinite_batch < 0)
        return Totals(
            gradients=jax.tree.map(lambda total, x: total + x.astype(dtype), totals.gradients, gradients),
            loss=totals.loss + batch_sum.astype(dtype),
            sums=add_sums(totals.sums, jax.tree.map(lambda x: x.astype(dtype), reduce_sums(sums_R))),
            num_batches=totals.num_batches + 1,
            nonfinite_batch=jnp.where(is_first, totals.num_batches, totals.nonfinite_batch),
            nonfinite_row=jnp.where(is_first & bad_R.any(), jnp.argmax(bad_R).astype(jnp.int32), totals.nonfinite_row),
        )

    def apply(state: TrainState, totals: Totals) -> tuple[TrainState, Metrics]:
        norm = optax.tree.norm(totals.gradients)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(totals.loss)
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), totals.gradients, state.trainable)
        of_terms = means(totals.sums)
        lag = of_terms["lag"]
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.trainable, lag=lag)
        updated = TrainState(state.step + 1, optax.apply_updates(state.trainable, updates), state.frozen, opt_state)
        metrics = of_terms | {
            "loss": totals.loss,
            "gradient_norm": norm,
            "learning_rate": schedule(state.step) * lag_factor(config.optimizer.lag_scaling, lag),
            "nonfinite": 1 - is_finite,
            "nonfinite_batch": totals.nonfinite_batch,
            "nonfinite_row": totals.nonfinite_row,
        }
        return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), updated, state), metrics

    jitted = jax.jit(
        apply, donate_argnums=0, out_shardings=(_state_shardings(optimizer, shapes, placed, mesh), _replicated(mesh))
    )

    def apply_without_frozen(state: TrainState, totals: Totals) -> tuple[TrainState, Metrics]:
        """Base and reference take no part: they are not donated either."""
        updated, metrics = jitted(replace(state, frozen={}, reference={}), totals)
        return replace(updated, frozen=state.frozen, reference=state.reference), metrics

    options = _compiler_options(config, decoder)
    return Update(
        zero=jax.jit(zero, out_shardings=placed_totals),
        measure=jax.jit(measure, out_shardings=row_sharding(mesh, tokens=False), compiler_options=options) if solve else None,
        coefficients=make_coefficients(solve, mesh) if solve else None,
        accumulate=jax.jit(accumulate, donate_argnums=1, out_shardings=placed_totals, compiler_options=options),
        apply=apply_without_frozen,
    )


def _compiler_options(config: Config, decoder: Decoder) -> dict[str, str] | None:
    return compiler_options(config.attention, decoder.mesh, decoder.architecture.head_dim, config.model.dtype)


def _make_init(config: Config, decoder: Decoder, placed: Variables, trainable: str) -> Callable[[Variables], TrainState]:
    optimizer = make_optimizer(
        config.optimizer, optax.constant_schedule(0.0), decoder.mesh
    )  # its state is that of any schedule
    shapes = abstract_variables(decoder)[trainable]
    out = _state_shardings(optimizer, shapes, placed[trainable], decoder.mesh)

    def start(parameters) -> TrainState:
        copied = jax.tree.map(jnp.copy, parameters)
        return TrainState(jnp.int32(0), copied, {}, optimizer.init(copied))

    jitted = jax.jit(start, out_shardings=out)
    copy = jax.jit(lambda parameters: jax.tree.map(jnp.copy, parameters), out_shardings=placed[trainable])
    with_reference = needs_reference(LOSSES[config.algorithm.loss], config.algorithm)

    def init(variables: Variables) -> TrainState:
        """Step 0 from the decoder's variables. Trained parameters are copied, for every step donates them."""
        if set(variables) != set(placed):
            raise ValueError(f"variables {sorted(variables)} given, this model has {sorted(placed)}")
        state = jitted(jax.device_put(variables[trainable], placed[trainable]))
        frozen = jax.device_put(variables["params"], placed["params"]) if trainable == "lora" else {}
        reference = copy(state.trainable) if with_reference and trainable == "params" else {}
        return replace(state, frozen=frozen, reference=reference)

    return init


def _sums_of(loss: Loss, algorithm: AlgorithmConfig, has_reference: bool) -> LossSums:
    """Shapes of the metric sums that the loss returns."""

    def sums() -> LossSums:
        slot, matrix = jnp.zeros(1), jnp.zeros((1, 1))
        terms = Aligned(slot > 0, *[slot] * 7, reference_logp=slot, proximal_logp=None, kl_weight=None)
        terms = terms._replace(candidate_logp=matrix, teacher_logp=matrix, is_candidate=matrix > 0)
        if solve := step_coefficients(loss, algorithm):
            terms = terms._replace(coefficients=solve(StepTerms(terms, slot.astype(int), slot.astype(int), 1)))
        return loss.value(terms if has_reference else terms._replace(reference_logp=None), algorithm)[1]

    return jax.eval_shape(sums)


def _state_shardings(optimizer: optax.GradientTransformation, shapes: Any, placed: Any, mesh: Mesh) -> TrainState:
    """Moments lie where their parameters do; counters everywhere."""
    opt_state = like_params(jax.eval_shape(optimizer.init, shapes), placed, _replicated(mesh))
    return TrainState(_replicated(mesh), placed, {}, opt_state)


def _replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
