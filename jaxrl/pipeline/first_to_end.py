"""Which episodes of a group are kept when more are started than it needs."""

from collections.abc import Sequence


def first_to_end(succeeded: Sequence[bool], wanted: int, started: int) -> list[int] | None:
    """Places in the order in which episodes ended (`succeeded`: those so far) of the `wanted` ones that make the group; None as
    long as it has to go on. The first that succeed; failed ones only if all `started` have ended and too few did."""
    good = [place for place, ok in enumerate(succeeded) if ok][:wanted]
    if len(good) < wanted and len(succeeded) < started:
        return None
    failed = [place for place, ok in enumerate(succeeded) if not ok][: wanted - len(good)]
    return sorted(good + failed)
