"""Answers to questions about a rank, one slice per turn, so that 50,000 leases make no turn of the loop longer.

Questions wait in a bounded queue, and `tick` continues the first by one slice. First everything is counted, and the
counts serve all questions of the next moment. Then the wanted requests are listed, oldest first. Leases, pulls and
followings are kept in the order in which they began, and numbered together. The cursor of a page is the number of its
last request, so no request is left out or listed twice while others come and go.

Questions are rate-limited per key or host, and for all together. The sending side bounds unread answers.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from dataclasses import replace
from itertools import islice
from operator import attrgetter

from msgspec import Struct

from asynckv.account.inspect import HeldBlocks, Inspector, RequestStatus, Tally, is_hidden
from asynckv.account.values import Account, Facts, PeerStatus, PhaseCount, encode_account
from asynckv.core.flow import READING
from asynckv.core.following import Following
from asynckv.core.lease import Lease, LeaseState
from asynckv.core.limits import Limiter
from asynckv.core.peer import Peer, PeerState
from asynckv.core.pull import Kind, Pull
from asynckv.core.rank import RankCore
from asynckv.core.types import members
from asynckv.core.wire import Status, StatusRequest

RATE, BURST = 8.0, 16  # questions per second of one key or host, and at once after a silence
TOTAL_RATE, TOTAL_BURST, TOLD_PER_TOKEN = 16.0, 400, 64
"""The same limits for all together. A question costs one token, and one more per `TOLD_PER_TOKEN` listed requests."""

MAX_WAITING = 64

LOOKED_PER_TOKEN = 8192  # requests that are looked at for one token, because a search for one name looks at all of them
FRESH_S = 0.2  # seconds for which counts serve other questions
FRESH_S_EACH = 50e-6
"""The same per counted request. Counting one takes a hundredth of that."""

SLICE_LEASES, SLICE_PULLS, SLICE_TOLD = 2048, 512, 16
"""Items that one turn of the loop looks at, half a millisecond for each kind."""

SLICE_FOUND = 2048

MAX_TEXT = 128 * 1024
"""Characters in one account's requests. Longer ids make shorter pages."""

MAX_PEERS = 256

MAX_OCCUPANTS = 64

MAX_IDS, MAX_IDS_OF_ONE = 32, 4096
"""Block ids of each group of one request, in a list of requests and in an answer about one request."""

L = members(LeaseState)
IDLE = PeerState.NEW, PeerState.READY

MAX_HISTORY, MAX_EVENT = 128, 400  # last events, and characters of each, in an answer about one request
Answer = Callable[[Status], None]
_number = attrgetter("number")


class _Counts(Struct):
    at: float
    fresh_until: float
    phases: dict[tuple[str, str], list[float]]  # kind and phase -> number of requests, and the begin of the oldest
    tally: Tally
    peers: dict[str, int]
    busy: list[Peer]
    idle: list[Peer]

    def add(self, kind: str, phase: str, begun_at: float) -> None:
        known = self.phases.get((kind, phase))
        if known is None:
            self.phases[kind, phase] = [1, begun_at]
        else:
            known[0] += 1
            known[1] = min(known[1], begun_at)


