"""Rules that are watched while a script is played, by what is visible from outside of the core.

Times are judged by the clock of the process that made the promise, less what that process was stopped for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from asynckv.config import PullConfig
from asynckv.core.decode import DecodeSide
from asynckv.core.flow import Admission, InFlight
from asynckv.core.pull import PullState
from asynckv.core.rank import RankCore
from asynckv.core.source import RATE_MARGIN
from asynckv.core.types import Key, Outcome, PullId, Reason, TransferId
from asynckv.core.wire import Claim, Granted, Hello, Message, NotYet, Refused, Release, Renew, decode_packet
from asynckv.errors import AsyncKVError
from tests.lab.world import Process, World

TURN_S = 0.1
"""Seconds by which a process may be late with anything that is due."""


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """A measure of the time that a process has been running since some moment."""

    process: Process
    at: float
    frozen_s: float

    @classmethod
    def start(cls, process: Process) -> Stopwatch:
        """Begin to count."""
        return cls(process, process.now, process.frozen_s)

    @property
    def ran_s(self) -> float:
        """Return the time that has passed, without that for which it was stopped."""
        return self.process.now - self.at - (self.process.frozen_s - self.frozen_s)


def wrong_in_admission(admission: Admission, queued: set[PullId], reading: set[PullId]) -> list[str]:
    """List contradictions, given the pulls that should be queued and that may be in flight."""
    wrong = [f"pull {p} should wait, and does not" for p in sorted(queued) if not admission.waits(p)]
    stray = admission._places.keys() - queued - reading
    return wrong + [f"pull {p} should not wait or count" for p in sorted(stray)]


def wrong_in_flight(in_flight: InFlight, running: Container[TransferId]) -> list[str]:
    """List transfers that take room and do not run, and sums that are none."""
    wrong = [f"transfer {t} is over and still takes room" for t in in_flight.sizes if t not in running]
    sums = [sum(x) for x in zip(*in_flight.sizes.values(), strict=True)] or [0, 0]
    counted = [in_flight.num_bytes, in_flight.num_descriptors]
    return wrong + ([f"{counted} bytes and descriptors are counted, not {sums}"] if sums != counted else [])


def wrong_in(decode: DecodeSide) -> list[str]:
    """List contradictions in what a decode side counts: its pulls, those that wait or read, and what runs."""
    wrong = [
        f"transfer {transfer_id} belongs to pull {transfer.pull.pull_id}, which is over"
        for transfer_id, transfer in decode.transfers.items()
        if transfer.pull.pull_id not in decode.pulls and not transfer.is_detached
    ]
    unfinished = [p for p in decode.pulls.values() if p.reason is None]
    if decode.started != {p.pull_id for p in unfinished if p.lists is not None}:
        wrong.append(f"{len(decode.started)} pulls count as started without an outcome, which is not so")
    queued = {p.pull_id for p in unfinished if p.is_queued and decode.can_read(p)}
    moving = (PullState.READING, PullState.DRAINING)
    reading = {p.pull_id for p in unfinished if p.state in moving or p.is_queued}
    wrong += wrong_in_admission(decode.admission, queued, reading)
    wrong += wrong_in_flight(decode.posting.in_flight, decode.transfers)
    for peer in decode.peers.by_place.values():
        wrong += wrong_in_flight(peer.line.in_flight, peer.transfers)
    return wrong


def check_belief(
    readers: Iterable[tuple[Process, RankCore]],
    key: Key,
    incarnation: str,
    at: float,
    is_confirmed: Callable[[Process, PullId], bool] | None = None,
) -> str:
    """Name the readers that still believe in a promise of blocks that an owner's engine has back since `at`.

    A reader's belief is the latest end of any grant that was ever delivered to it, on its own clock. Of a request that
    may be recalled no promise is believed, but a read that is proven: `is_confirmed` says whether its owner knows it.
    """
    for process, core in readers:
        for pull in core.decode.pulls.values():
            if pull.reason is not None or pull.params.key != key:
                continue
            for source in pull.sources:
                until = (source.covered_until - process.epoch) / process.rate
                if source.rank.place[1] != incarnation:
                    continue
                if is_confirmed is not None:
                    if source.proven and not is_confirmed(process, pull.pull_id):
                        return f"{process.name} believes what {pull.request_id} read, and no grant has confirmed that"
                elif until > at + 1e-6:
                    return f"{process.name} was promised the blocks of {pull.request_id} for {until - at:.6f} s more"
    return ""


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    major: int
    source: str
    target: str
    messages: list[msgspec.Raw]


_envelope = msgspec.msgpack.Decoder(_Envelope)


def is_about(packet: bytes, tags: set[str | int | None]) -> bool:
    """Whether a packet has a message with one of these tags."""
    try:
        # An array of less than 16 fields is one byte, then the tag.
        return any(memoryview(raw)[1] in tags for raw in _envelope.decode(packet).messages)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


_Watched = Hello | Claim | Renew | Granted | NotYet | Refused | Release
_TAGS = {kind.__struct_config__.tag for kind in (Hello, Claim, Renew, Granted, NotYet, Refused, Release)}


@lru_cache(maxsize=64)
def _watched(packet: bytes) -> tuple[str, str, tuple[Message, ...]]:
    """Return the packet's sender and recipient, and the messages in it that any rule is about."""
    try:
        envelope = _envelope.decode(packet)
        # An array of less than 16 fields is one byte, then the tag.
        if not any(memoryview(raw)[1] in _TAGS for raw in envelope.messages):
            return envelope.source, envelope.target, ()
        messages = decode_packet(packet).messages
    except (msgspec.MsgspecError, AsyncKVError, UnicodeDecodeError):
        return "", "", ()
    return envelope.source, envelope.target, tuple(m for m in messages if isinstance(m, _Watched))


