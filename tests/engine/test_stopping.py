"""Stop strings against a search in the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.engine.stopping import StopStrings

PIECES = ["a", "b", "ab", "ba", "", "x" * 40, "é", "aab"]


def decode(ids):
    return "".join(PIECES[i] for i in ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=120), cuts=st.lists(st.integers(1, 7), min_size=1, max_size=20))
def test_the_completing_token_is_found_wherever_tokens_and_feeds_are_cut(ids, cuts):
    strings = ("abba", "éa", "bxa")
    expected = next((i for i in range(len(ids)) if any(s in decode(ids[: i + 1]) for s in strings)), None)
    watch = StopStrings(strings, decode)
    start, found = 0, None
    for k in range(10_000):
        part = ids[start : start + cuts[k % len(cuts)]]
        if not part:
            break
        index = watch.feed(part)
        if index is not None:
            found = start + index
            break
        start += len(part)
    assert found == expected


def test_decoding_stays_bounded():
    longest = 0

    def counting(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    watch = StopStrings(("abc",), counting)
    for _ in range(2000):
        watch.feed([0, 1])
    assert longest < 200
