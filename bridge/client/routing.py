"""Which replica a request goes to: where its prefix is cached, unless others have much less to do. Data and pure functions.

A prefix is worth load: the whole prompt cached is worth `slack` requests, a part of it that part of them. So the samples of a
group and a turn after a tool call land where their prefix is, a short system prompt that everybody shares draws nobody, and
no replica gets a request while it has more than `slack` requests above the least loaded one:

    chosen = argmin over replicas of   load - slack(least load) * cached tokens / prompt tokens
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

BLOCK = 16  # tokens: vLLM's own unit on GPUs
SLACK_REQUESTS = 16  # of the order of a group: its samples fit above a replica that is idle
SLACK_SHARE = 1 / 4  # of the least load, where that is more: servers with many slots
PAUSED_SECONDS = 5.0  # longer than an update of weights stops a server
MEMORY_BLOCKS = 1 << 16  # a million tokens a replica, of the order of a KV cache

Prefixes = Sequence[tuple[int, int]]  # (tokens, hash) of a prompt's beginnings, shortest first


class Status(Enum):
    SERVING = auto()
    PUBLISHING = auto()  # new weights are on their way; what it gets may wait a moment
    DRAINING = auto()  # running generations end or move, none begins
    QUARANTINED = auto()  # its weights are of no version
    DOWN = auto()  # dead, starting, or not heard of


@dataclass(frozen=True)
class ReplicaState:
    """What is known of a replica. version: of its weights as it acknowledged them, -1: none of ours. load: running and
    waiting requests. paused_seconds: since when it has generated nothing on purpose; 0: it generates."""

    status: Status
    version: int
    load: int
    paused_seconds: float = 0.0


class PrefixMemory:
    """The beginnings of prompts that a replica has computed under its present weights; the least recently used are forgotten."""

    def __init__(self, capacity: int = MEMORY_BLOCKS):
        self._capacity = capacity
        self._version = -1
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def num_blocks(self, version: int) -> int:
        """How many are remembered under `version`."""
        return len(self._hashes) if version == self._version else 0

    def num_matched(self, prefixes: Prefixes, version: int) -> int:
        """Tokens at the beginning of a prompt that are cached under `version`."""
        matched = 0
        if version == self._version:
            for tokens, digest in prefixes:
                if digest not in self._hashes:
                    break
                matched = tokens
        return matched

    def remember(self, prefixes: Prefixes, version: int) -> None:
        """What a request leaves in the cache that was admitted under `version`. A newer version voids everything before;
        an older one leaves nothing: new requests do not find it."""
        if version < self._version:
            return
        if version > self._version:
            self._hashes.clear()
            self._version = version
        for _, digest in reversed(prefixes):  # a beginning is used after, and so outlives, what continues it
            self._hashes[digest] = None
            self._hashes.move_to_end(digest)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)


def prefixes(prompt_ids: Sequence[int]) -> Prefixes:
    """The beginnings of a prompt: every whole number of blocks, and all of it."""
    found, digest = [], 0
    for start in range(0, len(prompt_ids), BLOCK):
        block = tuple(prompt_ids[start : start + BLOCK])
        digest = hash((digest, block))
        found.append((start + len(block), digest))
    return found


def slack(least_load: int) -> float:
    """Requests above the least load that a replica may have and still get one whose whole prompt it has cached."""
    return max(SLACK_REQUESTS, SLACK_SHARE * least_load)


def accepts(replica: ReplicaState, least_version: int) -> bool:
    """Whether a request may go there whose tokens may not be older than `least_version`."""
    return (
        replica.status in (Status.SERVING, Status.PUBLISHING)
        and replica.version >= least_version
        and replica.paused_seconds <= PAUSED_SECONDS
    )


def choose(
    replicas: Sequence[ReplicaState], memories: Sequence[PrefixMemory], prompt: Prefixes, least_version: int
) -> int | None:
    """Index of the replica that a request goes to, None if none accepts it. Those that are not being published to go first."""
    open_ = [i for i, replica in enumerate(replicas) if accepts(replica, least_version)]
    calm = [i for i in open_ if replicas[i].status is Status.SERVING and replicas[i].paused_seconds == 0]
    return _cheapest(calm or open_, replicas, memories, prompt)


def _cheapest(
    candidates: Iterable[int], replicas: Sequence[ReplicaState], memories: Sequence[PrefixMemory], prompt: Prefixes
) -> int | None:
    candidates = list(candidates)
    if not candidates:
        return None
    allowed = slack(min(replicas[i].load for i in candidates))
    length = prompt[-1][0]

    def cost(i: int) -> tuple[float, int, int]:
        worth = allowed * memories[i].num_matched(prompt, replicas[i].version) / length
        return replicas[i].load - worth, memories[i].num_blocks(replicas[i].version), i  # of equals the emptiest

    return min(candidates, key=cost)
