"""Optional arrays land at the right token, read and term; without them rows are what they were."""

from dataclasses import fields, replace

import jax
import numpy as np
import pytest
from forests import check_contract, decode, forests, make_trajectory, naive_unique_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.packing import PackingError, RowLimits, pack
from jaxrl.packing.optional import FIELDS, OF_TABLE, widths_of
from jaxrl.packing.rows import empty_batch

LIMITS = RowLimits(row_length=200, reads=200, terms=400, segments=64, trajectories=32)
TIGHT = RowLimits(row_length=30, reads=30, terms=60, segments=16, trajectories=6)


def prefix_number(ids) -> int:
    """A number of the path, so that a value that follows paths shows where it came from."""
    return hash(tuple(int(i) for i in ids)) % 30_011


def given_to(training, names, variant=0):
    """The trajectory with fields whose values name it and the position, or the path where trajectories share them. The routed
    experts of a `variant` differ from position 3 on."""
    ids = training.trajectory.ids
    at = np.arange(len(ids))
    term = training.trajectory_index * 100.0 + at
    path = np.array([prefix_number(ids[: p + 1]) for p in at], np.int64)
    tail = np.where(at >= 3, variant, 0)
    values = {
        "reference_logp": -path.astype(np.float32),
        "proximal_logp": -path.astype(np.float32) - 0.5,
        "teacher_ids": (path[:, None] + [0, 1, 2]).astype(np.int32),
        "teacher_logp": -(path[:, None] + [0.0, 0.25, 0.5]).astype(np.float32),
        "returns": (term + 0.125).astype(np.float32),
        "old_value": (term + 0.25).astype(np.float32),
        "value_weight": (term + 0.375).astype(np.float32),
        "kl_weight": (term + 0.625).astype(np.float32),
        "routed_experts": ((at + tail)[:, None, None] + np.arange(4).reshape(2, 2)).astype(np.int16),
        "axis_positions": (at[:, None] * [1, 2, 3]).astype(np.int32),
    }
    return replace(training, **{name: values[name] for name in names})


def experts_as_keys(trajectories):
    return [t.routed_experts[:, 0, 0] - np.arange(len(t.trajectory.ids)) for t in trajectories]


@settings(max_examples=60, deadline=None)
@given(forests(), st.sets(st.sampled_from([n for n in FIELDS if not n.startswith("teacher")])), st.booleans(), st.data())
def test_every_value_is_where_it_belongs(trajectories, names, teacher, data):
    names |= {"teacher_ids", "teacher_logp"} if teacher else set()
    variants = [data.draw(st.integers(0, 1)) for _ in trajectories]
    trajectories = [given_to(t, names, v) for t, v in zip(trajectories, variants, strict=True)]
    keys = experts_as_keys(trajectories) if "routed_experts" in names else None
    for limits in (LIMITS, TIGHT):
        batches, stats = pack(trajectories, limits, 2)
        check_contract(batches, trajectories, limits, keys)
        assert stats.unique_tokens == naive_unique_tokens(trajectories, keys)
        by_index = {t.trajectory_index: t for t in trajectories}
        for batch in batches:
            for r in range(2):
                check_values(batch, r, by_index, names)


def check_values(batch, r, by_index, names):
    for name in FIELDS.keys() - names:
        array = getattr({"tokens": batch, "reads": batch.reads, "terms": batch.terms}[FIELDS[name].table], name)
        assert array.size == 0 and array.shape[0] == 2
    reads, terms = batch.reads, batch.terms
    for m in np.flatnonzero(terms.read[r] >= 0):
        training = by_index[int(batch.trajectories.index[r, terms.trajectory[r, m]])]
        read = terms.read[r, m]
        state = int(reads.state[r, read])
        position = int(batch.positions[r, state]) + 1
        for name in names & set(OF_TABLE["terms"]):
            assert getattr(terms, name)[r, m] == getattr(training, name)[position]
        for name in names & set(OF_TABLE["reads"]):
            np.testing.assert_array_equal(getattr(reads, name)[r, read], getattr(training, name)[position])
        # Along the whole path, tokens carry what this trajectory says of them.
        offset = state
        for p in range(position - 1, -1, -1):
            for name in names & set(OF_TABLE["tokens"]):
                np.testing.assert_array_equal(getattr(batch, name)[r, offset], getattr(training, name)[p])
            offset = int(batch.predecessor[r, offset])
        assert len(decode(batch.tokens[r], batch.predecessor[r], state)) == position
    for name in names:
        table = {"tokens": batch, "reads": batch.reads, "terms": batch.terms}[FIELDS[name].table]
        used = {
            "tokens": int(batch.segments.length[r].sum()),
            "reads": int((reads.state[r] >= 0).sum()),
            "terms": int((terms.read[r] >= 0).sum()),
        }
        assert (getattr(table, name)[r, used[FIELDS[name].table] :] == FIELDS[name].fill).all()


@settings(max_examples=40, deadline=None)
@given(forests())
def test_what_follows_reads_and_terms_changes_nothing_else(trajectories):
    names = {*OF_TABLE["reads"], *OF_TABLE["terms"]}
    plain, _ = pack(trajectories, TIGHT, 1)
    more, _ = pack([given_to(t, names) for t in trajectories], TIGHT, 1)
    for a, b in zip(plain, more, strict=True):
        tables = {name: replace(getattr(b, name), **without(getattr(a, name))) for name in ("reads", "terms")}
        same = jax.tree.map(np.array_equal, a, replace(b, **tables))
        assert all(jax.tree.leaves(same))


def without(table) -> dict:
    return {f.name: getattr(table, f.name) for f in fields(table) if f.name in FIELDS}


def test_empty_rows_have_the_shapes_of_the_runs():
    trajectories = [given_to(make_trajectory(0, [1, 2, 3], [False, True, True]), FIELDS.keys())]
    (batch,), _ = pack(trajectories, LIMITS, 2)
    empty = empty_batch(LIMITS, 2, widths_of(trajectories))
    assert jax.tree.map(np.shape, batch) == jax.tree.map(np.shape, empty)
    assert batch.routed_experts.shape == (2, 200, 2, 2) and batch.reads.teacher_ids.shape == (2, 200, 3)
    plain = empty_batch(LIMITS, 2)
    assert plain.routed_experts.shape == (2, 200, 0, 0) and plain.reads.reference_logp.shape == (2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"returns": None}, "trajectory 1 .*has no `returns`, others have"),
        ({"returns": np.zeros(2, np.float32)}, "trajectory 1 .*`returns` has 2 entries for 3"),
        ({"returns": np.zeros((3, 1), np.float32)}, "trajectory 1 .*`returns` has 2 axes, it must have 1"),
        ({"teacher_ids": np.zeros((3, 4), np.int32)}, r"trajectory 1 .*`teacher_ids` has shape \(3, 4\)"),
        ({"content_key": np.zeros(2, np.int64)}, "trajectory 1 .*`content_key` has 2 entries for 3"),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(change, message):
    first, second = (given_to(make_trajectory(k, [1, 2, 3], [False, True, True]), FIELDS.keys()) for k in range(2))
    with pytest.raises(PackingError, match=message):
        pack([first, replace(second, **change)], LIMITS, 1)
    with pytest.raises(PackingError, match="`teacher_ids` and `teacher_logp` go together"):
        pack([replace(first, teacher_logp=None)], LIMITS, 1)
