"""A hostile process beside a simulated service: it replays what it has heard, and forges what it can.

It has heard every packet, and reaches every listener. What that may change is the model of trust:

- A process that does not know a lease's 128-bit token changes nothing but counters (and may fill the memory for claims
  that come early, which is bounded and which honest readers repeat past).
- A process that knows the token of a lease after all its readers have spoken cannot act for them: a claim, renewal or
  release for a pull from another process start, under another cohort, of other blocks or under another request id is
  refused. (If it knows the token *before* the readers come it can claim and release in their place: it is permission.)
- Exact bytes that are sent again, at any time and by any route, are what the protocol cannot tell from a network that
  repeats: a claim or renewal by a pull that is not released yet lengthens its promise, by `grant_s` each and never
  beyond `max_lease_s`, even if its reader is dead; the answer goes to the route that it came by. If the request is not
  lent yet the first answer is lost to the reader that way, and it has to repeat its claim. A repeated hello takes the
  goodbye. A release that was sent takes its effect once, and a claim after it is refused.
- A reader believes only the address that it is connected to, and of that only answers to its own nonces, which
  refuse for reasons that are a rank's to give.

Wherever nothing may change, that is compared before and after each packet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from asynckv.account.inspect import Inspector
from asynckv.core.following import Following
from asynckv.core.pull import Pull
from asynckv.core.rank import RankCore
from asynckv.core.source import Source
from asynckv.core.types import Address, Cohort, Key, Outcome, Reason, ReplyTo
from asynckv.core.wire import (
    MAJOR,
    MAX_NONCE,
    MINOR,
    REFUSED,
    Ack,
    Claim,
    Follow,
    Goodbye,
    Granted,
    Hello,
    Message,
    NotYet,
    Offered,
    Refused,
    Release,
    Renew,
    Unfollow,
    Unwelcome,
    decode_packet,
    encode_packet,
)
from asynckv.errors import AsyncKVError
from asynckv.testing.fabric import Port
from tests.lab.world import Process, World

NOWHERE = Address("sim://nowhere")
ROUTE = ReplyTo(b"hostile")
HELLOS, CLAIMS, EACH = 100, 60, 6
"""Of one flood: hellos, early claims and releases, and how many of those one sender has."""

PATIENCE_S = 5.0
"""A process that pauses in every call would pause for each of our packets as well, and never catch up."""


class Hostile:
    """One attack on one rank.

    Args:
        address: Where the rank listens.
        core: Its state, to see what changes.
    """

    def __init__(self, world: World, process: Process, address: str, core: RankCore, rng: random.Random) -> None:
        self.world, self.process, self.core, self.rng = world, process, core, rng
        self.address = Address(address)
        self._tricks: tuple[Callable[[], None], ...] = (self._replay, self._replay, self._forge, self._forge, self._lie)

    def begin(self, seconds: float) -> None:
        """Attack now and then for so long."""
        rng = self.rng
        for _ in range(rng.randint(5, 25)):
            self.process.call_at(self.world.now + rng.random() * seconds, self._act)
        self.process.call_at(self.world.now + rng.random() * seconds, self._flood)

    def _act(self) -> None:
        self.rng.choice(self._tricks)()

    @property
    def _control(self) -> Port | None:
        control = self.world.ports.get(self.address)
        is_away = self.process.now > self.world.now + PATIENCE_S
        return control if control is not None and control.name == self.process.name and not is_away else None

    def _heard(self, most: int) -> list[bytes]:
        """Some packets that were sent to this rank, or to anybody."""
        trace, mine = self.world.trace, f"-> {self.process.name}"
        begin = (
            self.rng.randrange(max(len(trace) - 200, 0) + 1) if self.rng.random() < 0.5 else max(len(trace) - 200, 0)
        )
        found = [(what, d) for _, _, what, d in trace[begin : begin + 200] if what[:2] == "->" and isinstance(d, bytes)]
        to_us = [d for what, d in found if what == mine] or [d for _, d in found]
        return self.rng.sample(to_us, min(most, len(to_us)))

    # -- to a listener ---------------------------------------------------------------------------------

    def _replay(self) -> None:
        """Send again what was heard: by a route of our own, or by another process's."""
        control = self._control
        if control is None:
            return
        for packet in self._heard(3):
            routes = sorted(self.world.asked[control.name])
            route = ReplyTo(self.rng.choice(routes)) if routes and self.rng.random() < 0.3 else ROUTE
            self.world.counts["hostile.replayed"] += 1
            control.hear(route, packet)

    def _forge(self) -> None:
        """Send messages that would be valid from another process."""
        for packet in self._heard(2):
            try:
                heard = decode_packet(packet)
            except AsyncKVError:
                continue
            for message in heard.messages:
                if isinstance(message, Claim | Renew | Release):
                    for source, forged in self._forgeries(message, heard.sender):
                        self._send(source, forged)
                elif isinstance(message, Follow):
                    self._unfollow(message, heard.sender)

    def _forgeries(self, message: Claim | Renew | Release, source: str) -> Iterator[tuple[str, Message]]:
        rng, change = self.rng, msgspec.structs.replace
        other = f"{rng.getrandbits(128):032x}"
        unknown = Key(message.key.epoch, message.key.memory_epoch, message.key.sequence, other)
        for guess in (unknown, change(unknown, sequence=0)):
            if guess in self.core.prefill.spent:
                # No lease has a guessed token.
                yield rng.choice((source, other)), change(message, key=guess)
        if (lease := self.core.prefill.leases.get(message.key)) is None:
            yield other, change(message, pull_id=f"{other[:16]}-1")
            return
        hold = lease.grants.get(message.pull_id)  # type: ignore[call-overload]
        if hold is not None:
            cohort = next((c for c in lease.cohorts if c == hold.reader.cohort), "")
            speaker = Cohort(cohort, lease.cohorts[cohort].sizes[0], hold.reader.tp_rank)
            request_id, pull_id = lease.lent.request_id, message.pull_id
            for forged in (
                Release(message.key, request_id, speaker, pull_id, rng.choice(list(Outcome))),
                Renew(message.key, pull_id, rng.getrandbits(48), 1e5),
                Claim(message.key, request_id, speaker, pull_id, rng.getrandbits(48), lease.digest, 1e5),
            ):
                if lease.grants.get(pull_id) is hold:  # type: ignore[call-overload]
                    yield other, forged
        if isinstance(message, Renew):
            return
        if message.pull_id not in lease.final:
            yield rng.choice((source, other)), change(message, request_id="P:somebody else's")
        if len(lease.cohorts) == lease.lent.readers:
            stranger = change(message.cohort, id=f"stranger {other[:4]}")
            yield rng.choice((source, other)), change(message, cohort=stranger, pull_id=f"{other[:16]}-2")
            bigger = change(message.cohort, tp_size=message.cohort.tp_size + 1)
            yield other, change(message, cohort=bigger, pull_id=f"{other[:16]}-3")
        if isinstance(message, Claim):
            yield other, change(message, digest=bytes(16), pull_id=f"{other[:16]}-4")

    def _send(self, source: str, message: Message) -> None:
        """Send what may change nothing, and see that it does not."""
        if (control := self._control) is None:
            return
        self.world.counts["hostile.forged"] += 1
        before = _leases(self.core)
        control.hear(ROUTE, encode_packet(source, self.core.identity.incarnation, [message]))
        now = self.process.epoch + self.process.now * self.process.rate
        for token, (owed, final, held) in _leases(self.core).items():
            was_owed, was_final, was_held = before[token]
            lapsed = {p for p, until in was_held.items() if p not in held and until <= now}
            if (owed, final) != (was_owed, was_final) or held != {p: u for p, u in was_held.items() if p not in lapsed}:
                self.world.violate(
                    f"a forged {type(message).__name__} changed a lease of {self.process.name}: {message}"
                )
        if missing := [
            t for t in before if t not in _leases(self.core) and any(u > now for u in before[t][2].values())
        ]:
            self.world.violate(f"a forged {type(message).__name__} ended lease {missing[0]} of {self.process.name}")

    def _unfollow(self, follow: Follow, source: str) -> None:
        """Say in a follower's name, by a route of our own, that it follows no more."""
        if (control := self._control) is not None:
            self.world.counts["hostile.forged"] += 1
            before = {*self.core.prefill.parking.by_key.get(follow.ticket, ())}
            packet = encode_packet(source, self.core.identity.incarnation, [Unfollow(follow.ticket, MAX_NONCE)])
            control.hear(ROUTE, packet)
            left = {*self.core.prefill.parking.by_key.get(follow.ticket, ())}
            if [place for place in before - left if place[2] != ROUTE]:
                self.world.violate(f"a forged Unfollow made {self.process.name} forget a follower")

    def _flood(self) -> None:
        """A hundred hellos, and claims for what may be lent one day."""
        rng, identity = self.rng, self.core.identity
        if (control := self._control) is None:
            return
        layout = identity.layout
        self.world.counts["hostile.flooded"] += 1
        for i in range(HELLOS // 50):
            hellos = [
                Hello(
                    rng.getrandbits(48),
                    rng.choice((MAJOR, MAJOR, MAJOR + 1)),
                    MINOR,
                    rng.choice((identity.engine_id, "somebody else")),
                    layout.tp_rank,
                    Cohort(f"stranger {i}"),
                )
                for _ in range(50)
            ]
            control.hear(ROUTE, encode_packet(f"{rng.getrandbits(128):032x}", identity.incarnation, hellos))
        parked = Inspector(self.core).gauges()["parked"]
        for _ in range(CLAIMS // EACH):
            stranger = f"{rng.getrandbits(128):032x}"
            early: list[Message] = []
            for i in range(EACH):
                token, pull_id = f"{rng.getrandbits(128):032x}", f"{stranger[:16]}-{i}"
                epoch = rng.choice([token[:8], *self.core.prefill.spent._runs])
                key, cohort = Key(epoch, 0, 10_000 + rng.randrange(1000), token), Cohort("stranger")
                early.append(Claim(key, "P", cohort, pull_id, rng.getrandbits(48), bytes(16), 1e5))
                early.append(Release(key, "P", cohort, pull_id, Outcome.COMPLETE))
            control.hear(ROUTE, encode_packet(stranger, identity.incarnation, early))
        taken, most = Inspector(self.core).gauges()["parked"] - parked, self.core.config.lease.max_parked
        if taken > max(most // 2, 1):
            self.world.violate(f"one connection takes {taken} of {most} places at {self.process.name} for early claims")

    # -- to a reader -----------------------------------------------------------------------------------

    def _lie(self) -> None:
        """Answer a reader in the name of a rank that it reads from, or follows."""
        core, rng = self.core, self.rng
        if core.decode.follows.by_id:
            self._mislead(rng.choice(list(core.decode.follows.by_id.values())))
        open_sources = [(p, source) for p in core.decode.pulls.values() for source in p.sources]
        if (control := self._control) is None or not open_sources:
            return
        pull, source = rng.choice(open_sources)
        key, pull_id, nonce = pull.params.key, pull.pull_id, rng.getrandbits(48) + 1
        other = f"{rng.getrandbits(128):032x}"
        known, (at, start) = next(iter(source.nonces), nonce), (source.address, source.rank.place[1])
        lies: list[tuple[Address, str, Message]] = [
            (at, start, Granted(key, pull_id, nonce, 1e5, 1e5)),
            (at, start, NotYet(key, pull_id, nonce)),
            (at, start, Refused(key, pull_id, nonce, rng.choice((Reason.EXPIRED, Reason.RESTARTED)))),
            (at, start, Unwelcome(nonce, Reason.RESTARTED, "")),
            (at, start, Granted(msgspec.structs.replace(key, token=other), pull_id, known, 1e5, 1e5)),
            (at, other, Granted(key, pull_id, known, 1e5, 1e5)),
            (at, other, Ack(key, pull_id)),
            (at, other, Goodbye()),
            (NOWHERE, start, Granted(key, pull_id, known, 1e5, 1e5)),
            (NOWHERE, start, Refused(key, pull_id, known, Reason.REVOKED)),
            (NOWHERE, start, Ack(key, pull_id)),
            (NOWHERE, start, Goodbye()),
        ]
        lies = rng.sample(lies, len(lies))
        for reason in sorted(set(Reason) - REFUSED):
            # Even the rank itself cannot say this: it is the reader's own to find out.
            own = Refused(key, pull_id, known, Reason.EXPIRED)
            msgspec.structs.force_setattr(own, "reason", reason)
            lies.append((at, start, own))
            self.world.counts[f"hostile.malformed.{self.process.name}"] += 1
        for address, sender, lie in lies:
            self.world.counts["hostile.lied"] += 1
            before = _beliefs(pull, source)
            control.hear(address, encode_packet(sender, core.identity.incarnation, [lie]))
            if _beliefs(pull, source) != before:
                self.world.violate(f"a forged {type(lie).__name__} changed what {self.process.name} believes: {lie}")

    def _mislead(self, following: Following) -> None:
        """Answer a follower in the name of the rank that it follows."""
        if (control := self._control) is None:
            return
        ticket, nonce, (at, start) = following.target.ticket, self.rng.getrandbits(48) + 1, following.rank.place
        known, other = next(iter(following.nonces), nonce), f"{self.rng.getrandbits(128):032x}"
        lies: list[tuple[Address, str, Message]] = [
            (at, start, Offered(ticket, nonce, reason=Reason.WITHDRAWN)),
            (at, start, Offered(ticket, nonce, reason=Reason.RESTARTED)),
            (at, start, Offered(other, known, reason=Reason.WITHDRAWN)),
            (at, other, Offered(ticket, known, reason=Reason.CONSUMED)),
            (NOWHERE, start, Offered(ticket, known, reason=Reason.WITHDRAWN)),
        ]
        for address, sender, lie in lies:
            self.world.counts["hostile.misled"] += 1
            before = following.is_open, following.reason  # any word shows that the rank lives, so that it can be asked
            control.hear(address, encode_packet(sender, self.core.identity.incarnation, [lie]))
            if (following.is_open, following.reason) != before:
                self.world.violate(f"a forged Offered changed what {self.process.name} follows")


def _leases(core: RankCore) -> dict[str, tuple[dict[str, frozenset[Any]], frozenset[str], dict[str, float]]]:
    """Return the owed readers, the final pulls and the promises of each lease, by token."""
    return {
        key.token: (
            {name: frozenset(x for x in lease.owing() if x.cohort == name) for name in lease.cohorts},
            frozenset(lease.final),
            {pull_id: hold.until for pull_id, hold in lease.grants.items()},
        )
        for key, lease in core.prefill.leases.items()
    }


def _beliefs(pull: Pull, source: Source) -> tuple[object, ...]:
    believed = (source.covered_until, source.confirmed_nonce, source.lent_by)
    return (pull.state, pull.failure, *believed, source.release, source.not_lent_yet)
