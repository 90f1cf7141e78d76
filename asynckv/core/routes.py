"""The remote ranks that a request concerns, and the reads from each, computed once per set of ranks.

A reader releases all ranks of a prefill group that overlap it (`answered_for`), and reads some of them. The usual rule
predicts which (`is_predicted`); the layouts of the ranks decide (`choose_sources`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asynckv.core.flow import FlowKey
from asynckv.core.limits import remember
from asynckv.core.peer import Peer
from asynckv.core.source import RemoteRank
from asynckv.core.types import Address, Endpoint, FollowParams, KVTransferParams, Place, Reason, rank_name
from asynckv.errors import LayoutError, PlanRefused
from asynckv.geometry.layout import Layout
from asynckv.geometry.match import NotCovered, assign, predicted, remote_ranks
from asynckv.geometry.staging import ReadCosts
from asynckv.geometry.tables import PeerTables

MAX_ENDPOINTS = 65_536

MAX_SOURCES = 128  # most remote ranks of one pull: each costs a link and a handshake, and strangers can make params
MAX_CHOICES = 4096

Chosen = tuple[PeerTables | None, ...]


class ReadyRoute(NamedTuple):
    """The ranks of a route, all of them ready, and the tables to read from each (None: it is only released).

    It is valid while `Peers.num_changes` is unchanged.
    """

    num_changes: int
    peers: list[Peer]
    tables: list[PeerTables | None]


def refusal(request_id: str, text: str) -> PlanRefused:
    return PlanRefused(text, request_id=request_id, reason=Reason.UNPLANNABLE)


@dataclass(slots=True, eq=False)
class Route:
    """The ranks of a prefill group that this reader answers for, by stage and rank. `ready` saves work for later
    requests, by wanted groups.
    """

    ranks: tuple[RemoteRank, ...]
    flow: FlowKey
    index: dict[Place, int]  # place of a rank -> its number among `ranks`, and among the sources of every pull
    ready: dict[tuple[int, ...], ReadyRoute] = field(default_factory=dict)


class Routes:
    """Knowledge about prefill groups, and about the ranks that were met."""

    def __init__(self, layout: Layout, on_tables: Callable[[Peer, PeerTables], None], costs: ReadCosts | None) -> None:
        self._layout, self._on_tables, self._costs = layout, on_tables, costs
        # All peers share one source of ids, because two of them may be one process under two addresses.
        self._table_ids = itertools.count(1)
        self._groups: dict[tuple[str, tuple[Endpoint, ...], int, int, int], Route] = {}
        self._num_endpoints = 0
        self._chosen: dict[tuple[FlowKey, tuple[int, ...]], Chosen | str] = {}
        """Ranks that were met together, and wanted groups -> tables to read from each, or why these are not enough."""

    def answered_for(self, request_id: str, params: KVTransferParams | FollowParams) -> Route:
        """Return the remote ranks that this one answers for, or raise `PlanRefused` if params list no whole group."""
        shards = params.num_token_shards or 1
        group = (params.engine_id, tuple(params.endpoints), params.tp_size, params.pp_size, shards)
        found = self._groups.get(group)
        if found is None:
            found = self._answered_for(request_id, params, shards)
            self._num_endpoints += len(params.endpoints)
            if self._num_endpoints > MAX_ENDPOINTS:
                self._groups.clear()
                self._num_endpoints = len(params.endpoints)
            self._groups[group] = found
        return found

    def _answered_for(self, request_id: str, params: KVTransferParams | FollowParams, shards: int) -> Route:
        named = (params.request_id if isinstance(params, KVTransferParams) else request_id)[:80]
        listed = {(e.pp_stage, e.tp_rank) for e in params.endpoints}
        whole = len(listed) == len(params.endpoints) == params.tp_size * params.pp_size
        if not (whole and all(s < params.pp_size and r < params.tp_size for s, r in listed)):
            raise refusal(
                request_id,
                f"the params of request {named!r} list prefill ranks (pp_stage, tp_rank) "
                f"{list(listed)[:16]}; every one of tp_size {params.tp_size} x pp_size {params.pp_size} must be "
                f"listed once",
            )
        if len({(e.address, e.incarnation) for e in params.endpoints}) < len(params.endpoints):
            raise refusal(
                request_id,
                f"the params of request {named!r} name one process for several of their "
                f"{len(params.endpoints)} ranks; give the endpoint of each rank",
            )
        ranks = remote_ranks(self._layout.tp_rank, self._layout.tp_size, params.tp_size, shards)
        if len(ranks) * params.pp_size > MAX_SOURCES:
            raise refusal(
                request_id,
                f"request {named!r} would be read from up to {len(ranks)} x {params.pp_size} prefill "
                f"ranks, more than {MAX_SOURCES}",
            )
        first = predicted(self._layout, ranks, params.tp_size, shards)
        mine = tuple(
            RemoteRank(
                e.tp_rank,
                e.pp_stage,
                (Address(e.address), e.incarnation),
                rank_name(params.engine_id, e.tp_rank, e.pp_stage, e.incarnation),
                e.tp_rank in first,
                shards,
            )
            for e in sorted(params.endpoints, key=lambda e: (e.pp_stage, e.tp_rank))
            if e.tp_rank in ranks
        )
        places = tuple([rank.place for rank in mine])
        return Route(mine, places, {place: i for i, place in enumerate(places)})

    def choose_sources(self, peers: Sequence[Peer], groups: tuple[int, ...]) -> Chosen | str:
        places = tuple([peer.place for peer in peers])
        if (known := self._chosen.get((places, groups))) is not None:
            return known
        try:
            chosen: Chosen | str = tuple(self._tables(peers, groups))
        except (NotCovered, LayoutError) as exc:
            chosen = str(exc)
        remember(self._chosen, (places, groups), chosen, MAX_CHOICES)
        return chosen

    def _tables(self, peers: Sequence[Peer], groups: tuple[int, ...]) -> list[PeerTables | None]:
        layouts = [peer.layout for peer in peers]
        found: list[PeerTables | None] = []
        for peer, shares in zip(peers, assign(self._layout, [x for x in layouts if x], groups), strict=True):
            assert peer.layout is not None
            key = tuple((s.local_view.layer, s.local_part.name, s.lo, s.hi) for s in shares)
            if shares and key not in peer.tables:
                tables = peer.tables[key] = PeerTables(
                    self._layout, peer.layout, shares, self._table_ids, self._costs, self._pack_bytes(peer)
                )
                self._on_tables(peer, tables)
            found.append(peer.tables[key] if shares else None)
        return found

    def _pack_bytes(self, peer: Peer) -> int:
        """Return the length of a peer's packed copies; 0 if it makes none, or says that they are too short to pay."""
        if self._costs is None or peer.packing is None or peer.packing.slot_bytes < self._costs.least_packed:
            return 0
        return peer.packing.slot_bytes

    def forget(self, place: Place) -> None:
        for known in [known for known in self._chosen if place in known[0]]:
            del self._chosen[known]
        for route in self._groups.values():
            if route.ready and place in route.flow:
                route.ready.clear()
