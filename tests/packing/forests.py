"""Random forests of trajectories, and the row contract checked the slow way: token by token."""

from collections import Counter

import numpy as np
from hypothesis import strategies as st

from jaxrl.data import PackedRows, TrainingTrajectory, Trajectory


def make_trajectory(index, ids, trainable, *, temperature=1.0, group=0, episode=0, reward=0.0) -> TrainingTrajectory:
    """Per-token values that name trajectory and position, so that a misplaced one shows."""
    length = len(ids)
    at = np.arange(length)
    value = (index * 1000 + at).astype(np.float32)
    trajectory = Trajectory(
        ids=np.asarray(ids, np.int32),
        trainable=np.asarray(trainable, bool),
        policy_logp=-value,
        behaviour_logp=-value - 0.25,
        version=(index + at).astype(np.int32),
        source=np.asarray(trainable, np.uint8),
        turn=(at // 3).astype(np.int32),
        temperature=temperature,
    )
    return TrainingTrajectory(trajectory, value + 0.5, value + 0.75, index, episode, group, reward)


@st.composite
def forests(draw, min_size=1, max_size=14):
    """Trajectories grown by continuing, repeating and cutting earlier ones: deep trees of one-token
    segments, duplicates, strict prefixes. Every one has a trainable token."""
    vocabulary = draw(st.integers(1, 3))
    token = st.integers(0, vocabulary - 1)
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(min_size, max_size))):
        base: list[int] = []
        if sequences and draw(st.integers(0, 5)):
            base = sequences[draw(st.integers(0, len(sequences) - 1))]
            base = base[: draw(st.integers(0, len(base)))]
        tail = draw(st.lists(token, min_size=0, max_size=draw(st.sampled_from([1, 1, 2, 9]))))
        ids = (base + tail)[:24]
        sequences.append(ids if len(ids) >= 2 else [0, 0])
    out = []
    for index, ids in enumerate(sequences):
        how = draw(st.sampled_from(["all", "tail", "any"]))
        mask = np.zeros(len(ids), bool)
        if how == "all":
            mask[1:] = True
        elif how == "tail":
            mask[draw(st.integers(1, len(ids) - 1)) :] = True
        else:
            mask[1:] = draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))
            mask[draw(st.integers(1, len(ids) - 1))] = True
        temperature = draw(st.sampled_from([1.0, 1.0, 0.7]))
        out.append(
            make_trajectory(index, ids, mask, temperature=temperature, group=index // 4, episode=index // 2, reward=index / 3)
        )
    return out


def content(keys, index, position) -> int:
    return 0 if keys is None or keys[index] is None else int(keys[index][position])


def naive_unique_tokens(trajectories, keys=None) -> int:
    """Tokens of the trie: distinct non-empty prefixes of (id, content key)."""
    prefixes = set()
    for index, training in enumerate(trajectories):
        path = ()
        for position, token in enumerate(training.trajectory.ids.tolist()):
            path += ((token, content(keys, index, position)),)
            prefixes.add(path)
    return len(prefixes)


def check_contract(batches: list[PackedRows], trajectories: list[TrainingTrajectory], limits, keys=None) -> None:
    """Every field of every row against its definition, and every (trajectory, position) once."""
    by_index = {t.trajectory_index: t for t in trajectories}
    list_index = {t.trajectory_index: k for k, t in enumerate(trajectories)}
    seen: Counter = Counter()
    for batch in batches:
        for r in range(batch.tokens.shape[0]):
            for training, position in check_row(batch, r, by_index, list_index, limits, keys):
                seen[training, position] += 1
    expected = {(t.trajectory_index, int(p)): 1 for t in trajectories for p in np.flatnonzero(t.trajectory.trainable)}
    assert seen == expected


def check_row(batch, r, by_index, list_index, limits, keys):
    """Yields the (trajectory, position) of each loss term of a row."""
    T = limits.row_length
    tokens, positions = batch.tokens[r], batch.positions[r]
    subtree_end, predecessor = batch.subtree_end[r], batch.predecessor[r]
    seg, reads, terms, table = batch.segments, batch.reads, batch.terms, batch.trajectories
    assert tokens.shape == positions.shape == subtree_end.shape == predecessor.shape == (T,)
    assert seg.start[r].shape == (limits.segments,) and reads.state[r].shape == (limits.reads,)
    assert terms.read[r].shape == (limits.terms,) and table.index[r].shape == (limits.trajectories,)
    for array in (tokens, positions, subtree_end, predecessor, seg.start, reads.state, terms.read, terms.version, table.length):
        assert array.dtype == np.int32
    for array in (reads.temperature, terms.weight, terms.policy_logp, table.reward):
        assert array.dtype == np.float32

    # Segments tile the used part of the row in pre-order; then padding.
    used_segments = [s for s in range(limits.segments) if seg.length[r, s] > 0]
    num_segments = len(used_segments)
    assert used_segments == list(range(num_segments))
    assert all(seg.parent[r, num_segments:] == -1) and all(seg.length[r, num_segments:] == 0)
    num_tokens = 0
    children: dict[int, list[int]] = {}
    segment_of = {}
    for s in used_segments:
        assert seg.start[r, s] == num_tokens
        parent = int(seg.parent[r, s])
        assert parent < s
        assert seg.depth[r, s] == (0 if parent < 0 else seg.depth[r, parent] + 1)
        children.setdefault(parent, []).append(s)
        for t in range(num_tokens, num_tokens + seg.length[r, s]):
            segment_of[t] = s
        num_tokens += int(seg.length[r, s])
    assert num_tokens <= T
    for t in range(num_tokens, T):
        assert tokens[t] == 0 and positions[t] == 0 and subtree_end[t] == t + 1 and predecessor[t] == -1

    def descendants(s):
        return [s] + [d for child in children.get(s, []) for d in descendants(child)]

    for s in used_segments:
        inside = descendants(s)
        assert inside == list(range(s, s + len(inside))), "a subtree is not contiguous"
        end = max(seg.start[r, d] + seg.length[r, d] for d in inside)
        first = int(seg.start[r, s])
        assert all(subtree_end[first : first + seg.length[r, s]] == end)
        parent = int(seg.parent[r, s])
        before = -1 if parent < 0 else seg.start[r, parent] + seg.length[r, parent] - 1
        assert predecessor[first] == before
        assert positions[first] == (0 if before < 0 else positions[before] + 1)
        for t in range(first + 1, first + int(seg.length[r, s])):
            assert predecessor[t] == t - 1 and positions[t] == positions[t - 1] + 1

    # Trajectories of the row, each found in it by its read states, or by search for its whole path.
    num_members = int(np.sum(table.index[r] >= 0))
    assert all(table.index[r, num_members:] == -1)
    for n in range(num_members):
        training = by_index[int(table.index[r, n])]
        assert table.episode[r, n] == training.episode_index and table.group[r, n] == training.group_index
        assert table.reward[r, n] == np.float32(training.reward)
        assert table.length[r, n] == len(training.trajectory.ids)

    # Reads: unique, of states that exist.
    used_reads = [u for u in range(limits.reads) if reads.state[r, u] >= 0]
    assert used_reads == list(range(len(used_reads)))
    assert all(reads.target[r, len(used_reads) :] == -1)
    triples = {(int(reads.state[r, u]), int(reads.target[r, u]), float(reads.temperature[r, u])) for u in used_reads}
    assert len(triples) == len(used_reads)

    used_terms = [m for m in range(limits.terms) if terms.read[r, m] >= 0]
    assert used_terms == list(range(len(used_terms)))
    used_by_terms, ends = set(), {}
    for m in used_terms:
        read, n = int(terms.read[r, m]), int(terms.trajectory[r, m])
        used_by_terms.add(read)
        state = int(reads.state[r, read])
        assert 0 <= n < num_members and 0 <= state < num_tokens
        training = by_index[int(table.index[r, n])]
        trajectory = training.trajectory
        position = int(positions[state]) + 1
        path = decode(tokens, predecessor, state)
        assert path == trajectory.ids[:position].tolist()
        visible = [k for k in range(num_tokens) if k <= state < subtree_end[k]]
        assert [int(tokens[k]) for k in visible] == path, "what attention sees is not the path"
        assert reads.target[r, read] == trajectory.ids[position]
        assert reads.temperature[r, read] == np.float32(trajectory.temperature)
        assert trajectory.trainable[position]
        for name in ("turn", "policy_logp", "behaviour_logp", "version"):
            assert getattr(terms, name)[r, m] == getattr(trajectory, name)[position]
        assert terms.advantage[r, m] == training.advantage[position] and terms.weight[r, m] == training.weight[position]
        ends.setdefault(n, set()).add(state)
        yield training.trajectory_index, position
    assert used_by_terms == set(used_reads), "a read nothing asks for"
    assert set(ends) == set(range(num_members)), "a trajectory without terms"

    # No token sits in the row twice, unless min_shared or content keeps it apart; none is there for nothing.
    prefixes = Counter()
    offsets_of = {}
    for t in range(num_tokens):
        path = tuple(decode(tokens, predecessor, t))
        prefixes[path] += 1
        offsets_of.setdefault(path, []).append(t)
    members = [by_index[int(i)] for i in table.index[r, :num_members]]
    needed = {tuple(t.trajectory.ids[:p].tolist()) for t in members for p in range(1, len(t.trajectory.ids) + 1)}
    assert set(prefixes) == needed
    if limits.min_shared == 1:
        for path, copies in prefixes.items():
            kinds = set()
            for t in members:
                if tuple(t.trajectory.ids[: len(path)].tolist()) == path:
                    index = list_index[t.trajectory_index]
                    kinds.add(tuple(content(keys, index, p) for p in range(len(path))))
            assert copies == len(kinds)
        if keys is None:
            check_maximal_segments(segment_of, offsets_of, members)


def check_maximal_segments(segment_of, offsets_of, members):
    """A segment is a maximal run of tokens on the same set of trajectories."""
    on: dict[int, set[int]] = {}
    for n, training in enumerate(members):
        ids = training.trajectory.ids.tolist()
        for p in range(1, len(ids) + 1):
            (t,) = offsets_of[tuple(ids[:p])]
            on.setdefault(t, set()).add(n)
    for training in members:
        ids = training.trajectory.ids.tolist()
        walk = [offsets_of[tuple(ids[:p])][0] for p in range(1, len(ids) + 1)]
        for a, b in zip(walk, walk[1:], strict=False):
            assert (segment_of[a] == segment_of[b]) == (on[a] == on[b])


def decode(tokens, predecessor, t) -> list[int]:
    """Token ids from the root to offset t, by following `predecessor`."""
    path = []
    while t >= 0:
        path.append(int(tokens[t]))
        t = int(predecessor[t])
    return path[::-1]
