"""Stop strings, found where they end, across token boundaries."""

from collections.abc import Callable, Sequence

MARGIN = 16  # characters kept before a possible match, so that cutting a character's bytes apart cannot hide one


class StopStrings:
    """Watches one generation's tokens. Decoding is limited to a window that still holds any match that may yet complete."""

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str], begun: Sequence[int] = ()):
        """begun: tokens the generation has already, without a match."""
        self._strings = tuple(strings)
        self._decode = decode
        self._keep = max(len(s) for s in strings) + MARGIN
        self._window = list(begun)
        self._shorten()

    def feed(self, ids: Sequence[int]) -> int | None:
        """Index in `ids` of the token that completes a stop string, or None. Not to be fed after a match."""
        before = len(self._window)
        self._window.extend(ids)
        if self._matches(self._window):
            return next(i for i in range(len(ids)) if self._matches(self._window[: before + i + 1]))
        self._shorten()
        return None

    def _matches(self, ids: list[int]) -> bool:
        text = self._decode(ids)
        return any(s in text for s in self._strings)

    def _shorten(self) -> None:
        while len(self._decode(self._window)) > 4 * self._keep:
            half = self._window[len(self._window) // 2 :]
            if len(self._decode(half)) < self._keep:
                return
            self._window = half