class Survey:
    """Answers of one rank. `facts` returns what only the engine around it knows."""

    def __init__(self, core: RankCore, inspect: Inspector, facts: Callable[[], Facts] = Facts) -> None:
        self.next_at = math.inf
        self.inspect, self.facts = inspect, facts
        self._identity, self._config, self._ledger = core.identity, core.config, core.ledger
        self._prefill, self._decode, self._readers = core.prefill, core.decode, core.readers
        self._limits, self._total = Limiter(RATE, BURST), Limiter(TOTAL_RATE, TOTAL_BURST)
        self._refusals = Limiter(RATE, BURST)
        self._waiting: deque[tuple[Hashable, StatusRequest, Answer]] = deque()
        self._working: Generator[None, float, Status] | None = None
        self._counts: _Counts | None = None

    def hear(self, asker: Hashable, asked: StatusRequest, answer: Answer, now: float, principal: str) -> bool:
        """Take a packet's question. One for gauges alone is answered now, because the core limits those."""
        if asked.most or not self._config.inspect.enabled:
            return self.ask(asker, asked, answer, now, principal)
        answer(self._status(asked.nonce, self.inspect.gauges()))
        return True

    def ask(self, asker: Hashable, asked: StatusRequest, answer: Answer, now: float, principal: str = "") -> bool:
        """Take a question. A refusal is answered now, and any other question in one of the next turns.

        Return False if the question gets no answer at all, because the asker was refused too often, and a refusal costs
        more than most questions.
        """
        if not self._config.inspect.enabled:
            refusal = Account(refused="inspection is turned off here (InspectConfig.enabled)")
        elif asked.after and not asked.after.isdecimal():
            refusal = Account(refused="the cursor (after) is not a number; begin with the first page")
        elif not self._limits.take(principal or asker, now):
            refusal = Account(refused=f"asked more than {RATE:g} times a second", retry_s=2 / RATE)
        elif any(each[:2] == (asker, asked) for each in self._waiting):
            return True  # a repeat of a question that waits
        elif len(self._waiting) >= MAX_WAITING or not self._total.take(None, now):
            refusal = Account(refused=f"all askers want more than {TOTAL_RATE:g} answers a second", retry_s=0.5)
        else:
            looked = len(self._prefill.leases) + len(self._decode.pulls) if asked.request_id else 0
            self._total.charge(None, now, asked.most / TOLD_PER_TOKEN + looked / LOOKED_PER_TOKEN)
            self._waiting.append((asker, asked, answer))
            self.next_at = now
            return True
        if not self._refusals.take(principal or asker, now):
            return False
        answer(self._status(asked.nonce, {}, encode_account(refusal)))
        return True

    def tick(self, now: float) -> None:
        if now < self.next_at:
            return
        if self._working is None and self._waiting:
            self._working = self._work(self._waiting[0][1])
            next(self._working)
        if self._working is not None:
            try:
                self._working.send(now)
            except StopIteration as done:
                self._working = None
                self._waiting.popleft()[2](done.value)
            except BaseException:
                # After a bug of ours this asker gets no answer, but all others do.
                self._working = None
                self._waiting.popleft()
                self.next_at = now
                raise
        self.next_at = now if self._waiting else math.inf

    # -- inside ------------------------------------------------------------------------------------

    def _status(self, nonce: int, gauges: dict[str, int], account: bytes = b"") -> Status:
        layout = self._identity.layout
        return Status(nonce, self._identity.engine_id, layout.tp_rank, layout.tp_size, gauges, account)

    def _work(self, asked: StatusRequest) -> Generator[None, float, Status]:
        """Answer one question. Every `yield` ends a slice, and receives the time at which the next slice begins."""
        now = yield
        if self._counts is None or now > self._counts.fresh_until:
            now = yield from self._count(now)
        counts = self._counts
        assert counts is not None
        requests: list[RequestStatus] = []
        holds: list[HeldBlocks] = []
        after = yield from self._tell(asked, requests, holds, now)
        if not (asked.after or asked.request_id):
            holds += self.inspect.occupants(MAX_OCCUPANTS, MAX_IDS, now)
        facts = self.facts()
        identity, layout = self._identity, self._identity.layout
        phases = [
            PhaseCount(kind=kind, phase=phase, number=int(number), oldest_s=counts.at - begun_at)
            for (kind, phase), (number, begun_at) in sorted(counts.phases.items())
            if number
        ]
        account = Account(
            engine_id=identity.engine_id,
            rank=identity.name,
            incarnation=identity.incarnation,
            tp_rank=layout.tp_rank,
            tp_size=layout.tp_size,
            pp_stage=layout.pp_stage,
            pp_size=layout.pp_size,
            token_shards=layout.token_shards or (),
            memory_epoch=self._prefill.memory_epoch,
            closed_as=self._prefill.closed_as,
            facts=facts,
            counts=tuple(phases),
            counted_s=now - counts.at,
            requests=tuple(requests),
            holds=tuple(holds),
            after=after,
            num_peers=counts.peers,
            peers=tuple(_peer_status(peer, counts.at) for peer in (counts.busy + counts.idle)[:MAX_PEERS]),
            num_readers=len(self._readers.minor_versions),
            budgets=self._budgets(),
            waits_for_step=self.inspect.waits_for_step(now),
            step_s=self.inspect.step_s(now),
        )
        return self._status(asked.nonce, self.inspect.gauges(counts.tally), encode_account(account))

    def _count(self, now: float) -> Generator[None, float, float]:
        counts = _Counts(now, now, {}, Tally(), {}, [], [])
        leases = list(self._prefill.leases.values())
        for start in range(0, len(leases), SLICE_LEASES):
            _count_leases(leases[start : start + SLICE_LEASES], counts.phases, now)
            now = yield
        pulls = list(self._decode.pulls.values())
        for start in range(0, len(pulls), SLICE_PULLS):
            for pull in pulls[start : start + SLICE_PULLS]:
                if not pull.is_over:
                    counts.tally.add(pull, self._ledger)
                if not (pull.is_over or is_hidden(pull)):
                    phase = "retired" if pull.is_retired and not pull.is_returned else pull.state.value
                    counts.add("announced" if pull.kind is Kind.ANNOUNCEMENT else "pull", phase, pull.called_at)
            now = yield
        peers = list(self._decode.peers.by_place.values())
        for start in range(0, len(peers), SLICE_LEASES):
            for peer in peers[start : start + SLICE_LEASES]:
                counts.peers[peer.state.value] = counts.peers.get(peer.state.value, 0) + 1
                is_busy = peer.pulls or peer.follows or peer.transfers or peer.state not in IDLE
                some = counts.busy if is_busy else counts.idle
                if len(some) < MAX_PEERS:
                    some.append(peer)
            now = yield
        for occupant in self._ledger.occupants.values():
            counts.add(occupant.what, occupant.held_as[0], occupant.begun_at)
        for following in self._decode.follows.by_id.values():
            counts.add("follow", following.state.value, following.since)
        for request in self._decode.between.values():
            kind = "retrying" if request.attempts else "early"
            counts.add(kind, kind, request.begun_at)
        counts.fresh_until = now + max(FRESH_S, FRESH_S_EACH * (len(leases) + len(pulls)))
        self._counts = counts
        return now

    def _tell(
        self, asked: StatusRequest, requests: list[RequestStatus], holds: list[HeldBlocks], now: float
    ) -> Generator[None, float, str]:
        after = int(asked.after or -1)
        every = self._prefill.leases.values(), self._decode.pulls.values(), self._decode.follows.by_id.values()
        letters = work = looked = 0
        told: Lease | Pull | Following | None = None
        lists = [list[Lease | Pull | Following](some) for some in every]
        rest = [islice(some, bisect_right(some, after, key=_number), None) for some in lists]
        for request in heapq.merge(*rest, key=_number):
            looked += 1
            if work >= SLICE_TOLD or looked >= SLICE_FOUND:
                work = looked = 0
                yield  # keep `now`, because with ages from several moments the oldest may not seem the oldest
            if request.is_over or is_hidden(request) or (asked.request_id and not _is_named(request, asked.request_id)):
                continue
            if told is not None and (len(requests) >= asked.most or letters >= MAX_TEXT):
                return str(told.number)
            told = request
            status = self.inspect.status(request, now)
            if asked.request_id:
                began = request.history[0][0]
                told_of = tuple((at - began, str(what)[:MAX_EVENT]) for at, what in request.history[-MAX_HISTORY:])
                status = replace(status, history=told_of)
            work += 1 + len(status.ranks)
            requests.append(status)
            letters += _letters(status)
            held = self.inspect.hold(request, MAX_IDS_OF_ONE if asked.request_id else MAX_IDS, now)
            if held is not None:
                holds.append(held)
                letters += len(held.request_id) + sum(map(len, held.waits_for))
        return ""

    def _budgets(self) -> dict[str, tuple[int, int]]:
        decode, pull = self._decode, self._config.pull
        held = self._ledger.num_held("lent") + self._ledger.num_held("writing")
        return {
            "pulls_reading": (decode.admission.num[READING], pull.total_requests),
            "pulls_queued": (max(decode.num_waiting, 0), pull.max_queued),
            "bytes_in_flight": (decode.posting.in_flight.num_bytes, pull.total_bytes),
            "descriptors_in_flight": (decode.posting.in_flight.num_descriptors, pull.total_descriptors),
            "parked": (self._prefill.parking.num_parked, self._config.lease.max_parked),
            "blocks_held": (held, self._ledger.num_blocks),
        }


