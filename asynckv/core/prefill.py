"""The prefill side of one rank: its leases, ended requests, and messages that came too early.

A reader's claim may come before its request is lent, while it is lent, or after. The first case that holds for the key
decides the answer:

- **lent**: the lease answers (`core/lease.py`);
- **ended**: refused with the way it ended, as long as that is remembered;
- **stale**: refused, because the memory was registered anew since the key was minted;
- **spent**: refused, because the key was lent or withdrawn once (`core/spent.py`);
- **closed**: refused, because the engine lends nothing new;
- **nowhere**: the request may still be lent. A claim is answered `NotYet` and *parked* (`core/parking.py`); a release
  is acknowledged and parked.

A killed reader renews no more. Once its last grant has run out, the reader is *gone* if its connections have ended, or
if a later start of its rank has shaken hands and the reader does not answer. To find out, this rank sends a `Ping`, and
the control plane reports pings that could not be sent (`unreachable`).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
from msgspec import Struct

from asynckv.config import EngineConfig, check_lease
from asynckv.core.copies import NO_SLOT, Copies
from asynckv.core.lease import AT_ONCE, PROBE_S, WHAT, Effects, Grant, Lease, LeaseState, Lent, Reader, Refusal
from asynckv.core.ledger import FEW
from asynckv.core.limits import remember, warn_after
from asynckv.core.news import lease_granted
from asynckv.core.offers import Offers
from asynckv.core.outbox import LeaseOver, Shared, Traced
from asynckv.core.parking import ParkedMessage, Parking
from asynckv.core.readers import Identity, Readers
from asynckv.core.spent import SpentKeys
from asynckv.core.types import SAME_SHARDS, Key, KVTransferParams, Outcome, PullId, Reason, ReplyTo, RequestId
from asynckv.core.wire import (
    Ack,
    Claim,
    Follow,
    Granted,
    NotYet,
    OfReader,
    Pack,
    Packed,
    Ping,
    Refused,
    Release,
    Renew,
    Unpack,
    blocks_digest,
)
from asynckv.errors import EngineClosed, LayoutError, LocalProtocolError
from asynckv.geometry.blocks import as_columns, check_blocks, check_covers, expanded
from asynckv.geometry.bounds import NULL, BlockRuns, Int64s
from asynckv.geometry.gather import Ranges, check_recipe
from asynckv.geometry.layout import Group
from asynckv.told import MAX_GRANTS, ReaderRefused, short

MAX_ENDED = 8192

NO_BLOCKS: Int64s = np.zeros(0, np.int64)

MAX_NAMED = 4

MAX_UNREACHABLE = 65_536

MAX_ENGINES = 1024

MAX_FORGOTTEN = 1024

_ENDED_AS = {
    LeaseState.RELEASED: Reason.CONSUMED,
    LeaseState.EXPIRED: Reason.EXPIRED,
    LeaseState.REVOKED: Reason.REVOKED,
}


class Ended(Struct, frozen=True, gc=False):
    """The end of a request; if it was read, also the number of decode engines and the names of the first."""

    reason: Reason
    readers: int = 0
    cohorts: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.reason is not Reason.CONSUMED:
            return ""
        more = " and others" if self.readers > MAX_NAMED else ""
        return f"released by {', '.join(map(repr, self.cohorts))}{more}; lent with num_readers={self.readers}"


class PrefillSide:
    def __init__(self, identity: Identity, config: EngineConfig, shared: Shared, readers: Readers) -> None:
        self.leases: dict[Key, Lease] = {}
        self.memory_epoch = identity.memory_epoch
        self.closed_as = ""
        """Why the engine takes nothing new, in a word; empty while it is open. A closed engine parks nothing."""
        self._ledger, self._outbox, self._timers, self._arrivals = shared
        self._layout, self._config, self._readers = identity.layout, config.lease, readers
        self._shards = identity.layout.num_token_shards
        self._here = identity.engine_id, identity.layout.tp_size, identity.layout.pp_size, self._shards
        self._held_fraction = config.log.held_fraction
        self._lease_s = self._warn_s = math.nan
        """The last request's lease, which was checked, and how long it may be held before it is reported."""
        self.max_ended = MAX_ENDED
        self.parking = Parking(config.lease)
        self.offers = Offers(self.parking, self._outbox, MAX_ENDED)
        self._claimed: dict[Key, tuple[float, float]] = {}
        """Times of the first and the last claim of each request that is not lent, because parked claims repeat."""
        self.lent_at, self.lease_s = -math.inf, config.lease.lease_s  # time of the last lend, and what it lends for
        self._unparked: deque[ParkedMessage] = deque()
        """Messages about requests that were lent meanwhile, beyond the first `AT_ONCE` of each."""
        self._ended: OrderedDict[Key, Ended] = OrderedDict()
        self._forgotten: OrderedDict[Key, Refusal] = OrderedDict()
        """Releases that were parked for too long. They explain why a request that is lent later expires."""
        self._unreachable: OrderedDict[ReplyTo, None] = OrderedDict()
        self._answered: OrderedDict[ReplyTo, float] = OrderedDict()
        self._read_at: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        """Time at which a request of each reader ended last, by its key (True) or its process start."""
        self.spent = SpentKeys()
        self.copies, self._ranges = Copies(identity.packing, self._outbox), Ranges(identity.layout)

    # -- calls -------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self.closed_as:
            raise EngineClosed(f"engine {self._here[0]!r} is {self.closed_as} and takes no new work")

    def lend(
        self, params: KVTransferParams, readers: int, now: float, ticket: str = "", *, is_piece: bool = False
    ) -> Lease:
        """Lend the request that the params describe, or a piece of it, and answer the messages that came before."""
        if self.closed_as:
            self.check_open()
        if params.lease_s != self._lease_s:
            check_lease(params.lease_s, self._config.max_lease_s)
            self._lease_s, self._warn_s = params.lease_s, warn_after(params.lease_s, self._held_fraction)
        if (params.engine_id, params.tp_size, params.pp_size, params.num_token_shards or 1) != self._here:
            raise self._not_ours(params)
        layout, key = self._layout, params.key
        lent = Lent(
            key=key,
            request_id=RequestId(params.request_id),
            groups=params.groups,
            num_tokens=params.num_tokens,
            recall=bool(params.recall),
            lease_s=params.lease_s,
            grant_s=min(self._config.grant_s, params.lease_s),
            max_lease_s=self._config.max_lease_s,
            readers=readers,
            tp_rank=layout.tp_rank,
            tp_size=layout.tp_size,
            num_token_shards=self._shards,
            warn_s=self._warn_s,
        )
        if key in self.leases or key in self._ended:
            raise self._spent_before(lent)
        if key.memory_epoch < self.memory_epoch:
            raise LocalProtocolError(
                f"the params of request {lent.request_id!r} are of memory epoch {key.memory_epoch}, but the memory "
                f"was registered anew (epoch {self.memory_epoch}); make new params for it, with a PrefillRanks of the "
                f"engine's current endpoint and memory_epoch"
            )
        if len(lent.groups) != len(layout.groups):
            raise LocalProtocolError(
                f"request {lent.request_id!r} names {len(lent.groups)} groups, but the layout has {len(layout.groups)}"
            )
        blocks = {}
        for index, (group, offer) in enumerate(zip(layout.groups, lent.groups, strict=True)):
            blocks[index] = _blocks_of(index, group, offer, lent)
        blocks = self._ledger.check("lent", blocks)
        if not is_piece:  # a piece is taken back at once, so its blocks need no holder
            self._ledger.hold(key.token, "lent", lent.request_id, blocks, now)
        if not self.spent.add(key):
            self._ledger.drop(key.token)
            raise self._spent_before(lent)
        # A rank that was restarted while others slept has memory that is as new as theirs.
        self.memory_epoch = key.memory_epoch
        lease, self.lent_at = Lease(lent, now, blocks_digest(params), next(self._arrivals)), now
        if is_piece:
            lease.scheduled_at = -math.inf  # it is never woken
            self.offers.lend_piece(ticket, lease, params)
        else:
            self.leases[key] = lease
            self._outbox.counters["leases.lent"] += 1
            if (forgotten := self._forgotten.pop(key, None)) is not None:
                lease.turned_down(forgotten)
            if self._outbox.trace:
                self._outbox.commands.append(Traced(lease, tuple(lease.history)))
            self._timers.wake(lease, min(lease.expires_at, lease.look_at, lease.warn_at))
            if ticket:
                self.offers.lend(ticket, lease, params)  # before early releases, which may end the lease at once
        if key in self.parking.by_key or key in self._claimed:
            self._unparked += self._take_parked(key)
            self._receive_parked(now)
        return lease

    def withdraw(self, params: KVTransferParams, now: float) -> tuple[str, ...] | None:
        """Make sure that a request is never lent, and revoke it if it is. Return the pulls that waited, or None if the
        request was lent or withdrawn before.
        """
        self.check_ours(params)
        key = params.key
        if (lease := self.leases.get(key)) is not None:
            self.revoke(lease, now, "withdraw")
            return None
        if key in self.offers.pieces:
            self.offers.end_piece(key)
            return None
        if key in self._ended or not self.spent.add(key):
            return None
        # `resume` refuses older epochs only, so this rank must not stay behind the withdrawn key.
        self.memory_epoch = max(self.memory_epoch, key.memory_epoch)
        remember(self._ended, key, Ended(Reason.WITHDRAWN), self.max_ended)
        self._outbox.counters["requests.withdrawn"] += 1
        waited = []
        for parked in self._take_parked(key):
            if isinstance(parked.message, Claim):  # parked releases were acknowledged before
                waited.append(parked.message.pull_id)
                self._refuse(parked.message, parked.reply_to, parked.sender, Reason.WITHDRAWN)
        return tuple(waited)

    def check_ours(self, params: KVTransferParams) -> None:
        if (params.engine_id, params.tp_size, params.pp_size, params.num_token_shards or 1) != self._here:
            raise self._not_ours(params)

    def check_recall(self, params: KVTransferParams) -> None:
        """Refuse params that are not those of the loan, because its reader goes by what was lent."""
        if (lease := self.leases.get(params.key)) is not None and lease.digest != blocks_digest(params):
            raise LocalProtocolError(
                f"request {params.request_id[:200]!r} was lent with other params (other blocks, or not with "
                f"recall=True); give those that it was lent with, or withdraw it and wait for its end"
            )

    def revoke(self, lease: Lease, now: float, by: str = "caller") -> None:
        if not lease.is_over:
            noted = len(lease.history)
            self._follow(lease, lease.revoke(now, by), noted)

    def reclaim(self, num_blocks: int, now: float) -> tuple[Lease, ...]:
        """Revoke requests until `num_blocks` are about to return, first the oldest of the engine that holds most.

        A request is kept for the length of one grant, and each reader engine that holds blocks keeps an equal share of
        all blocks. Therefore a single reader engine loses nothing, and neither does one that reads in time. Requests
        that no reader has claimed count as one more engine. All engines that have read lately and hold nothing also
        count as one, because without keys an engine is a name, and one reader can use many. Grants are kept, so blocks
        return later than this call.
        """
        held: defaultdict[str, list[tuple[Lease, int]]] = defaultdict(list)
        for key, lease in self.leases.items():
            holding = self._ledger.get(key.token)
            size = sum(map(len, holding.blocks.values())) if holding is not None else 0
            if lease.state is LeaseState.LENT:
                reader = next(iter(lease.keys.values() or lease.names), "")
                held[self._engine_of(reader, bool(lease.keys))].append((lease, size))
            else:
                num_blocks -= size
        sizes = Counter({engine: sum(size for _, size in leases) for engine, leases in held.items()})
        lately = [(name, proven) for name, (proven, at) in self._read_at.items() if now - at < self._config.lease_s]
        waits = any(self._engine_of(*each) not in held for each in lately)
        share, revoked = self._ledger.num_blocks / max(len(held) + waits, 1), []
        while num_blocks > 0 and sizes:
            engine, most = sizes.most_common(1)[0]
            if most <= share:
                break
            lease, size = held[engine].pop(0)
            if now - lease.lent_at < lease.lent.grant_s:
                del sizes[engine]  # all other requests of this engine are newer
                continue
            sizes[engine] -= size
            num_blocks -= size
            revoked.append(lease)
            self.revoke(lease, now, "no_room")
        return tuple(revoked)

    def claimed_at(self, now: float) -> list[float]:
        """Return the time of the first claim of each request that is not lent, and that readers still wait for."""
        return [first for first, last in self._claimed.values() if now - last <= self._config.parked_s]

    def shut(self, how: str) -> None:
        """Lend nothing any more, and refuse readers that wait for a request that was not lent."""
        self.closed_as = how
        self._claimed.clear()
        for parked in self.parking.take_all():
            if isinstance(parked.message, Claim):
                self._refuse(parked.message, parked.reply_to, parked.sender, Reason.ENGINE_CLOSED)
            elif isinstance(parked.message, Follow):
                self.offers.answer(parked, how)

    # -- messages and time -------------------------------------------------------------------------

    def receive(self, message: OfReader, reply_to: ReplyTo, sender: str, now: float, proven: str = "") -> None:
        """Take a reader's message from the process start `sender`, over the connection `reply_to`.

        `proven` is the key that this connection proved, and empty without keys.
        """
        if self._unreachable:
            self._unreachable.pop(reply_to, None)
        lease = self.leases.get(message.key) or self.offers.pieces.get(message.key)
        if lease is None:
            self._answer_for_nothing_lent(message, reply_to, sender, now, proven)
            return
        noted = len(lease.history)
        effects = lease.receive(message, sender, now, proven, reply_to)
        answer = effects.answer
        assert answer is not None
        if type(answer) is Refused:
            self._outbox.counters[f"refused.{answer.reason}"] += 1
            if answer.reason is Reason.FOREIGN_PULL:
                reader, what, detail = lease.name_of(message, sender), WHAT[type(message)], short(answer.detail)
                self._outbox.commands.append(ReaderRefused(reader, what, answer.reason, detail))
        self._outbox.send(reply_to, sender, answer)
        if self.offers.pieces and type(answer) is Granted and message.key in self.offers.pieces:
            self.offers.piece_granted(lease)
        wakes = effects.wake_at < lease.scheduled_at
        if effects.has_ended or wakes or lease.is_sampled or self._outbox.trace or lease.ended_copies:
            self._follow(lease, effects, noted)

    def pack(self, pack: Pack, reply_to: ReplyTo, sender: str, now: float, principal: str, proven: str) -> None:
        """Make a packed copy for the grant of a pull, or refuse to. `principal` is the key or host that asks."""
        lease, holding = self.leases.get(pack.key), self._ledger.get(pack.key.token)
        grant = lease.grant_of(PullId(pack.pull_id), sender, now, proven) if lease is not None else None
        try:
            if lease is not None and grant is not None and holding is not None and self.copies.slot_bytes:
                if self.copies.find(pack):
                    return
                group, lent = pack.recipe.group, lease.in_order
                if group not in lent:
                    lent[group] = np.sort(holding.blocks.get(group, NO_BLOCKS))
                gathered = check_recipe(pack.recipe, self._ranges, lent[group], self.copies.slot_bytes)
                if self.copies.ask(pack, gathered, sender, reply_to, principal):
                    grant.has_copies = True
                    lease.num_packed += 1
                    return
        except LayoutError as exc:
            assert grant is not None
            self._outbox.commands.append(ReaderRefused(grant.name, "pack", Reason.BLOCKS_DIFFER, short(str(exc))))
        self._outbox.counters["copies.refused"] += 1
        self._outbox.send(reply_to, sender, Packed(pack.key, pack.pull_id, pack.nonce, NO_SLOT))

    def unpack(self, unpack: Unpack, sender: str, now: float, proven: str) -> None:
        """Let go of a packed copy. A stranger's word would have it overwritten while its reader reads."""
        lease = self.leases.get(unpack.key)
        if lease is not None and lease.grant_of(PullId(unpack.pull_id), sender, now, proven) is not None:
            self.copies.unpack(unpack)

    def tick_lease(self, lease: Lease, now: float) -> bool:
        noted = len(lease.history)
        effects = lease.tick(now)
        is_overdue = effects.is_overdue
        gone = list[Reader]()
        for stray in effects.strays:
            if self._is_gone(lease, stray, now):
                gone.append(stray.reader)
                continue
            stray.probed_at = now
            for way in stray.ways:
                self._outbox.send(way, stray.sender, Ping(0))
        if gone:
            effects = lease.lose(gone, now)
        self._follow(lease, effects, noted)
        return is_overdue

    def unreachable(self, reply_to: ReplyTo) -> None:
        remember(self._unreachable, reply_to, None, MAX_UNREACHABLE)

    def tick(self, now: float) -> None:
        self._receive_parked(now)
        for parked in self.parking.tick(now):
            self._outbox.counters["parked.expired"] += 1
            if isinstance(parked.message, Release):
                self._forget(parked.message.key, parked.message, parked.sender, now)
        if self._unparked:
            self.parking.next_at = now

    # -- inside ------------------------------------------------------------------------------------

    def _not_ours(self, params: KVTransferParams) -> LocalProtocolError:
        engine_id, tp_size, pp_size, shards = self._here
        text = (
            f"the params are for engine {params.engine_id!r} of tp_size {params.tp_size} and pp_size "
            f"{params.pp_size}, but this is {engine_id!r} of {tp_size} and {pp_size}"
        )
        if (said := params.num_token_shards or 1) != shards:
            text += f", with num_token_shards {shards}, not {said}; {SAME_SHARDS}"
        return LocalProtocolError(text)

    def _follow(self, lease: Lease, effects: Effects, noted: int) -> None:
        outbox = self._outbox
        if effects.first_grant is not None and lease.is_sampled:
            if lease.attempts[lease.grants[effects.first_grant].reader] <= MAX_GRANTS:
                outbox.commands.append(lease_granted(lease, effects.first_grant))
        if outbox.trace and len(lease.history) > noted and lease.lent.key in self.leases:  # no piece
            outbox.commands.append(Traced(lease, tuple(lease.history[noted:])))
        if (lease.ended_copies or effects.has_ended) and lease.lent.key in self.copies.by_key:
            self.copies.settle(lease)
        lease.ended_copies = False
        if effects.has_ended:
            key = lease.lent.key
            if key in self.offers.pieces:
                self.offers.end_piece(key)
                return  # only a reader of another version releases a piece
            del self.leases[key]
            self._timers.forget(lease)
            self._ledger.drop(key.token)
            cohorts = tuple(lease.cohorts)[:MAX_NAMED]
            self._ended[key] = Ended(_ENDED_AS[lease.state], lease.lent.readers, cohorts)
            if key in self.offers.tickets:
                self.offers.lease_ended(key, _ENDED_AS[lease.state])
            if len(self._ended) > self.max_ended:
                self._ended.popitem(last=False)
            if cohorts:
                reader = next(iter(lease.keys.values() or lease.names), "")
                self._read_at[reader] = bool(lease.keys), lease.since
                self._read_at.move_to_end(reader)
                if len(self._read_at) > MAX_ENGINES:
                    self._read_at.popitem(last=False)
            outbox.counters[f"leases.{lease.state}"] += 1
            outbox.commands.append(LeaseOver(lease))
        elif effects.wake_at < lease.scheduled_at:
            self._timers.wake(lease, effects.wake_at)

    def answered(self, reply_to: ReplyTo, now: float) -> None:
        self._unreachable.pop(reply_to, None)
        remember(self._answered, reply_to, now, MAX_UNREACHABLE)

    def _is_gone(self, lease: Lease, stray: Grant, now: float) -> bool:
        """Return True if all connections of a grant have ended, or its rank has restarted and it does not answer."""
        if all(way in self._unreachable for way in stray.ways):
            return True
        is_silent = all(self._answered.get(way, -math.inf) < stray.probed_at for way in stray.ways)
        is_asked = now - stray.probed_at >= PROBE_S / 2  # a lease is woken for other reasons too, perhaps too early
        return is_asked and is_silent and self._readers.is_replaced(stray.sender, lease.keys.get(stray.reader, ""))

    def _engine_of(self, name: str, is_proven: bool) -> str:
        """Return the engine of the first reader: its proven key, or else the name that its process start chose."""
        return name if is_proven else self._readers.engine_of(name)

    def _spent_before(self, lent: Lent) -> LocalProtocolError:
        key, ended = lent.key, self._ended.get(lent.key)
        if key in self.leases:
            how = "was lent before, and still is"
        elif ended is not None:
            how = "was withdrawn" if ended.reason is Reason.WITHDRAWN else f"was lent before ({ended.reason})"
        elif self.spent.num_given_up:
            how = (
                f"was lent or withdrawn before, or was open for too long: later requests have passed over more "
                f"than {self.spent.max_gaps:,} gaps of requests that were never lent (withdraw aborted requests)"
            )
        else:
            how = "was lent or withdrawn before"
        return LocalProtocolError(
            f"request {lent.request_id!r} (sequence {key.sequence}) {how}; make new params for it"
        )

    def _answer_for_nothing_lent(
        self, message: OfReader, reply_to: ReplyTo, sender: str, now: float, proven: str
    ) -> None:
        key = message.key
        ended = self._ended.get(key)
        reason = ended.reason if ended is not None else None
        if reason is None and key.memory_epoch < self.memory_epoch:
            reason = Reason.STALE_MEMORY
        if reason is None and key in self.spent:
            reason = Reason.UNKNOWN
        if reason is None and self.closed_as:
            reason = Reason.ENGINE_CLOSED
        if reason is None and not isinstance(message, Renew):
            self._park(message, reply_to, sender, now, proven)
        elif isinstance(message, Release):
            # Nothing is owed any more, and an acknowledgement ends the repeats.
            self._outbox.counters["release.late"] += 1
            self._outbox.send(reply_to, sender, Ack(key, message.pull_id))
        else:
            self._refuse(message, reply_to, sender, reason or Reason.UNKNOWN, str(ended or ""))

    def _refuse(self, message: Claim | Renew, reply_to: ReplyTo, sender: str, reason: Reason, detail: str = "") -> None:
        self._outbox.counters[f"refused.{reason}"] += 1
        if reason is Reason.ENGINE_CLOSED:
            detail = f"the engine is {self.closed_as}"
        if reason is Reason.WITHDRAWN and self._readers.minor_versions.get((sender, reply_to), 0) < 2:
            reason, detail = Reason.UNKNOWN, "the request was withdrawn"  # an old reader does not know that reason
        self._outbox.send(reply_to, sender, Refused(message.key, message.pull_id, message.nonce, reason, detail))

    # -- early messages ----------------------------------------------------------------------------

    def _park(self, message: Claim | Release, reply_to: ReplyTo, sender: str, now: float, proven: str) -> None:
        is_kept = self.parking.park(message, reply_to, sender, now, proven)
        if not is_kept:
            self._outbox.counters["parked.refused"] += 1
        if isinstance(message, Claim):
            if is_kept:  # else its sender repeats it
                first = self._claimed.get(message.key, (now, now))[0]
                remember(self._claimed, message.key, (first, now), MAX_FORGOTTEN)
            self._outbox.send(reply_to, sender, NotYet(message.key, message.pull_id, message.nonce))
        elif is_kept:
            if message.outcome in (Outcome.COMPLETE, Outcome.CANCELLED):
                self._claimed.pop(message.key, None)  # it was not given up because it was not lent
            # The release is applied when the request is lent; if it is dropped before, the lease will expire.
            self._outbox.send(reply_to, sender, Ack(message.key, message.pull_id))

    def _take_parked(self, key: Key) -> list[ParkedMessage]:
        self._claimed.pop(key, None)
        return self.parking.take(key)

    def _receive_parked(self, now: float) -> None:
        """Take some of the messages that came before their request was lent; the others follow in the next turns."""
        for _ in range(min(len(self._unparked), AT_ONCE)):
            parked = self._unparked.popleft()
            if parked.until <= now or isinstance(parked.message, Follow):
                continue
            if (key := parked.message.key) in self.leases or key in self.offers.pieces:
                self.receive(parked.message, parked.reply_to, parked.sender, now, parked.proven)
        if self._unparked:
            self.parking.next_at = now

    def _forget(self, key: Key, release: Release, sender: str, now: float) -> None:
        """Give up a release that was acknowledged and never applied, but remember it for the log."""
        detail = f"it came before the request was lent, and was kept for parked_s {self._config.parked_s:g}"
        refusal = Refusal(now, "release", "parked_too_long", release.cohort.name(sender), detail)
        remember(self._forgotten, key, refusal, MAX_FORGOTTEN)


def _blocks_of(index: int, group: Group, offer: BlockRuns, lent: Lent) -> Int64s:
    """Return the blocks in one group's list, without its placeholders. Raise if they do not fit the group."""
    end = offer.first_token // group.block_size * group.block_size
    few: list[int] = []
    for first, count in offer.runs:
        end += count * group.block_size
        if first == NULL:
            continue
        if count > FEW or len(few) > FEW:
            break
        few += range(first, first + count)
    else:
        # Most requests name a few valid blocks, which can be checked without an array.
        if end >= lent.num_tokens and (
            not few or (max(few) < group.num_blocks and len(set(few)) == len(few) and group.null_block not in few)
        ):
            return np.array(few, np.int64)
    where = f"group {index} ({group.name!r})"
    firsts, counts = columns = as_columns(offer.runs)
    check_covers(where, group, offer, lent.num_tokens, columns)
    # Bound the sum before allocating that much.
    real = firsts != NULL
    firsts, counts = firsts[real], counts[real]
    if int(counts.sum()) > group.num_blocks:
        raise LocalProtocolError(f"request {lent.request_id!r} names more blocks than the group's {group.num_blocks}")
    blocks = expanded(firsts, counts)
    check_blocks(where, group, blocks)
    return blocks
