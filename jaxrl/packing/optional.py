"""The optional fields of a TrainingTrajectory and the arrays of a row that they become.

A field that is None in every trajectory of a step becomes an array of width 0; one that is given must be given by all of
them, so that the rows of a run keep one shape. Fields that follow tokens are part of the tree's key: tokens are shared
only where these agree too.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxrl.data import TrainingTrajectory
from jaxrl.packing.limits import PackingError, RowLimits, name_of


class Field(NamedTuple):
    table: Literal["tokens", "reads", "terms"]  # which slots of a row the array has one entry for
    dtype: type
    rank: int = 0  # axes behind the slot's
    fill: int = 0  # in unused slots


FIELDS = {
    "routed_experts": Field("tokens", np.int16, rank=2),
    "axis_positions": Field("tokens", np.int32, rank=1),
    "reference_logp": Field("reads", np.float32),
    "proximal_logp": Field("reads", np.float32),
    "teacher_ids": Field("reads", np.int32, rank=1, fill=-1),
    "teacher_logp": Field("reads", np.float32, rank=1),
    "returns": Field("terms", np.float32),
    "old_value": Field("terms", np.float32),
    "value_weight": Field("terms", np.float32),
    "kl_weight": Field("terms", np.float32),
}
OF_TABLE = {table: tuple(n for n, f in FIELDS.items() if f.table == table) for table in ("tokens", "reads", "terms")}

Widths = Mapping[str, tuple[int, ...]]  # of the fields that are given: the sizes of the axes behind the slot's
NO_OPTIONALS: Widths = {}


def widths_of(trajectories: Sequence[TrainingTrajectory]) -> Widths:
    """The given fields. Raises PackingError naming a trajectory whose field is missing or has another shape than the first's."""
    widths: dict[str, tuple[int, ...]] = {}
    if all(map(_is_plain, trajectories)):
        return widths
    for name, field in FIELDS.items():
        given = [getattr(training, name) for training in trajectories]
        if all(values is None for values in given):
            continue
        for training, values in zip(trajectories, given, strict=True):
            if values is None:
                raise PackingError(f"{name_of(training)} has no `{name}`, others have: give it to all of a step or to none")
            shape = np.shape(values)
            if len(shape) != 1 + field.rank:
                raise PackingError(f"{name_of(training)}: `{name}` has {len(shape)} axes, it must have {1 + field.rank}")
            if shape[1:] != widths.setdefault(name, shape[1:]):
                raise PackingError(f"{name_of(training)}: `{name}` has shape {shape}, the step's first {widths[name]} a token")
            if len(values) != len(training.trajectory.ids):
                raise wrong_length(training, name, values)
    if widths.get("teacher_ids") != widths.get("teacher_logp"):
        raise PackingError("`teacher_ids` and `teacher_logp` go together: give both, with as many candidates a token")
    return widths


def _is_plain(t: TrainingTrajectory) -> bool:
    """Whether it gives none of FIELDS. Spelled out, because a step has thousands of trajectories and mostly no such field."""
    no_read = t.reference_logp is None and t.proximal_logp is None and t.teacher_ids is None and t.teacher_logp is None
    no_term = t.returns is None and t.old_value is None and t.value_weight is None and t.kl_weight is None
    return no_read and no_term and t.routed_experts is None and t.axis_positions is None


def wrong_length(training: TrainingTrajectory, name: str, values: np.ndarray) -> PackingError:
    return PackingError(f"{name_of(training)}: `{name}` has {len(values)} entries for {len(training.trajectory.ids)} tokens")


def tree_keys(trajectories: Sequence[TrainingTrajectory], widths: Widths) -> list[tuple[np.ndarray, ...]] | None:
    """Per trajectory what its tokens must agree in beside their ids, arrays [L, ...]; None if ids are all."""
    names = [name for name in OF_TABLE["tokens"] if name in widths]
    has_content = any(training.content_key is not None for training in trajectories)
    if not names and not has_content:
        return None
    return [
        (
            *([_content(training)] if has_content else []),
            *(np.asarray(getattr(training, name), FIELDS[name].dtype) for name in names),
        )
        for training in trajectories
    ]


def _content(training: TrainingTrajectory) -> np.ndarray:
    key = training.content_key
    return np.zeros(len(training.trajectory.ids), np.int64) if key is None else np.asarray(key, np.int64)


def padded_columns(
    table: Literal["tokens", "reads", "terms"], columns: Mapping[str, np.ndarray], widths: Widths, limits: RowLimits
) -> dict[str, np.ndarray]:
    """The table's optional arrays of a row: `columns` of the given fields, padded to the table's capacity; width 0 of the rest."""
    capacity = {"tokens": limits.row_length, "reads": limits.reads, "terms": limits.terms}[table]
    out = {}
    for name in OF_TABLE[table]:
        field = FIELDS[name]
        if name not in widths:
            shape = (capacity, *(0,) * field.rank) if field.rank else (0,)
            out[name] = np.zeros(shape, field.dtype)
            continue
        out[name] = np.full((capacity, *widths[name]), field.fill, field.dtype)
        if name in columns:
            out[name][: len(columns[name])] = columns[name]
    return out