def _letters(status: RequestStatus) -> int:
    said = sum(len(x.rank) + len(x.address) + 80 for x in status.ranks)
    said += sum(len(sender) + len(detail) for _, _, _, sender, detail in status.refused)
    return said + len(status.request_id) + 2 * len(status.prefill_request_id) + len(status.waits)


def _count_leases(leases: Iterable[Lease], phases: dict[tuple[str, str], list[float]], now: float) -> None:
    """Count leases by phase, in order of their begin. For speed, one loop does this without any call."""
    ending, granted, lapsed, unclaimed = (
        phases.setdefault(("lease", phase), [0, math.inf]) for phase in ("ending", "granted", "lapsed", "unclaimed")
    )
    lent = L.LENT
    for lease in leases:
        if lease.state is not lent:
            if lease.state is not L.ENDING:
                continue
            phase = ending
        elif grants := lease.grants:
            phase = lapsed
            for grant in grants.values():
                if grant.until > now:
                    phase = granted
                    break
        else:
            phase = lapsed if lease.cohorts else unclaimed
        if not phase[0]:
            phase[1] = lease.lent_at
        phase[0] += 1


def _is_named(request: Lease | Pull | Following, name: str) -> bool:
    if isinstance(request, Lease):
        return request.lent.request_id == name
    return request.request_id == name or (isinstance(request, Pull) and request.params.request_id == name)


def _peer_status(peer: Peer, now: float) -> PeerStatus:
    return PeerStatus(
        rank=peer.name,
        address=peer.address,
        state=peer.state.value,
        heard_s=max(now - peer.heard_at, 0.0) if peer.heard_at > -math.inf else None,
        pulls=len(peer.pulls),
        follows=len(peer.follows),
        transfers=len(peer.transfers),
        bytes_in_flight=peer.line.in_flight.num_bytes,
        is_draining=peer.is_draining,
        is_orderly=peer.is_orderly,
        failures=peer.failures,
        cause=peer.detail[:1000],
    )
