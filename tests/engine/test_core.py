"""The engine, step by step, against full forwards of the model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_model import ARCHITECTURE, VOCAB, causal_attention, logits_of, logps_of, random_variables

from jaxrl.config import LoraConfig, MeshConfig, SamplerConfig
from jaxrl.data import Source
from jaxrl.engine import core
from jaxrl.engine.core import Engine
from jaxrl.mesh import make_mesh
from jaxrl.models.decoder import Decoder, head_matrix, init_variables, shardings, unstack_layers
from jaxrl.rollout.protocol import SamplerError, SamplingParams

CONFIG = SamplerConfig(slots=4, max_length=96, page_size=8, prefill_chunk=32)


@pytest.fixture
def one_step_dispatches(monkeypatch):
    """Makes how many tokens a step decodes independent of the machine's speed."""
    monkeypatch.setattr(core, "TARGET_DISPATCH_SECONDS", 0.0)


def make_engine(variables, config=CONFIG, decode=None, eos=(), lora=None, version=0):
    return Engine(ARCHITECTURE, variables, version, config, decode, eos, lora)


class Log:
    """What each request was given, by request."""

    def __init__(self):
        self.parts, self.reasons, self.order = {}, {}, []

    def take(self, emissions):
        for e in emissions:
            self.parts.setdefault(e.request, []).append(e.tokens)
            if e.finish_reason is not None:
                self.reasons[e.request] = e.finish_reason
                self.order.append(e.request)

    def field(self, request, name):
        return np.concatenate([getattr(part, name) for part in self.parts[request]])

    def ids(self, request):
        return self.field(request, "ids").tolist()


