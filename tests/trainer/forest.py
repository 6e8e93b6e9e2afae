"""A small forest of trajectories, a tiny model, and every loss computed one trajectory at a time."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import Config, parse
from jaxrl.data import TrainingTrajectory, Trajectory
from jaxrl.models.architecture import Architecture
from jaxrl.models.decoder import Decoder, head_matrix
from jaxrl.packing.weights import fold_weights

sys.path.append(str(Path(__file__).parent.parent / "losses"))
from equations import CASES, gspo, ppo  # noqa: E402, F401  (the tests of this folder take them from here)

VOCAB = 64
CANDIDATES = 3


def make_architecture(heads=4, kv_heads=2) -> Architecture:
    return Architecture.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "initializer_range": 0.25,  # large enough that every path through the model shapes the gradients
        }
    )


def make_config(**tables) -> Config:
    base = {
        "model": {"checkpoint": "tiny"},
        "env": "arithmetic",
        "sampling": {"max_tokens": 8},
        "packing": {"row_length": 40, "rows": 2, "segments": 32, "trajectories": 16},
        "optimizer": {"lr": 1e-3},
    }
    for name, table in tables.items():
        base[name] = base.get(name, {}) | table
    return parse(base)


def make_forest(seed=0) -> list[TrainingTrajectory]:
    """Two groups: forked multi-turn episodes, a duplicate, a strict prefix, three temperatures, old
    versions; ratios on both sides of the clip range. 13 trajectories of 12 to 29 tokens."""
    rng = np.random.default_rng(seed)

    def tokens(n):
        return list(rng.integers(1, VOCAB, n))

    sequences = []  # (parts as (ids, trainable), temperature, episode, group)
    for group, temperature in ((0, 1.0), (1, 0.7)):
        prompt = (tokens(6), False)
        first, second, tool = (tokens(5), True), (tokens(4), True), (tokens(3), False)
        base = 4 * group
        sequences += [
            ([prompt, first, tool, second], temperature, base, group),
            ([prompt, first, tool, (tokens(6), True)], temperature, base, group),  # a sampled token shared, then a fork
            (
                [prompt, (first[0][:3], True), (tokens(5), False), (tokens(5), True)],
                temperature,
                base,
                group,
            ),  # rewritten history
            ([prompt, first, tool, second], temperature, base + 1, group),  # duplicate of another episode
            ([prompt, first], temperature, base + 2, group),  # strict prefix
            ([prompt, first, tool, (tokens(11), True)], 1.3, base + 3, group),  # the same tree, another temperature
        ]
    sequences.append(([(tokens(4), False), (tokens(9), True)], 1.0, 8, 2))

    trajectories, masks = [], []
    for parts, temperature, _, _ in sequences:
        ids = np.array(sum((p for p, _ in parts), []), np.int32)
        mask = np.concatenate([np.full(len(p), t) for p, t in parts])
        policy = np.where(mask, rng.normal(-4.2, 0.5, len(ids)), 0).astype(np.float32)
        behaviour = np.where(mask, policy + rng.normal(0, 0.3, len(ids)), 0).astype(np.float32)
        version = np.where(mask, rng.integers(0, 3, len(ids)), -1).astype(np.int32)
        turn = np.where(mask, 0, -1).astype(np.int32)
        trajectories.append(Trajectory(ids, mask, policy, behaviour, version, mask.astype(np.uint8), turn, temperature))
        masks.append(mask)
    weights = fold_weights(masks, "sequences", 0.0)
    return [
        TrainingTrajectory(t, rng.normal(0, 1, len(t.ids)).astype(np.float32), w, i, episode, group, 0.0)
        for i, (t, w, (_, _, episode, group)) in enumerate(zip(trajectories, weights, sequences, strict=True))
    ]


def with_teachers(forest: list[TrainingTrajectory]) -> list[TrainingTrajectory]:
    """The forest with log-probs of a reference, a proximal policy and a teacher: of a token and what is before it, so that
    trajectories which share a read agree. The first candidate is the token itself; some candidates are missing."""

    def of_prefix(t: TrainingTrajectory, draw) -> np.ndarray:
        ids = t.trajectory.ids
        return np.stack([draw(np.random.default_rng([crc32(ids[: i + 1].tobytes()), draw.seed])) for i in range(len(ids))])

    def one(t: TrainingTrajectory) -> TrainingTrajectory:
        def draw(seed, mean, spread, *shape):
            function = lambda rng: rng.normal(mean, spread, shape).astype(np.float32)  # noqa: E731
            function.seed = seed
            return of_prefix(t, function)

        ids = np.abs(draw(3, 0, 30, CANDIDATES)).astype(np.int32) % VOCAB
        ids = np.where(np.abs(draw(4, 0, 1, CANDIDATES)) < 0.3, -1, ids)
        ids[:, 0] = t.trajectory.ids
        return replace(
            t, reference_logp=draw(0, -4.2, 0.5), proximal_logp=draw(1, -4.2, 0.5),
            teacher_ids=ids, teacher_logp=-np.abs(draw(2, -2, 1, CANDIDATES)),
        )  # fmt: skip

    return [one(t) for t in forest]


def pad(forest: list[TrainingTrajectory]) -> dict[str, np.ndarray]:
    """One trajectory per row, [B, L], padded at the end; per-token values at the token itself."""
    length = max(len(t.trajectory.ids) for t in forest)

    def stack(get):
        return np.stack([np.pad(x, [(0, length - len(x))] + [(0, 0)] * (x.ndim - 1)) for x in map(get, forest)])

    names = ("ids", "trainable", "policy_logp", "behaviour_logp", "version")
    arrays = {name: stack(lambda t, name=name: getattr(t.trajectory, name)) for name in names}
    optional = ("reference_logp", "proximal_logp", "teacher_ids", "teacher_logp")
    given = ("advantage", "weight", *(name for name in optional if getattr(forest[0], name) is not None))
    arrays |= {name: stack(lambda t, name=name: getattr(t, name)) for name in given}
    arrays |= {name: np.array([getattr(t, f"{name}_index") for t in forest]) for name in ("episode", "group")}
    return arrays | {"temperature": np.array([t.trajectory.temperature for t in forest], np.float32)}


def naive_logprobs(decoder: Decoder, variables, padded):
    """Log-prob and entropy of each token given those before it, [B, L - 1], by plain causal attention."""
    logp = _log_softmax(decoder, variables, padded)
    return jnp.take_along_axis(logp, padded["ids"][:, 1:, None], axis=-1)[..., 0], -(jnp.exp(logp) * logp).sum(-1)


def _log_softmax(decoder: Decoder, variables, padded):
    """[B, L - 1, V]"""
    ids = padded["ids"]

    def attend(q, k, v, cache):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * decoder.architecture.attention_scale
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v), cache

    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    hidden, _ = decoder.apply(variables, ids, positions, attend)
    logits = hidden[:, :-1] @ head_matrix(variables["params"], decoder.architecture) / padded["temperature"][:, None, None]
    return jax.nn.log_softmax(logits)


def naive_step(decoder: Decoder, variables, padded, step: int = 0) -> SimpleNamespace:
    """What the equations of the losses are written in, from a model's log-probs: arrays [B, L - 1]. `step`: the current
    policy version."""
    whole = _log_softmax(decoder, variables, padded)
    logp = jnp.take_along_axis(whole, padded["ids"][:, 1:, None], axis=-1)[..., 0]
    given = {name: padded[name][:, 1:].astype(logp.dtype) for name in ("advantage", "weight", "policy_logp", "behaviour_logp")}
    x = SimpleNamespace(
        xp=jnp, mask=padded["trainable"][:, 1:], episode=padded["episode"], group=padded["group"],
        logp=logp, held=jax.lax.stop_gradient(logp), entropy=-(jnp.exp(whole) * whole).sum(-1),
        policy=given["policy_logp"], behaviour=given["behaviour_logp"], advantage=given["advantage"], weight=given["weight"],
        lag=(step - padded["version"][:, 1:]).astype(logp.dtype), reference=jnp.zeros_like(logp), proximal=None,
    )  # fmt: skip
    if "teacher_ids" in padded:
        x.reference, x.proximal, x.teacher = (
            padded[name][:, 1:].astype(logp.dtype) for name in ("reference_logp", "proximal_logp", "teacher_logp")
        )
        x.is_candidate = padded["teacher_ids"][:, 1:] >= 0
        x.candidate = jnp.take_along_axis(whole, jnp.maximum(padded["teacher_ids"][:, 1:], 0), axis=-1)
        x.candidate_held = jax.lax.stop_gradient(x.candidate)
    return x


def relative_errors(tree, reference) -> dict[str, float]:
    """‖a − b‖ / ‖b‖ per tensor, by path."""
    flat, expected = (jax.tree_util.tree_flatten_with_path(t)[0] for t in (tree, reference))
    errors = {}
    for (path, a), (_, b) in zip(flat, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(b) > 0, f"{jax.tree_util.keystr(path)} has no gradient: nothing is compared"
        errors[jax.tree_util.keystr(path)] = np.linalg.norm(a - b) / np.linalg.norm(b)
    return errors
