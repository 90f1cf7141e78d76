"""Room for messages that came before their request was lent. It is bounded in all, per connection, and in time.

Half of the room is first come, first served. Beyond that no connection gets more than an eighth of all, so that a
connection that floods us leaves room for others.
"""

from __future__ import annotations

import math
from collections import Counter, deque

from msgspec import Struct

from asynckv.config import LeaseConfig
from asynckv.core.types import Key, ReplyTo
from asynckv.core.wire import MAX_NONCE, Claim, Follow, Release

AT_ONCE = 128  # messages that are dropped in one step
PARKED_TEXT = 1024  # characters of a request id that fit in one parking place; a longer id takes more places

ParkingPlace = tuple[str, str, ReplyTo]
"""Pull (empty for a follower), process start and connection. A release replaces its pull's claim."""


class ParkedMessage(Struct, frozen=True):
    message: Claim | Release | Follow
    reply_to: ReplyTo
    sender: str
    until: float
    proven: str
    room: int = 1

    @property
    def sharer(self) -> str | ReplyTo:
        """Return the owner of the room: connections of one key share room, and without keys each has its own."""
        return self.proven or self.reply_to


class Parking:
    def __init__(self, config: LeaseConfig) -> None:
        self.by_key: dict[Key | str, dict[ParkingPlace, ParkedMessage]] = {}  # by key of the request, or by ticket
        self.num_parked = self.num_followers = 0  # room of all parked messages, and of followers alone
        self.next_at = math.inf  # time at which a parked message may fall due
        self._config = config
        self._order: deque[tuple[float, Key | str, ParkingPlace]] = deque()
        self._by: Counter[str | ReplyTo] = Counter()
        """This room by key, or by connection without keys, because a peer chooses its own name."""

    def park(self, message: Claim | Release | Follow, reply_to: ReplyTo, sender: str, now: float, proven: str) -> bool:
        """Park a message, and return False if there is no room for it. Only a follower's repeats extend its time."""
        key: Key | str = message.ticket if isinstance(message, Follow) else message.key
        pull_id, request_id = ("", "") if isinstance(message, Follow) else (message.pull_id, message.request_id)
        place, room = (pull_id, sender, reply_to), 1 + len(request_id) // PARKED_TEXT
        waiting = self.by_key.get(key, {})
        known = waiting.get(place)
        most, share = self._config.max_parked, max(self._config.max_parked // 8, 1)
        full = self.num_parked >= most or (self.num_parked >= most // 2 and self._by[proven or reply_to] >= share)
        if full and (known is None or room > known.room):
            return False
        until, kept = now + self._config.parked_s, message
        if known is not None:
            if isinstance(known.message, Release) or (
                not isinstance(message, Release) and message.nonce < known.message.nonce
            ):
                kept, room = known.message, known.room  # a claim after a newer one, or after the release, is late
            self._leave(known)
        if known is not None and type(kept) is type(known.message):
            until = until if isinstance(kept, Follow) else known.until
        else:
            # A release gets its whole time even after a claim, because no reader repeats an acknowledged release.
            self._order.append((until, key, place))
            self.next_at = min(self.next_at, until)
        parked = ParkedMessage(kept, reply_to, sender, until, proven, room)
        self.by_key.setdefault(key, waiting)[place] = parked
        self._by[parked.sharer] += room
        self.num_parked += room
        self.num_followers += isinstance(kept, Follow)
        if len(self._order) > 8 * most:
            self._order = deque(x for x in self._order if x[2] in self.by_key.get(x[1], ()))
        return True

    def take(self, key: Key | str) -> list[ParkedMessage]:
        parked = list(self.by_key.pop(key, {}).values())
        for each in parked:
            self._leave(each)
        return parked

    def take_all(self) -> list[ParkedMessage]:
        self._order.clear()
        return [each for key in list(self.by_key) for each in self.take(key)]

    def drop(self, key: Key | str, place: ParkingPlace, nonce: int = MAX_NONCE) -> None:
        """Drop the message of a place, unless its nonce is newer."""
        waiting = self.by_key.get(key, {})
        parked = waiting.get(place)
        if parked is not None and (isinstance(parked.message, Release) or parked.message.nonce <= nonce):
            del waiting[place]
            self._leave(parked)
            if not waiting:
                del self.by_key[key]

    def tick(self, now: float) -> list[ParkedMessage]:
        """Drop messages that were parked for too long, and return them."""
        dropped: list[ParkedMessage] = []
        for _ in range(AT_ONCE):
            if not self._order or self._order[0][0] > now:
                break
            _, key, place = self._order.popleft()
            parked = self.by_key.get(key, {}).get(place)
            if parked is not None and parked.until <= now:
                self.drop(key, place)
                dropped.append(parked)
            elif parked is not None and isinstance(parked.message, Follow):
                self._order.append((parked.until, key, place))
        self.next_at = self._order[0][0] if self._order else math.inf
        return dropped

    def _leave(self, parked: ParkedMessage) -> None:
        self.num_parked -= parked.room
        self.num_followers -= isinstance(parked.message, Follow)
        self._by[parked.sharer] -= parked.room
        if not self._by[parked.sharer]:
            del self._by[parked.sharer]
