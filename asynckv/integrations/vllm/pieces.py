"""Pieces of prompts that this engine still computes, for decode engines that follow their tickets (a head start).

`build_connector_meta` shows the blocks of every request, and how many of its tokens are settled: of those the output of
their step has come, so that every worker has written them. A piece is ordered with the next step.

A prefix cache may name tokens that a step under way still writes. So a request has no piece before the first step in
which it runs has ended.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asynckv.errors import AsyncKVError
from asynckv.integrations.vllm.chain import chain_of, hash_tokens_of
from asynckv.integrations.vllm.compat import num_received
from asynckv.scheduler import PieceSizes

if TYPE_CHECKING:
    from asynckv.embed.ledgers import PrefillLedger
    from asynckv.integrations.vllm.shape import Shape

logger = logging.getLogger("vllm.asynckv")
TOO_LATE = (
    "no prompt has a head start (head_start_tokens): this vLLM's second model runner zeroes or copies blocks before it "
    "calls handle_preemptions, which takes pieces back"
)


@dataclass(slots=True)
class Chunks:
    """A request with a ticket that is computed chunk by chunk."""

    request: Any
    ticket: str
    every: int  # tokens per hash, the same for all pieces
    tokens: array[int] = field(default_factory=lambda: array("q"))  # those of its pieces
    blocks: Sequence[list[int]] = ()  # per group of vLLM, since it last began to run
    cached: int = 0  # tokens that were there when it began to run
    settled: int = 0  # tokens that may be lent
    sizes: PieceSizes = field(default_factory=PieceSizes)
    has_pieces: bool = False


class Pieces:
    """Makes the orders for pieces. With `is_late` workers may write freed blocks before they can take pieces back."""

    def __init__(self, shape: Shape, is_late: bool) -> None:
        self._groups = [(each, not (each.is_state or each.is_window or each.is_draft)) for each in shape.groups]
        sizes = [group.block_size for group, is_lent in self._groups if is_lent]
        self._unit = math.lcm(*sizes) if sizes else 0
        self._of: dict[str, Chunks] = {}
        self._runs: dict[str, Chunks] = {}  # those of the same that run
        self._is_late = is_late

    def add(self, request: Any, ticket: str) -> None:
        if self._is_late:
            self.stop()
        elif self._unit:
            self._of[request.request_id] = Chunks(request, ticket, hash_tokens_of(request.num_prompt_tokens))

    def end(self, request_id: str) -> tuple[int, bool]:
        """Forget a request; return the tokens per hash of its pieces, and True if there are any."""
        self._runs.pop(request_id, None)
        chunks = self._of.pop(request_id, None)
        return (0, False) if chunks is None else (chunks.every, chunks.has_pieces)

    def stop(self) -> None:
        """Make no pieces any more."""
        if self._unit:
            self._unit = 0
            logger.warning("asynckv: %s", TOO_LATE)

    def reset(self) -> None:
        """Have no reader put KV from before now, perhaps of other weights, together with KV from after it."""
        for chunks in self._of.values():
            chunks.every *= 2  # chains of different hashes agree on nothing

    def step(self, step: Any, loans: PrefillLedger) -> None:
        """Take back the pieces of preempted requests, note new blocks, and lend what has settled."""
        if not self._of:
            return
        for name in step.preempted_req_ids or ():
            if (chunks := self._of.get(name)) is not None:
                if chunks.has_pieces:
                    loans.end_pieces(chunks.ticket)
                chunks.has_pieces = False
                self._runs.pop(name, None)
        for new in step.scheduled_new_reqs:
            self._run(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = step.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            if name in cached.resumed_req_ids:
                self._run(name, cached.new_block_ids[i], cached.num_computed_tokens[i])
            elif name in self._runs and (ids := cached.new_block_ids[i]) is not None:
                for mine, more in zip(self._runs[name].blocks, ids, strict=True):
                    mine.extend(more)
        for name, chunks in list(self._runs.items()) if self._unit else ():
            try:
                self._lend(chunks, loans)
            except AsyncKVError as exc:
                logger.warning("asynckv: a request has no further piece: %s", exc)
                del self._runs[name]

    def _run(self, name: str, blocks: Sequence[Sequence[int]], num_cached: int) -> None:
        if (chunks := self._of.get(name)) is not None:
            self._runs[name] = chunks
            chunks.blocks, chunks.sizes = [list(ids) for ids in blocks], PieceSizes()
            chunks.cached, chunks.settled = num_cached, 0

    def _lend(self, chunks: Chunks, loans: PrefillLedger) -> None:
        request, settled, is_followed = chunks.request, num_received(chunks.request), chunks.ticket in loans.followed
        whole = settled - settled % math.lcm(self._unit, chunks.every)  # a piece ends with a hash
        if settled <= chunks.cached or whole == chunks.settled:
            return
        chunks.settled = whole
        if is_followed or chunks.has_pieces:  # a part in each step, because this takes long
            chunks.tokens.extend(request.all_token_ids[len(chunks.tokens) : whole])
        if (piece := chunks.sizes.take(whole, request.num_prompt_tokens, is_followed=is_followed)) is None:
            return
        begin, end, every, lists = piece.start, piece.stop, chunks.every, []
        for group, is_lent in self._groups:
            of_piece = slice(begin // group.block_size, end // group.block_size)
            lists.append((begin, chunks.blocks[group.index][of_piece]) if is_lent else (end, []))
        hashes = chain_of(request, end, every, chunks.tokens[:end])
        loans.lend_piece(request.request_id, chunks.ticket, lists, end, hashes=hashes, hash_tokens=every)
        chunks.has_pieces = True
