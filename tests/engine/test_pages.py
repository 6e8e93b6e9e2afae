"""The page allocator and prefix tree under random interleavings."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.engine.pages import TRASH_PAGE, PageCache

SIZE = 4


def compute(allocation, content):
    """What prefill does: writes the pages that are not ready, and nothing else."""
    written = set()
    for node in allocation.nodes:
        if not node.ready:
            content[node.page] = node.tokens
            node.ready = True
            written.add(node.page)
    return written


def check(cache, running):
    """Every page has exactly one owner, and the tree's counts are those of the generations that read it."""
    tree = []
    stack = list(cache._root.children.values())
    while stack:
        node = stack.pop()
        tree.append(node)
        stack.extend(node.children.values())
        assert node.parent.children[node.tokens] is node and node.attached
        assert node.refs == sum(node in a.nodes for a in running)
        assert node.parent is cache._root or node.parent.refs >= node.refs
    detached = {node for a in running for node in a.nodes if not node.attached}
    for node in detached:
        assert node.refs == sum(node in a.nodes for a in running)
    owned = [n.page for n in tree] + [n.page for n in detached] + [page for a in running for page in a.private] + cache._free
    assert sorted(owned) == list(range(1, cache.num_pages)) and TRASH_PAGE not in owned
    assert cache.num_available == len(cache._free) + sum(n.refs == 0 for n in tree)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_pages=st.integers(8, 40))
def test_random_interleavings_leak_nothing_and_share_only_what_is_equal(seed, num_pages):
    rng = random.Random(seed)
    cache = PageCache(num_pages, SIZE)
    content: dict[int, tuple] = {}
    running, prompts = [], {}
    for _ in range(80):
        action = rng.random()
        if action < 0.5:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            total = len(prompt) + rng.randrange(1, 10)
            available = cache.num_available
            needed = -(-total // SIZE) + bool((len(prompt) - 1) % SIZE)  # nothing shared
            allocation = cache.allocate(prompt, total)
            if allocation is None:
                assert available < needed and cache.num_available == available
                continue
            assert len(allocation.table) == -(-total // SIZE) and len(set(allocation.table)) == len(allocation.table)
            running.append(allocation)
            prompts[id(allocation)] = prompt
        elif action < 0.7 and running:  # prefill, then the partly filled page is copied and the generation writes its own
            allocation = rng.choice(running)
            written = compute(allocation, content)
            for other in running:
                shared = {node.page for node in other.nodes if node not in allocation.nodes} | set(other.private)
                assert not written & shared
            cache.release_tail(allocation)
            for page in allocation.private:
                content[page] = ("private", id(allocation))
        elif action < 0.95 and running:
            allocation = running.pop(rng.randrange(len(running)))
            cache.release(allocation)
        elif action >= 0.95:
            cache.clear()
        for allocation in running:
            for i, node in enumerate(allocation.path):
                assert node.tokens == tuple(prompts[id(allocation)][i * SIZE : (i + 1) * SIZE])
                assert not node.ready or content[node.page] == node.tokens
        check(cache, running)
    for allocation in running:
        cache.release(allocation)
    check(cache, [])
    assert cache.num_available == cache.num_usable
    cache.clear()
    assert len(cache._free) == cache.num_usable


def test_equal_prompts_share_every_page_of_the_prompt():
    cache = PageCache(32, SIZE)
    prompt = list(range(11))  # 10 cachable tokens: two full pages, one of 2 tokens
    first, second = cache.allocate(prompt, 16), cache.allocate(prompt, 16)
    assert first.path == second.path and first.tail is second.tail and len(first.path) == 2
    assert len(first.private) == 2 and not set(first.private) & set(second.private)
    longer = cache.allocate([*range(9), 99, 98, 97, 96], 16)
    assert longer.path[:2] == first.path and longer.path[2] is not first.tail


def test_the_least_recently_used_prefix_is_evicted_first_and_a_used_one_never():
    cache = PageCache(8, SIZE)  # 7 usable
    a, b = [1] * 5, [2] * 5  # one cached page each
    held = cache.allocate([3] * 5, 8)
    for prompt in (a, b, a):
        allocation = cache.allocate(prompt, 8)
        compute(allocation, {})
        cache.release(allocation)
    compute(held, {})
    assert cache.num_cached == 2
    big = cache.allocate([4], 16)  # 4 pages: 3 free ones and one evicted
    assert cache.num_cached == 1 and cache._root.children.keys() >= {(1,) * 4, (3,) * 4}
    assert cache.allocate([5], 8) is None  # needs 2, only a's page can go
    cache.release(big)
    cache.release(held)
    assert cache.num_available == 7


def test_after_clear_running_generations_keep_their_pages_and_new_ones_share_nothing():
    cache = PageCache(16, SIZE)
    old = cache.allocate([1] * 9, 12)
    compute(old, {})
    cache.clear()
    new = cache.allocate([1] * 9, 12)
    assert not set(old.table) & set(new.table) and not any(node.ready for node in new.path)
    cache.release(old)
    cache.release(new)
    assert cache.num_available == 15
