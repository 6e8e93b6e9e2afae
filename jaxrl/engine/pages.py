"""Who owns which page of the KV cache: a free list, and a radix tree of prompt prefixes over it.

Host-side only; the device sees block tables. Every edge of the tree is the tokens of one page, so that prefixes are
shared page by page; a prompt's last, partly filled page is an edge of its own that only an equal prompt matches, and is
copied before anything is appended to it. Pages in the tree are written once, by prefill, and read-only afterwards; the
pages a generation writes are its own and never enter the tree. So what a cached position holds depends on the tokens up to
it alone, whoever computed it first.

A generation takes all the pages it may ever need when it is admitted: nothing that runs can be starved of pages, and
nothing is ever preempted and computed again in another shape.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

TRASH_PAGE = 0  # what rows that compute nothing write to; never allocated


@dataclass(eq=False)
class Node:
    """One cached page. A path from the root to it spells the tokens that lead to it."""

    tokens: tuple[int, ...]
    start: int  # position of its first token
    page: int
    parent: "Node | None"
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    refs: int = 0  # generations that read it
    ready: bool = False  # its keys and values have been computed
    attached: bool = True  # still found by new generations


@dataclass(eq=False)
class Allocation:
    """The pages of one generation: shared ones of its prompt, then its own."""

    path: list[Node]  # full prompt pages, first to last
    tail: Node | None  # the partly filled prompt page, held until it has been copied to private[0]
    private: list[int]

    @property
    def table(self) -> list[int]:
        """Page of every page-sized run of positions."""
        return [node.page for node in self.path] + self.private

    @property
    def nodes(self) -> list[Node]:
        return self.path if self.tail is None else [*self.path, self.tail]


class PageCache:
    """Pages 1 to num_pages - 1, either free, in the tree, or private to a generation."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
        self._root = Node((), 0, TRASH_PAGE, None, ready=True)
        self._idle = 0  # attached nodes no generation reads; all can be evicted, leaves first
        self._evictable: OrderedDict[Node, None] = OrderedDict()  # idle leaves, least recently used first

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that are free or can be made free by eviction."""
        return len(self._free) + self._idle

    @property
    def num_cached(self) -> int:
        """Pages kept for reuse that no generation reads."""
        return self._idle

    def allocate(self, prompt: Sequence[int], num_total: int) -> Allocation | None:
        """Pages for `prompt` and what follows it, num_total tokens in all; None if there are not enough now.

        All but the prompt's last token are looked up in the tree; what is missing is added there, not yet `ready`.
        """
        size = self.page_size
        num_cachable = len(prompt) - 1  # the last token is fed to decode, which samples the first token from it
        keys = [tuple(prompt[i : min(i + size, num_cachable)]) for i in range(0, num_cachable, size)]
        found: list[Node] = []
        node = self._root
        for key in keys:
            if (child := node.children.get(key)) is None:
                break
            found.append(node := child)
        num_full = num_cachable // size
        num_private = -(-num_total // size) - num_full
        num_new = len(keys) - len(found) + num_private
        if num_new > self.num_available - sum(n.refs == 0 for n in found):
            return None
        for node in found:
            self._acquire(node)
        nodes = list(found)
        for i, key in enumerate(keys[len(found) :], start=len(found)):
            parent = nodes[-1] if nodes else self._root
            child = Node(key, i * size, self._take(), parent, refs=1)
            parent.children[key] = child
            nodes.append(child)
        private = [self._take() for _ in range(num_private)]
        return Allocation(nodes[:num_full], nodes[num_full] if len(nodes) > num_full else None, private)

    def release_tail(self, allocation: Allocation) -> None:
        """The partly filled prompt page has been copied; the generation no longer reads it."""
        if allocation.tail is not None:
            self._release(allocation.tail)
            allocation.tail = None

    def release(self, allocation: Allocation) -> None:
        """The generation is over. Its prompt stays in the tree for reuse; its own pages are free."""
        self.release_tail(allocation)
        for node in reversed(allocation.path):
            self._release(node)
        self._free.extend(reversed(allocation.private))
        allocation.path, allocation.private = [], []

    def clear(self) -> None:
        """Forgets every cached prefix: nothing that is allocated from now on reads what was computed before. Pages of running
        generations stay theirs until released."""
        nodes = list(self._root.children.values())
        self._root = Node((), 0, TRASH_PAGE, None, ready=True)
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            node.attached = False
            if node.refs == 0:
                self._free.append(node.page)
        self._idle = 0
        self._evictable.clear()

    def _acquire(self, node: Node) -> None:
        if node.refs == 0:
            self._idle -= 1
            self._evictable.pop(node, None)
        node.refs += 1

    def _release(self, node: Node) -> None:
        node.refs -= 1
        if node.refs:
            return
        if not node.attached:
            self._free.append(node.page)
        elif not node.ready:  # nobody will compute it any more; its children were given up before it
            del node.parent.children[node.tokens]
            self._free.append(node.page)
        else:
            self._idle += 1
            if not node.children:
                self._evictable[node] = None

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        node, _ = self._evictable.popitem(last=False)
        self._idle -= 1
        parent = node.parent
        del parent.children[node.tokens]
        if parent is not self._root and parent.refs == 0 and not parent.children:
            # No more recently used than the child was, which was the least recent of all.
            self._evictable[parent] = None
            self._evictable.move_to_end(parent, last=False)
        return node.page