def run(engine, prompts, params, arrivals=None):
    """Submits prompts[i] before step arrivals[i] and runs until all are done. Returns the requests and the log."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    requests = [engine.make_request(prompt, how, 0) for prompt, how in zip(prompts, params, strict=True)]
    arrivals = arrivals or [0] * len(prompts)
    log = Log()
    step = 0
    while len(log.reasons) < len(requests):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == step:
                engine.submit(request)
        log.take(engine.step())
        step += 1
        assert step < 2000
    return requests, log


def prompts_of(rng):
    """Many lengths around page and chunk bounds, shared prefixes, equal prompts, strict prefixes of each other."""
    base = rng.integers(0, VOCAB, 80).tolist()
    alone = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 7, 8, 9, 10, 16, 17, 31, 33, 40, 65)]
    return [*alone, base[:40], base[:40], base[:40], base[:41], base[:48], base[:49], [*base[:35], 1, 2, 3], base[:70], base]


def test_greedy_equals_a_full_forward_token_for_token(variables):
    rng = np.random.default_rng(0)
    prompts = prompts_of(rng)
    engine = make_engine(variables, version=5)
    requests, log = run(engine, prompts, SamplingParams(12, temperature=0.0), rng.integers(0, 12, len(prompts)).tolist())
    for request, prompt in zip(requests, prompts, strict=True):
        ids = log.ids(request)
        assert log.reasons[request] == "length" and len(ids) == 12
        assert logits_of(variables, [*prompt, *ids])[len(prompt) - 1 : -1].argmax(-1).tolist() == ids
        np.testing.assert_allclose(log.field(request, "policy_logp"), logps_of(variables, prompt, ids), atol=1e-5)
        assert (log.field(request, "behaviour_logp") == 0).all()
        assert (log.field(request, "version") == 5).all() and (log.field(request, "source") == Source.PLAIN).all()
    assert engine.kv_use == 0 and engine.num_running == 0 and not engine.can_work


def test_policy_log_probs_are_those_of_a_full_forward_at_the_temperature(variables):
    rng = np.random.default_rng(1)
    prompts = prompts_of(rng)
    params = [
        SamplingParams(10, temperature=0.5 + 0.1 * i, top_p=0.9 if i % 2 else 1.0, top_k=20 if i % 3 == 0 else 0, seed=i)
        for i in range(len(prompts))
    ]
    requests, log = run(make_engine(variables), prompts, params)
    for request, prompt, how in zip(requests, prompts, params, strict=True):
        expected = logps_of(variables, prompt, log.ids(request), how.temperature)
        policy, behaviour = log.field(request, "policy_logp"), log.field(request, "behaviour_logp")
        np.testing.assert_allclose(policy, expected, atol=1e-5)
        truncated = how.top_p < 1 or how.top_k > 0
        assert (behaviour >= policy).all() if truncated else (behaviour == policy).all()


def test_the_first_token_is_distributed_as_the_model_says(variables):
    prompt = [3, 1, 4, 1, 5]
    logits = logits_of(variables, prompt)[-1].astype(np.float64) / 0.8
    expected = np.exp(logits - np.logaddexp.reduce(logits))
    num = 2000
    requests, log = run(
        make_engine(variables), [prompt] * num, [SamplingParams(1, temperature=0.8, seed=s) for s in range(num)]
    )
    counts = np.bincount([log.ids(r)[0] for r in requests], minlength=VOCAB)
    rare = expected * num < 5
    observed, mean = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum()) * num
    freedom = len(mean) - 1
    assert freedom > 20
    chi2 = ((observed - mean) ** 2 / mean).sum()
    assert ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom)) < 3.72


def bits(log, request):
    names = ("ids", "policy_logp", "behaviour_logp")
    return tuple(log.field(request, name).tobytes() for name in names)


def test_results_are_bit_equal_in_any_order_of_arrival_and_under_eviction(variables):
    rng = np.random.default_rng(2)
    prompts = prompts_of(rng)
    params = [
        SamplingParams(
            int(rng.integers(1, 16)), temperature=float(i % 4) / 2, top_p=(1.0, 0.8)[i % 2], top_k=(0, 0, 9)[i % 3], seed=i
        )
        for i in range(len(prompts))
    ]
    requests, log = run(make_engine(variables), prompts, params)
    reference = [bits(log, r) for r in requests]
    for seed, config in enumerate([CONFIG, CONFIG, CONFIG.model_copy(update={"pages": 17})]):
        order = np.random.default_rng(seed).permutation(len(prompts))
        arrivals = np.random.default_rng(seed).integers(0, 30, len(prompts)).tolist()
        requests, log = run(make_engine(variables, config), [prompts[i] for i in order], [params[i] for i in order], arrivals)
        for i, request in zip(order, requests, strict=True):
            assert bits(log, request) == reference[i], (i, len(prompts[i]))


def test_a_small_pool_serves_everything_and_lower_priority_numbers_go_first(variables):
    config = CONFIG.model_copy(update={"pages": 13})  # one sequence of 96 tokens at a time
    engine = make_engine(variables, config)
    log = Log()
    requests = [engine.make_request(list(range(60)), SamplingParams(36, seed=i), priority=-i) for i in range(4)]
    for request in requests:
        engine.submit(request)
    for _ in range(300):
        log.take(engine.step())
        assert engine.num_running <= 1
    assert log.order == requests[::-1]
    with pytest.raises(SamplerError, match="sampler.pages = 12"):
        make_engine(variables, CONFIG.model_copy(update={"pages": 12}))


def test_equal_prompts_are_computed_once(variables):
    engine = make_engine(variables)
    prompt = list(range(30))
    for seed in range(4):
        engine.submit(engine.make_request(prompt, SamplingParams(2, seed=seed), 0))
    engine.step()  # one chunk of 4 tiles holds all 29 tokens that are cached
    assert len(engine._queues.decoding) == 4 and not engine._queues.prefilling


def test_stop_tokens_and_strings_end_a_generation_and_are_kept(variables):
    def decode(ids):
        return "".join(chr(0x100 + i) for i in ids)

    prompt = [5, 6, 7]
    (request,), log = run(make_engine(variables), [prompt], SamplingParams(40, seed=3))
    ids = log.ids(request)

    def first(i):
        return ids.index(ids[i])

    absent = next(i for i in range(VOCAB) if i not in ids)
    (request,), log = run(make_engine(variables), [prompt], SamplingParams(40, seed=3, stop_token_ids=(absent, ids[20])))
    assert log.ids(request) == ids[: first(20) + 1] and log.reasons[request] == "stop"
    many = (*range(VOCAB, VOCAB + 20), ids[20])  # more than the device watches
    (request,), log = run(make_engine(variables), [prompt], SamplingParams(40, seed=3, stop_token_ids=many))
    assert log.ids(request) == ids[: first(20) + 1] and log.reasons[request] == "stop"
    (request,), log = run(make_engine(variables, eos=(ids[15],)), [prompt], SamplingParams(40, seed=3))
    assert log.ids(request) == ids[: first(15) + 1] and log.reasons[request] == "stop"
    stop = SamplingParams(40, seed=3, stop_strings=("zz", decode(ids[22:25])))
    (request,), log = run(make_engine(variables, decode=decode), [prompt], stop)
    assert log.ids(request) == ids[:25] and log.reasons[request] == "stop"


def test_a_generation_continued_from_its_first_tokens_is_the_uncut_one(variables):
    rng = np.random.default_rng(6)
    cuts = [1, 7, 8, 9, 23, 31]  # of 32; the prompt of 13 tokens makes 8 and 24 pages with 3 and 11 of them

    def decode(ids):
        return "".join(f"{i:03d}" for i in ids)

    prompts = [rng.integers(0, VOCAB, 13).tolist() for _ in cuts]
    kinds = ({}, {"top_p": 0.9, "temperature": 0.9}, {"top_k": 50})
    whole = [SamplingParams(32, seed=i, **kinds[i % 3]) for i in range(len(cuts))]
    engine = make_engine(variables, decode=decode)
    requests, log = run(engine, prompts, whole)
    # The text of the last token before the cut, the next and the one after: a match that no side of the cut has alone.
    strings = [(decode(log.ids(r)[cut - 1 : cut + 2])[2:7],) for r, cut in zip(requests, cuts, strict=True)]
    stops = [dataclasses.replace(params, stop_strings=s) for params, s in zip(whole, strings, strict=True)]
    for params, ends in ((whole, False), (stops, True)):
        uncut, uncut_log = run(engine, prompts, params)
        continued, continued_log = run(
            engine,
            [[*prompt, *uncut_log.ids(r)[:cut]] for prompt, r, cut in zip(prompts, uncut, cuts, strict=True)],
            [dataclasses.replace(how, max_tokens=32 - cut, num_continued=cut) for how, cut in zip(params, cuts, strict=True)],
        )
        for a, b, cut in zip(uncut, continued, cuts, strict=True):
            assert continued_log.ids(b) == uncut_log.ids(a)[cut:]
            for name in ("policy_logp", "behaviour_logp"):
                np.testing.assert_allclose(continued_log.field(b, name), uncut_log.field(a, name)[cut:], atol=1e-5)
            assert continued_log.reasons[b] == uncut_log.reasons[a]
        assert {uncut_log.reasons[r] for r in uncut} == ({"stop"} if ends else {"length"})


def test_a_generation_ends_at_max_length(variables):
    (request,), log = run(make_engine(variables), [list(range(90))], SamplingParams(50))
    assert len(log.ids(request)) == 6 and log.reasons[request] == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(4), "empty"),
        ([1] * 96, SamplingParams(4), "sampler.max_length = 96"),
        ([VOCAB], SamplingParams(4), "vocabulary of 200"),
        ([1], SamplingParams(4, stop_strings=("x",)), "tokenizer"),
        ([1], SamplingParams(4, num_continued=1), "num_continued = 1"),
        ([1], SamplingParams(0), "max_tokens"),
    ],
)
def test_what_cannot_be_generated_is_refused_by_name(variables, prompt, params, message):
    with pytest.raises(SamplerError, match=message):
        make_engine(variables).make_request(prompt, params, 0)


def test_cancelling_frees_slot_and_pages_in_every_state(variables, one_step_dispatches):
    engine = make_engine(variables)
    requests = [engine.make_request(list(range(i, i + 60)), SamplingParams(30), 0) for i in range(6)]
    for request in requests:
        engine.submit(request)
    engine.step()  # prefilling
    engine.cancel(requests[0])
    for _ in range(12):
        engine.step()
    assert engine._queues.decoding and engine.num_running == 4
    for request in requests[1:]:
        engine.cancel(request)
    assert engine.kv_use == 0 and engine.num_running == 0 and engine.num_waiting == 0
    assert engine.step() == [] and not engine.can_work


# Publishing


def mixed_forward(old, new, ids, num_old):
    """Logits after ids[num_old - 1:] by the `new` weights, over keys and values of ids[:num_old - 1] by the `old` ones: the
    last token before a swap is not in the cache yet when it happens."""
    split = num_old - 1

    def attend_all(q, k, v, cache):
        k_all = k if cache is None else jnp.concatenate([cache[0], k], axis=1)
        v_all = v if cache is None else jnp.concatenate([cache[1], v], axis=1)
        group = q.shape[2] // k.shape[2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k_all, group, axis=2)) * ARCHITECTURE.attention_scale
        num_queries, num_keys = scores.shape[-2:]
        visible = jnp.tril(jnp.ones((num_queries, num_keys), bool), num_keys - num_queries)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(v_all, group, axis=2)), (k_all, v_all)

    model = Decoder(ARCHITECTURE, scan_layers=False)

    @jax.jit
    def forward(old, new, tokens, positions):
        _, cache = model.apply(old, tokens[:, :split], positions[:, :split], attend_all, [None] * ARCHITECTURE.num_layers)
        hidden, _ = model.apply(new, tokens[:, split:], positions[:, split:], attend_all, cache)
        return hidden[0] @ head_matrix(new["params"], ARCHITECTURE)

    old, new = unstack_layers(old), unstack_layers(new)
    tokens, positions = jnp.asarray(ids)[None], jnp.arange(len(ids))[None]
    return np.asarray(forward(old, new, tokens, positions)).astype(np.float64)


def test_weights_swapped_under_running_generations(variables, one_step_dispatches):
    new = random_variables(1)
    engine = make_engine(variables, version=7)
    log = Log()
    prompts = [list(range(20)), list(range(10, 45))]
    requests = [engine.make_request(prompt, SamplingParams(30, seed=i), 0) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    while not log.parts:
        log.take(engine.step())
    log.take(engine.step())
    late = engine.make_request(prompts[0], SamplingParams(5, seed=9), 0)
    engine.submit(late)  # not admitted yet when the weights change
    num_bytes, num_continued = engine.publish(new, 8)
    assert num_continued == 2 and num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(variables))
    while len(log.reasons) < 3:
        log.take(engine.step())
    for request, prompt in zip(requests, prompts, strict=True):
        ids, version = log.ids(request), log.field(request, "version")
        num_old = int((version == 7).sum())
        assert 0 < num_old < 30 and (version == [7] * num_old + [8] * (30 - num_old)).all()
        policy = log.field(request, "policy_logp")
        np.testing.assert_allclose(policy[:num_old], logps_of(variables, prompt, ids)[:num_old], atol=1e-5)
        logits = mixed_forward(variables, new, [*prompt, *ids], len(prompt) + num_old)[:-1]
        logps = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        np.testing.assert_allclose(policy[num_old:], logps[np.arange(30 - num_old), ids[num_old:]], atol=1e-5)
        # the old keys matter: a forward of the new weights alone says something else
        assert np.abs(policy[num_old:] - logps_of(new, prompt, ids)[num_old:]).max() > 1e-2
    assert (log.field(late, "version") == 8).all()
    np.testing.assert_allclose(log.field(late, "policy_logp"), logps_of(new, prompts[0], log.ids(late)), atol=1e-5)


def test_prefixes_of_older_weights_never_serve_what_starts_later(variables, one_step_dispatches):
    new = random_variables(1)
    engine = make_engine(variables)
    prompt = list(range(50))
    run(engine, [prompt], SamplingParams(4))
    assert engine._cache.num_cached > 0
    running = engine.make_request(prompt, SamplingParams(40, seed=1), 0)  # keeps the old pages alive
    engine.submit(running)
    for _ in range(4):
        engine.step()
    prefilling = engine.make_request(list(range(100, 180)), SamplingParams(4), 0)  # half computed at the swap
    engine.submit(prefilling)
    engine.step()
    assert prefilling in engine._queues.prefilling and prefilling.allocation.nodes[0].ready
    engine.publish(new, 1)
    fresh = engine.make_request(prompt, SamplingParams(6), 0)
    engine.submit(fresh)
    log = Log()
    while len(log.reasons) < 3:
        log.take(engine.step())
    for request in (fresh, prefilling):
        assert (log.field(request, "version") == 1).all()
        expected = logps_of(new, request.prompt, log.ids(request))
        np.testing.assert_allclose(log.field(request, "policy_logp"), expected, atol=1e-5)
    assert engine.kv_use == 0


def test_published_weights_are_copied(variables):
    new = random_variables(1)
    expected = logps_of(new, [1, 2, 3], [4, 5, 6])
    engine = make_engine(variables)
    engine.publish(new, 1)
    jax.tree.map(lambda leaf: leaf.delete(), new)  # what donation does to the trainer's arrays
    (request,), log = run(engine, [[1, 2, 3]], SamplingParams(3))
    again = logps_of(random_variables(1), [1, 2, 3], log.ids(request))
    np.testing.assert_allclose(log.field(request, "policy_logp"), again, atol=1e-5)
    assert np.isfinite(expected).all()


def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(variables):
    engine = make_engine(variables)
    wrong = {"params": variables["params"] | {"norm": {"scale": jnp.ones(65)}}}
    with pytest.raises(SamplerError, match="params/norm/scale"):
        engine.publish(wrong, 1)
    with pytest.raises(SamplerError, match="params"):
        engine.publish(variables["params"], 1)
    with pytest.raises(SamplerError, match="adapters"):
        engine.publish(variables | {"lora": {}}, 1)
    (request,), log = run(engine, [[1, 2, 3]], SamplingParams(3))
    assert (log.field(request, "version") == 0).all()


def test_adapters_are_merged_into_the_copy():
    lora = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
    model = Decoder(ARCHITECTURE, lora=lora)
    adapted = init_variables(model, jax.random.key(3), None)
    noise = jax.random.normal(jax.random.key(4), (64,)) * 0.1
    adapted["lora"] = jax.tree.map(lambda leaf: leaf + jnp.resize(noise, leaf.shape), adapted["lora"])
    (request,), log = run(make_engine(adapted, lora=lora), [[1, 2, 3, 4]], SamplingParams(8))
    ids = [1, 2, 3, 4, *log.ids(request)]

    @jax.jit
    def forward(adapted, tokens):
        hidden, _ = model.apply(adapted, tokens[None], jnp.arange(len(ids))[None], causal_attention)
        return jax.nn.log_softmax(hidden[0] @ head_matrix(adapted["params"], ARCHITECTURE))

    logps = np.asarray(forward(adapted, jnp.asarray(ids)))
    np.testing.assert_allclose(log.field(request, "policy_logp"), logps[np.arange(3, 11), np.asarray(ids[4:])], atol=1e-5)
    base = logps_of({"params": adapted["params"]}, ids[:4], ids[4:])
    assert np.abs(base - log.field(request, "policy_logp")).max() > 1e-2


def test_weights_that_are_not_finite_are_an_error_not_a_token(variables):
    engine = make_engine(variables)
    engine.publish(jax.tree.map(lambda leaf: leaf * jnp.nan, variables), 1)
    with pytest.raises(SamplerError, match="not finite under the weights of version 1"):
        run(engine, [[1, 2]], SamplingParams(2))


def test_weights_spread_over_a_mesh_are_gathered(variables):
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    spread = jax.device_put(variables, shardings(Decoder(ARCHITECTURE), mesh))
    engine = make_engine(random_variables(1))
    engine.publish(spread, 1)
    (request,), log = run(engine, [[1, 2, 3]], SamplingParams(6))
    np.testing.assert_allclose(log.field(request, "policy_logp"), logps_of(variables, [1, 2, 3], log.ids(request)), atol=1e-5)


def test_bfloat16_stays_near_float32(variables):
    engine = make_engine(variables, CONFIG.model_copy(update={"dtype": "bfloat16"}))
    prompts = [list(range(n)) for n in (5, 30)]
    requests, log = run(engine, prompts, SamplingParams(20))
    for request, prompt in zip(requests, prompts, strict=True):
        error = np.abs(log.field(request, "policy_logp") - logps_of(variables, prompt, log.ids(request)))
        assert error.mean() < 0.1 and error.max() < 0.5
