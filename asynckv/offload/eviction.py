"""Eviction policies, by name.

A policy keeps an order of keys, without slots or transfers. `choose` removes and returns a key that is not busy. An
entry that is busy when it is chosen stands aside until it is `idle`, and moves to the back of the queue.

- `lru`: the least recently used block goes first.
- `s3-fifo`: three queues (Yang, Zhang, Qiu, Yue and Vigfusson, "FIFO queues are all you need for cache eviction", SOSP
  2023). A new block enters a small queue, and leaves the tier from there unless it was used again. Blocks that have
  just left are remembered as ghosts, and enter the main queue if they come back.

The blocks of a prompt are a chain, of which no block can be used without the first. So the last one is added first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from asynckv.arguments import one_of
from asynckv.errors import ConfigError

K = TypeVar("K", bound=Hashable)


class Queue(Generic[K]):
    """First in, first out, except for keys that stand aside."""

    def __init__(self) -> None:
        self._line: OrderedDict[K, int] = OrderedDict()  # key -> number of keys that had stood aside when it came
        self.aside: dict[K, int] = {}  # key -> its number among those that stood aside
        self._back: dict[K, int] = {}  # the same for keys that are idle again; each precedes later keys
        self._heap: list[tuple[int, K]] = []  # `_back` in order, with some outdated keys
        self._count = 0

    def add(self, key: K) -> None:
        self._line[key] = self._count

    def to_end(self, key: K) -> None:
        if key not in self._line:
            self.remove(key)
        self._line[key] = self._count
        self._line.move_to_end(key)

    def next(self) -> K | None:
        """Remove and return the next key; None if all stand aside."""
        while self._heap and self._back.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        if self._heap and (not self._line or self._heap[0][0] <= self._line[next(iter(self._line))]):
            _, key = heappop(self._heap)
            del self._back[key]
            return key
        return self._line.popitem(last=False)[0] if self._line else None

    def stand_aside(self, key: K) -> None:
        """Put back a removed key, which is passed over until it is idle."""
        self._count += 1
        self.aside[key] = self._count

    def idle(self, key: K) -> None:
        if (turn := self.aside.pop(key, None)) is not None:
            self._back[key] = turn
            heappush(self._heap, (turn, key))
            if len(self._heap) > 2 * len(self._back) + 64:
                self._heap = [(turn, key) for key, turn in self._back.items()]
                heapify(self._heap)

    def remove(self, key: K) -> None:
        for some in (self._line, self.aside, self._back):
            if some.pop(key, None) is not None:
                return
        raise KeyError(key)

    def __len__(self) -> int:
        return len(self._line) + len(self.aside) + len(self._back)

    def __contains__(self, key: K) -> bool:
        return key in self._line or key in self.aside or key in self._back


class LRU(Queue[K]):
    use = Queue.to_end

    def choose(self, is_busy: Callable[[K], bool]) -> K | None:
        while (key := self.next()) is not None and is_busy(key):
            self.stand_aside(key)
        return key


class S3Fifo(Generic[K]):
    """A small queue for new keys, a main one for keys that were used again, and ghosts of keys that just left."""

    SMALL = 10  # the small queue holds a tenth, as in the paper
    MOST = 3  # most uses that are counted, as in the paper's two bits

    def __init__(self, ghost_of: Callable[[K], Hashable] | None = None) -> None:
        self._ghost_of = ghost_of or (lambda key: key)
        self._small, self._main = Queue[K](), Queue[K]()
        self._uses: dict[K, int] = {}  # uses of each key since it came
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, key: K) -> None:
        ghost = self._ghost_of(key)
        self._uses[key] = 0
        if ghost in self._ghosts:
            del self._ghosts[ghost]
            self._main.add(key)
        else:
            self._small.add(key)

    def use(self, key: K) -> None:
        self._uses[key] = min(self._uses[key] + 1, self.MOST)
        self.idle(key)

    def idle(self, key: K) -> None:
        self._small.idle(key)
        self._main.idle(key)

    def remove(self, key: K) -> None:
        del self._uses[key]
        queue = self._small if key in self._small else self._main
        queue.remove(key)

    def choose(self, is_busy: Callable[[K], bool]) -> K | None:
        is_low = len(self._small) * self.SMALL < len(self)
        first, second = (self._from_main, self._from_small) if is_low else (self._from_small, self._from_main)
        return second(is_busy) if (key := first(is_busy)) is None else key

    def _from_small(self, is_busy: Callable[[K], bool]) -> K | None:
        while (key := self._small.next()) is not None:
            if self._uses[key] > 1:
                self._uses[key] = 0
                self._main.add(key)
            elif is_busy(key):
                self._small.stand_aside(key)
            else:
                del self._uses[key]
                self._ghosts[self._ghost_of(key)] = None
                while len(self._ghosts) > len(self._uses):
                    self._ghosts.popitem(last=False)
                return key
        return None

    def _from_main(self, is_busy: Callable[[K], bool]) -> K | None:
        while (key := self._main.next()) is not None:
            if is_busy(key):
                self._main.stand_aside(key)
            elif self._uses[key]:
                self._uses[key] -= 1
                self._main.add(key)
            else:
                del self._uses[key]
                return key
        return None

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: K) -> bool:
        return key in self._uses


Policy = LRU[K] | S3Fifo[K]
POLICIES = {"lru": LRU, "s3-fifo": S3Fifo}


def policy_named(name: str) -> type:
    return POLICIES[one_of("policy", name, sorted(POLICIES), ConfigError)]
