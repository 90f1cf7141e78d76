"""The decode side's prefix cache, as a model: which tokens of a prompt would be there already.

Least recently used chunks leave first, and of one prompt its end before its beginning. The model goes by the
order of the schedule, as if every request were there before the next one comes, so it gives the same answer
whatever the clock does. It moves no bytes: what it holds cached is never pulled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class PrefixCache:
    """Chunks by least recent use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chunks: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def num_cached(self, chunks: Sequence[Hashable]) -> int:
        """Count the leading chunks of a prompt that are here."""
        return next((n for n, chunk in enumerate(chunks) if chunk not in self._chunks), len(chunks))

    def use(self, chunks: Sequence[Hashable]) -> None:
        """Hold a prompt's chunks as the most recently used; the oldest make room."""
        # Its beginning is used last: whoever shares anything with it shares that.
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > self.capacity:
            self._chunks.popitem(last=False)
