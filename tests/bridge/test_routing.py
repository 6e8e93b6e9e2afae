"""Where requests go, over random fleets and random traffic."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.client import routing
from bridge.client.routing import BLOCK, PAUSED_SECONDS, PrefixMemory, ReplicaState, Status, choose, prefixes, slack

STATES = st.builds(
    ReplicaState,
    status=st.sampled_from(Status),
    version=st.integers(-1, 3),
    load=st.integers(0, 200),
    paused_seconds=st.sampled_from([0.0, 0.1, PAUSED_SECONDS, PAUSED_SECONDS + 1]),
)
PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=5 * BLOCK)


def serving(*loads: int, version: int = 0) -> list[ReplicaState]:
    return [ReplicaState(Status.SERVING, version, load) for load in loads]


def remembering(*prompts: list[int] | None, version: int = 0) -> list[PrefixMemory]:
    memories = [PrefixMemory() for _ in prompts]
    for memory, prompt in zip(memories, prompts, strict=True):
        if prompt is not None:
            memory.remember(prefixes(prompt), version)
    return memories


@given(st.lists(STATES, max_size=6), PROMPTS, st.integers(-1, 3), st.data())
def test_only_a_replica_that_may_answer_is_chosen_and_never_far_above_the_least_loaded(replicas, prompt, least, data):
    memories = [PrefixMemory() for _ in replicas]
    for memory, replica in zip(memories, replicas, strict=True):
        for cached in data.draw(st.lists(PROMPTS | st.just(prompt), max_size=2)):
            memory.remember(prefixes(cached), replica.version)
    chosen = choose(replicas, memories, prefixes(prompt), least)
    may = [
        r
        for r in replicas
        if r.status not in (Status.DOWN, Status.DRAINING, Status.QUARANTINED)
        and r.version >= least
        and r.paused_seconds <= PAUSED_SECONDS
    ]
    calm = [r for r in may if r.status is Status.SERVING and not r.paused_seconds]
    if not may:
        assert chosen is None
        return
    assert replicas[chosen] in (calm or may)
    least_load = min(r.load for r in calm or may)
    assert replicas[chosen].load <= least_load + slack(least_load)


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 64), st.integers(0, 2**32))
def test_without_an_end_in_sight_loads_stay_together(num_replicas, group_size, seed):
    """Groups of one prompt each, all of which share a system prompt, and nothing ends: the worst that can come."""
    rng = random.Random(seed)
    system = [9] * (2 * BLOCK)
    loads, memories = [0] * num_replicas, [PrefixMemory() for _ in range(num_replicas)]
    for _ in range(256 // group_size + 1):
        prompt = prefixes(system + [rng.randrange(100) for _ in range(rng.randrange(1, 3 * BLOCK))])
        for _ in range(group_size):
            chosen = choose(serving(*loads), memories, prompt, 0)
            memories[chosen].remember(prompt, 0)
            loads[chosen] += 1
            assert max(loads) <= min(loads) + slack(min(loads)) + 1


@given(PROMPTS, st.integers(1, 6), st.lists(st.tuples(PROMPTS, st.integers(0, 5)), max_size=20))
def test_in_calm_a_prompt_stays_where_it_was(prompt, num_replicas, others):
    """Loads that differ little, and other prompts meanwhile; a longer one that begins with it, a next turn, goes there too."""
    memories = [PrefixMemory() for _ in range(num_replicas)]
    home = choose(serving(*[0] * num_replicas), memories, prefixes(prompt), 0)
    memories[home].remember(prefixes(prompt), 0)
    for other, _ in others:
        if other[: len(prompt)] == prompt:
            continue  # it ends up there, or makes another place as good
        loads = [0] * num_replicas
        loads[home] = 1
        chosen = choose(serving(*loads), memories, prefixes(other), 0)
        memories[chosen].remember(prefixes(other), 0)
    again = choose(serving(*[0] * num_replicas), memories, prefixes(prompt), 0)
    assert memories[again].num_matched(prefixes(prompt), 0) == len(prompt)
    if not others:
        assert again == home


def test_the_longest_match_wins_until_it_costs_more_than_it_saves():
    prompt = list(range(4 * BLOCK))
    memories = remembering(prompt[: 2 * BLOCK], prompt, None)
    assert choose(serving(0, 0, 0), memories, prefixes(prompt), 0) == 1
    assert choose(serving(0, routing.SLACK_REQUESTS // 2 - 1, 0), memories, prefixes(prompt), 0) == 1
    assert choose(serving(0, routing.SLACK_REQUESTS // 2 + 1, 0), memories, prefixes(prompt), 0) == 0
    assert choose(serving(9, 17, 0), memories, prefixes(prompt), 0) == 2


def test_a_turn_after_a_tool_call_goes_where_the_turn_before_was_generated():
    turn = list(range(100))
    memories = remembering(None, turn, None)
    assert choose(serving(3, 5, 3), memories, prefixes([*turn, *range(200, 230)]), 0) == 1


def test_a_short_system_prompt_draws_nobody():
    system, memories = [1] * BLOCK, [PrefixMemory() for _ in range(4)]
    memories[0].remember(prefixes(system), 0)
    prompt = prefixes(system + list(range(2, 2 + 31 * BLOCK)))
    assert choose(serving(1, 0, 0, 0), memories, prompt, 0) != 0


def test_prompts_that_share_nothing_go_round():
    memories, seen = [PrefixMemory() for _ in range(3)], []
    for i in range(6):
        prompt = prefixes([i] * BLOCK)
        seen.append(choose(serving(0, 0, 0), memories, prompt, 0))
        memories[seen[-1]].remember(prompt, 0)
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]


def test_prefixes_of_older_weights_count_for_nothing():
    prompt = prefixes(list(range(40)))
    memory = PrefixMemory()
    memory.remember(prompt, 1)
    assert memory.num_matched(prompt, 1) == 40 and memory.num_matched(prompt, 2) == 0
    memory.remember(prefixes([7]), 2)
    assert memory.num_matched(prompt, 1) == 0 and memory.num_blocks(2) == 1
    memory.remember(prompt, 1)  # a generation of the old weights that ends now
    assert memory.num_blocks(2) == 1 and memory.num_blocks(1) == 0


def test_a_memory_is_bounded_and_keeps_beginnings_longest():
    memory = PrefixMemory(capacity=4)
    prompt = list(range(6 * BLOCK))
    memory.remember(prefixes(prompt), 0)
    assert memory.num_blocks(0) == 4 and memory.num_matched(prefixes(prompt), 0) == 4 * BLOCK


def test_a_difference_anywhere_ends_the_match():
    prompt = list(range(3 * BLOCK + 5))
    memory = remembering(prompt)[0]
    for position, matched in ((0, 0), (BLOCK - 1, 0), (BLOCK, BLOCK), (3 * BLOCK + 4, 3 * BLOCK)):
        changed = [*prompt]
        changed[position] = 999
        assert memory.num_matched(prefixes(changed), 0) == matched
