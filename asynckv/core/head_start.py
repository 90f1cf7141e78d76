"""Pieces of a request that its prefill engine still computes, as a decode rank reads them.

A rank reads one piece at a time into the blocks of the request. What a piece has brought counts once it is proven. It
has no outcome of its own: the pull of the request begins where the pieces end, and decides alone. What they did not
bring, or brought of another prompt, that pull reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asynckv.core.following import Following
from asynckv.core.types import Key, KVTransferParams
from asynckv.errors import LocalProtocolError
from asynckv.geometry.blocks import BlockList
from asynckv.geometry.layout import Group, Layout
from asynckv.geometry.pairing import BlockLists, common_prefix


@dataclass(slots=True, eq=False)
class HeadStart:
    """The pieces of one request on one rank. All of them bring the same groups; the request's pull reads the others."""

    layout: Layout
    holder: str  # name under which the ledger holds its blocks until its pull holds them, or nothing writes them
    blocks: tuple[BlockList, ...]  # of the whole request, per group
    hashes: Sequence[str] | None
    following: Following | None = None  # what offers the pieces, and the whole; None if that had ended before
    have: int = 0  # tokens from the prompt's start that are proven, or were there before
    groups: frozenset[int] = frozenset()  # those that pieces bring
    newest: KVTransferParams | None = None  # the newest piece that was read
    tried: Key | None = None
    waiting: KVTransferParams | None = None  # the piece to read next
    num_pieces: int = 0
    num_bytes: int = 0

    def __post_init__(self) -> None:
        pairs = zip(self.layout.groups, self.blocks, strict=True)
        self.have = min((first for group, (first, ids) in pairs if len(ids) and _is_brought(group)), default=0)

    def lists(self, piece: KVTransferParams) -> BlockLists | None:
        """Return the blocks that a piece fills; None if it leaves a gap, adds nothing, or is of another prompt."""
        end, brings = piece.num_tokens, self._brings(piece)
        is_piece = len(piece.groups) == len(self.blocks) and piece.recall is True and piece.written
        if not is_piece or not brings or end <= self.have or (self.groups and self.groups != brings):
            return None
        if self.hashes is not None and common_prefix(self.hashes, piece.hashes, piece.hash_tokens, end) < end:
            return None
        if self.newest is not None and _agreed(self.newest, piece) < self.newest.num_tokens:
            return None
        local = list[BlockList]()
        for group, (first, ids) in enumerate(self.blocks):
            start, size = max(first, self.have), self.layout.groups[group].block_size
            if group not in brings or not len(ids) or start >= end:
                local.append((end, ids[:0]))
            elif piece.groups[group].first_token > start or first // size + len(ids) < -(-end // size):
                return None
            else:
                local.append((start, ids[start // size - first // size : -(-end // size) - first // size]))
        lists = BlockLists(local, piece.groups, end)
        return None if lists.is_empty else lists

    def took(self, piece: KVTransferParams, num_bytes: int) -> None:
        """Count a piece that is proven."""
        self.have, self.newest, self.groups = piece.num_tokens, piece, self._brings(piece)
        self.num_pieces, self.num_bytes = self.num_pieces + 1, self.num_bytes + num_bytes

    def _brings(self, piece: KVTransferParams) -> frozenset[int]:
        """Return the groups that a piece brings. States and windows are valid only at the last token."""
        pairs = zip(self.layout.groups, piece.groups, strict=False)
        return frozenset(i for i, (own, lent) in enumerate(pairs) if lent.runs and _is_brought(own))

    @property
    def asked(self) -> Following | None:
        """Return the following that may offer more pieces, if it is still open."""
        return self.following if self.following is not None and self.following.is_open else None

    def is_of(self, params: KVTransferParams) -> bool:
        """Return True if these may be the params of the request that is followed, as far as this rank knows."""
        follows = self.following
        return follows is None or follows.params is None or follows.params.key == params.key

    def rest(self, blocks: tuple[BlockList, ...], num_tokens: int, params: KVTransferParams) -> tuple[BlockList, ...]:
        """Return what the request's pull has to fill of these blocks, from a whole block of each group on.

        Raises:
            LocalProtocolError: They are not the blocks that pieces have filled.
        """
        if self.newest is None:
            return blocks
        # Some is always read of the loan, because its grant shows that it stands.
        have = min(self.have, max(num_tokens - 1, 0), _agreed(self.newest, params))
        left = list(blocks)
        for group in self.groups:
            (first, ids), (filled_from, filled) = blocks[group], self.blocks[group]
            size = self.layout.groups[group].block_size
            places = max(-(-have // size) - first // size, 0)
            if first != filled_from or not np.array_equal(ids[:places], filled[:places]):
                raise LocalProtocolError(f"group {group} names other blocks than those that the request's pieces fill")
            start = have - have % size
            if start > first:
                left[group] = start, ids[start // size - first // size :]
        return tuple(left)


def _is_brought(group: Group) -> bool:
    return group.kind != "state" and not group.window


def _agreed(piece: KVTransferParams, params: KVTransferParams) -> int:
    """Return the number of a piece's tokens on which its hashes agree with a later piece's, or with the request's."""
    every = piece.hash_tokens
    # Another engine, or another start of its ranks, may have other weights.
    if every != params.hash_tokens or (piece.engine_id, piece.endpoints) != (params.engine_id, params.endpoints):
        return 0
    whole = piece.num_tokens // every if every else 0
    is_whole = whole * every == piece.num_tokens * bool(every) and whole <= len(piece.hashes)
    if is_whole and piece.hashes[:whole] == params.hashes[:whole]:
        return piece.num_tokens
    return common_prefix(piece.hashes, params.hashes, every, piece.num_tokens)
