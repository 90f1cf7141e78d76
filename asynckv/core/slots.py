"""Slots of a memory that several peers share: staging memory of a reader, or memory of an owner for packed copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

User = TypeVar("User", bound=Hashable)


class Slots(Generic[User]):
    """Which slots are free. No peer has more of them than are free, so that one leaves room for others."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._free = list(range(number))
        self._in_use: dict[User, tuple[int, Hashable]] = {}  # slot, and the peer
        self._by_name: Counter[Hashable] = Counter()

    @property
    def users(self) -> Collection[User]:
        return self._in_use.keys()

    @property
    def num_in_use(self) -> int:
        return len(self._in_use)

    def has_room(self, name: Hashable) -> bool:
        """Return True if a peer may have one more slot."""
        return self._by_name[name] < len(self._free)

    def take(self, user: User, name: Hashable) -> int:
        slot = self._free.pop()
        self._in_use[user] = slot, name
        self._by_name[name] += 1
        return slot

    def give_back(self, user: User) -> None:
        slot, name = self._in_use.pop(user)
        self._by_name[name] -= 1
        if not self._by_name[name]:
            del self._by_name[name]
        self._free.append(slot)