@dataclass(slots=True)
class _Greeting:
    nonce: int
    first_at: float
    at: float
    times: int = 1
    is_answered: bool = False
    is_again: bool = False
    """One before it was answered, so this may be a probe, which is over sooner."""


class Wire:
    """Rules about packets: handshakes are not repeated without end, promises are renewed in time, and kept. No reader
    is told that something is not lent yet which was lent, or withdrawn.

    Of requests that may be recalled no promise is kept. Instead, a read that is believed was confirmed, by its owner's
    true time: the read had ended, as its reader saw it, before a claim was sent that was granted, and that came to its
    owner while the request was lent there. A reader that was refused reads no more.

    Args:
        is_patient: Readers are not told that a rank is gone: only its silence, or its answer, ends a handshake.
    """

    def __init__(self, world: World, config: PullConfig, renew_s: float, is_patient: bool) -> None:
        self._is_patient = is_patient
        self._world, self._config, self._renew_s = world, config, renew_s
        self._greetings: dict[tuple[Process, str, str], _Greeting] = {}
        self._sent_at: dict[tuple[Process, int], float] = {}
        """By transmission."""
        self._promises: dict[tuple[Process, str, str], tuple[str, float]] = {}
        """By reader, owner's process start and pull: the token, and the end of the longest promise that was heard."""
        self._landed: dict[tuple[Process, str, str], float] = {}
        """By the same: when the last of its bytes did."""
        self._unanswered: dict[tuple[Process, str], list[_Greeting]] = {}
        self.asked: dict[tuple[Process, str, str], tuple[int, bytes]] = {}
        """Newest question of each pull to each address, and the packet that it was in."""
        self._granted: dict[tuple[Process, str, str], Stopwatch] = {}
        """When it was answered."""
        self._spent: dict[tuple[str, str], Stopwatch] = {}
        """By owner's process start and token: since when a request was lent or withdrawn."""
        self.told_to_wait: set[str] = set()
        """Pulls that have heard that their request is not lent yet."""
        self._loans: dict[tuple[str, str], tuple[float, float]] = {}
        """Requests that may be recalled, by owner's process start and token: when it was lent, and until when."""
        self._came_at: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        """By owner's process start, pull and transmission: when a claim came, in its owner's time."""
        self._agreed: dict[tuple[Process, str, str], set[int]] = defaultdict(set)
        """By reader, owner's process start and pull: transmissions whose grants have come back."""
        self._posted: set[tuple[Process, str, str]] = set()
        self._read_at: dict[tuple[Process, str, str], float] = {}
        """By the same: when the reader saw the last of its reads end well."""
        self._refused: dict[tuple[Process, str, str], Stopwatch] = {}
        """By the same: since when the reader has been told that the request was recalled."""
        most, at = 0, 0.0
        while at < config.handshake_s:
            most, at = most + 1, at + config.hello_retry_s * 2 ** min(most, 3)
        self._most_hellos = most

    def forget(self, process: Process) -> None:
        """It begins anew, and meets everybody anew."""
        self._greetings = {place: x for place, x in self._greetings.items() if place[0] is not process}
        self._unanswered = {place: y for place, y in self._unanswered.items() if place[0] is not process}

    def spent(self, process: Process, owner: str, token: str) -> None:
        """A rank has lent a request, or withdrawn it."""
        self._spent.setdefault((owner, token), Stopwatch.start(process))

    def may_recall(self, owner: str, token: str) -> None:
        """A request that may be recalled is about to be lent by a rank."""
        self._loans[owner, token] = math.inf, math.inf

    def lent(self, process: Process, owner: str, token: str) -> None:
        """A rank lends a request that it may recall."""
        if (owner, token) in self._loans:
            self._loans[owner, token] = process.now, math.inf

    def ended(self, process: Process, owner: str, token: str) -> None:
        """A rank has such a request back, or will never lend it."""
        if (owner, token) in self._loans:
            lent_at, until = self._loans[owner, token]
            self._loans[owner, token] = lent_at, min(until, process.now)

    def heard(self, process: Process, packet: bytes) -> None:
        """An owner hears something from a reader."""
        if not self._loans:
            return
        _, target, messages = _watched(packet)
        for message in messages:
            if isinstance(message, Claim | Renew) and (target, message.key.token) in self._loans:
                self._came_at[target, message.pull_id, message.nonce].append(process.now)

    def posted(self, process: Process, owner: str, pull_id: str) -> None:
        """A read of a pull is posted."""
        if (process, owner, pull_id) in self._refused:
            self._world.violate(f"{process.name} reads for {pull_id}, which was refused because it was recalled")
        self._posted.add((process, owner, pull_id))

    def done(self, process: Process, owner: str, pull_id: str) -> None:
        """A reader sees the good end of a read."""
        self._read_at[process, owner, pull_id] = process.now

    def is_confirmed(self, owner: str, token: str, process: Process, pull_id: str) -> bool:
        """Whether a pull has read nothing from an owner, or what was granted after that proves it."""
        place = process, owner, pull_id
        if (read_at := self._read_at.get(place)) is None:
            return True
        lent_at, until = self._loans.get((owner, token), (math.inf, -math.inf))
        return any(
            self._sent_at.get((process, nonce), -math.inf) >= read_at
            # A claim that comes before the request is lent is answered when it is lent.
            and any(max(at, lent_at) <= until for at in self._came_at[owner, pull_id, nonce])
            for nonce in self._agreed[place]
        )

    def unconfirmed(self, process: Process, token: str, pull_id: str) -> list[str]:
        """Return the owners that a pull has read from and that have not confirmed it."""
        owners = [owner for reader, owner, pulled in self._read_at if (reader, pulled) == (process, pull_id)]
        return [owner for owner in owners if not self.is_confirmed(owner, token, process, pull_id)]

    def has_asked(self, process: Process, to: str, pull_id: str) -> bool:
        """Whether a pull has ever claimed at an address."""
        return (process, to, pull_id) in self.asked

    def sent(self, process: Process, to: str, packet: bytes) -> None:
        """A process says something to an address."""
        source, target, messages = _watched(packet)
        for message in messages:
            if isinstance(message, NotYet):
                clock = self._spent.get((source, message.key.token))
                if clock is not None and clock.ran_s > TURN_S:
                    self._world.violate(
                        f"{process.name} says that a request is not lent yet {clock.ran_s:.3f} s after it was spent"
                    )
            elif isinstance(message, Release):
                landed_at = self._landed.pop((process, target, message.pull_id), -math.inf)
                until = self._promises.get((process, target, message.pull_id), ("", -math.inf))[1]
                if (target, message.key.token) in self._loans:
                    self._lets_go(process, target, message)
                elif message.outcome is Outcome.COMPLETE and landed_at > until:
                    self._world.violate(
                        f"{process.name} believes what {message.pull_id} read from {to} "
                        f"{landed_at - until:.6f} s after its last promise"
                    )
                # Whatever is granted to it from now on, it does not want.
                self._promises[process, target, message.pull_id] = ("", math.inf)
            elif isinstance(message, Hello):
                # A peer that was lost and is met anew is asked anew. An answer to an older question changes nothing.
                for place in [p for p in self.asked if p[:2] == (process, to)]:
                    self._granted.pop(place, None)
                    self.asked[place] = 0, self.asked[place][1]
                self._greets(process, to, target, message.nonce)
            elif isinstance(message, Claim | Renew):
                self.asked[process, to, message.pull_id] = message.nonce, packet
                self._sent_at[process, message.nonce] = process.now
                if (process, target, message.pull_id) not in self._posted:
                    self._refused.pop((process, target, message.pull_id), None)  # it reads from this rank after all
                clock = self._granted.pop((process, to, message.pull_id), None)
                if clock is not None and clock.ran_s > self._renew_s + TURN_S:
                    self._world.violate(
                        f"{process.name} renewed {message.pull_id} at {to} {clock.ran_s:.3f} s after it was granted, "
                        f"not after {self._renew_s:.3f} s"
                    )

    def landed(self, process: Process, owner: str, pull_id: str) -> None:
        """Bytes of a pull have landed, from the process start of an owner."""
        self._landed[process, owner, pull_id] = self._world.now

    def delivered(self, process: Process, origin: str, packet: bytes) -> None:
        """A process hears something from an address that it is connected to."""
        for greeting in self._unanswered.pop((process, origin), ()):
            greeting.is_answered = True
        source, _, messages = _watched(packet)
        for message in messages:
            if isinstance(message, Granted):
                self._promised(process, source, message)
                self._agreed[process, source, message.pull_id].add(message.nonce)
                # An answer to an older question may come too late to be of use.
                if self.asked.get((process, origin, message.pull_id), (0,))[0] == message.nonce:
                    self._granted[process, origin, message.pull_id] = Stopwatch.start(process)
            elif isinstance(message, NotYet):
                self.told_to_wait.add(message.pull_id)
            elif isinstance(message, Refused):
                # What is granted no more need not be asked for until the promise has run out.
                self._granted.pop((process, origin, message.pull_id), None)
                place, token = (process, source, message.pull_id), message.key.token
                is_newest = self.asked.get((process, origin, message.pull_id), (0,))[0] == message.nonce
                is_open = self._promises.get(place, ("", 0.0))[1] < math.inf
                is_recalled = (source, token) in self._loans and message.reason is Reason.REVOKED and is_newest
                is_proven = place in self._read_at and self.is_confirmed(source, token, process, message.pull_id)
                if is_recalled and is_open and not is_proven:
                    self._refused.setdefault(place, Stopwatch.start(process))

    def freed(self, token: str, owner: str, at: float) -> str:
        """An owner's engine has its blocks back: name readers with a longer promise that have not released them."""
        if (owner, token) in self._loans:
            return ""
        for (process, incarnation, pull_id), (promised, until) in self._promises.items():
            if (incarnation, promised) == (owner, token) and until > at + 1e-6 and not process.is_dead:
                return f"{process.name} heard a promise to {pull_id} of {until - at:.6f} s more"
        return ""

    def _lets_go(self, process: Process, owner: str, release: Release) -> None:
        """A reader releases a request that may be recalled."""
        place = process, owner, release.pull_id
        if release.outcome is Outcome.COMPLETE:
            if not self.is_confirmed(owner, release.key.token, process, release.pull_id):
                self._world.violate(f"{process.name} believes what {release.pull_id} read, and no grant confirmed that")
        elif (clock := self._refused.pop(place, None)) is not None and place in self._posted:
            if clock.ran_s > self._config.drain_s * 1.001 + TURN_S:
                self._world.violate(f"{process.name} gives {release.pull_id} up {clock.ran_s:.3f} s after its recall")

    def _promised(self, process: Process, owner: str, granted: Granted) -> None:
        sent_at = self._sent_at.get((process, granted.nonce))
        if sent_at is None:
            return
        until = sent_at + granted.seconds * (1 - RATE_MARGIN) / process.rate
        place = (process, owner, granted.pull_id)
        if until > self._promises.get(place, ("", -math.inf))[1]:
            self._promises[place] = (granted.key.token, until)

    def _greets(self, process: Process, to: str, target: str, nonce: int) -> None:
        now, place = process.now, (process, to, target)
        known = self._greetings.get(place)
        if known is not None and known.nonce == nonce:
            known.times, known.at = known.times + 1, now
            if known.times > self._most_hellos:
                self._world.violate(f"{process.name} greets {to} for the {known.times}th time in one handshake")
            return
        if known is not None:
            # A handshake that failed, or a peer that was lost, is followed by a pause. (A process that was stopped
            # between reading its clock and sending cannot be judged by when it sent.)
            ended_at = known.at
            if self._is_patient and not known.is_answered:
                lasts_s = self._config.suspect_s if known.is_again else self._config.handshake_s
                ended_at = max(known.at, known.first_at + lasts_s * 0.999)
            if not process.frozen_s and now < ended_at + self._config.backoff_s * 0.999:
                self._world.violate(f"{process.name} greets {to} again {now - ended_at:.3f} s after it had failed")
        greeting = self._greetings[place] = _Greeting(nonce, now, now)
        greeting.is_again = known is not None and (known.is_answered or known.is_again)
        self._unanswered.setdefault((process, to), []).append(greeting)
