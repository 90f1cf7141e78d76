"""Which stored block has to go when room is wanted: policies, by name.

A policy keeps an order of whatever it was told of, and knows nothing of slots, groups or transfers. Asked to `choose`,
it lets go of one that is not busy. What is busy when its turn comes is in use, so it goes to the end of its queue:
looking past the same ones again and again would cost more than any order is worth.

- `lru`: what was not used for longest goes first.
- `s3-fifo`: three queues (Yang, Zhang, Qiu, Yue and Vigfusson, "FIFO queues are all you need for cache eviction", SOSP
  2023). What is new goes into a small queue, and leaves the tier from there unless it was used again; so a scan of
  prompts that are never seen again pushes out nothing else. What has just left is remembered as a ghost, and goes into
  the main queue if it comes back.

The blocks of a prompt are a chain: without the first, no other can be used. So whoever tells of several blocks of one
prompt tells of the last one first; then both policies let a chain go from its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from asynckv.arguments import shown
from asynckv.errors import ConfigError

__all__ = ["LRU", "POLICIES", "Policy", "S3Fifo", "policy_named"]

K = TypeVar("K", bound=Hashable)


class Policy(Protocol[K]):
    """An order of what may have to go."""

    def add(self, key: K) -> None:
        """Take in what is new here."""

    def use(self, key: K) -> None:
        """Note that it was used."""

    def remove(self, key: K) -> None:
        """Forget it: it has left on other grounds."""

    def choose(self, is_busy: Callable[[K], bool]) -> K | None:
        """Let one go that is not busy; None if all are."""

    def __len__(self) -> int:
        """How many there are."""

    def __contains__(self, key: K) -> bool:
        """Whether it is one of them."""


class LRU(Generic[K]):
    """What was not used for longest goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K) -> None:
        """Take in what is new here."""
        self._order[key] = None

    def use(self, key: K) -> None:
        """Note that it was used."""
        self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        """Forget it: it has left on other grounds."""
        del self._order[key]

    def choose(self, is_busy: Callable[[K], bool]) -> K | None:
        """Let one go that is not busy; None if all are."""
        for _ in range(len(self._order)):
            key = next(iter(self._order))
            if not is_busy(key):
                del self._order[key]
                return key
            self._order.move_to_end(key)
        return None

    def __len__(self) -> int:
        """How many there are."""
        return len(self._order)

    def __contains__(self, key: K) -> bool:
        """Whether it is one of them."""
        return key in self._order


class S3Fifo(Generic[K]):
    """A small queue for what is new, a main one for what was used again, and ghosts of what has just left.

    Args:
        ghost_of: By what something is recognised when it comes back; itself, if left out.
    """

    SMALL = 10
    """The small queue holds a tenth, as in the paper."""

    MOST = 3
    """Uses that are counted, two bits."""

    def __init__(self, ghost_of: Callable[[K], Hashable] | None = None) -> None:
        self._ghost_of = ghost_of or (lambda key: key)
        self._small: OrderedDict[K, int] = OrderedDict()
        """Key -> how often it was used since it came; the oldest first."""
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, key: K) -> None:
        """Take in what is new here, or has come back."""
        ghost = self._ghost_of(key)
        if ghost in self._ghosts:
            del self._ghosts[ghost]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def use(self, key: K) -> None:
        """Note that it was used."""
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, self.MOST)

    def remove(self, key: K) -> None:
        """Forget it: it has left on other grounds."""
        queue = self._small if key in self._small else self._main
        del queue[key]

    def choose(self, is_busy: Callable[[K], bool]) -> K | None:
        """Let one go that is not busy; None if all are."""
        queues = [self._from_small, self._from_main]
        if len(self._small) * self.SMALL < len(self):
            queues.reverse()
        return next((key for queue in queues if (key := queue(is_busy)) is not None), None)

    def _from_small(self, is_busy: Callable[[K], bool]) -> K | None:
        for _ in range(len(self._small)):
            key, uses = self._small.popitem(last=False)
            if uses > 1:
                self._main[key] = 0
            elif is_busy(key):
                self._small[key] = uses
            else:
                self._ghosts[self._ghost_of(key)] = None
                while len(self._ghosts) > len(self._main) + len(self._small):
                    self._ghosts.popitem(last=False)
                return key
        return None

    def _from_main(self, is_busy: Callable[[K], bool]) -> K | None:
        busy = 0
        while busy < len(self._main):
            key, uses = self._main.popitem(last=False)
            if is_busy(key):
                self._main[key] = uses
                busy += 1
            elif uses:
                self._main[key] = uses - 1
                busy = 0
            else:
                return key
        return None

    def __len__(self) -> int:
        """How many there are."""
        return len(self._small) + len(self._main)

    def __contains__(self, key: K) -> bool:
        """Whether it is one of them."""
        return key in self._small or key in self._main


POLICIES = {"lru": LRU, "s3-fifo": S3Fifo}


def policy_named(name: str) -> type:
    """Return a policy by its name.

    Raises:
        ConfigError: There is none of that name.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"policy {shown(name)} is unknown; use one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
