"""What a prefill engine's scheduler does: mint keys and make the params that travel to the decode side.

Pure, and independent of any worker: it needs to know where the ranks listen, nothing more.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from asynckv.config import LeaseConfig, check_lease
from asynckv.core.layout import as_block_ids, runs_of
from asynckv.core.types import NULL, BlockRuns, Endpoint, Key, Params
from asynckv.errors import ConfigError, LayoutError

__all__ = ["PrefillGroup"]


class PrefillGroup:
    """All ranks of one prefill engine, as the side that hands out requests knows them.

    Args:
        engine_id: The prefill engine.
        roster: Every rank's endpoint (`Engine.endpoint`, or what JSON made of it).
        lease: Defaults for lease and renewal times; use the ranks' own.
        memory_epoch: How often the ranks' memory was registered anew: the greatest `Engine.memory_epoch`, never less
            than before.
        tp_size: Ranks per pipeline stage; the roster's length if left out.
        pp_size: Pipeline stages.
        null_block: Id by which the engine's lists mark a place without a block (vLLM: 0). `None` in a
            list always means that.
        token_hex: Source of randomness, as `secrets.token_hex`; for simulations.

    Raises:
        ConfigError: Ranks are missing, doubled or malformed.
    """

    def __init__(
        self,
        engine_id: str,
        roster: Sequence[Endpoint | dict[str, Any]],
        *,
        lease: LeaseConfig | None = None,
        memory_epoch: int = 0,
        tp_size: int | None = None,
        pp_size: int = 1,
        null_block: int = NULL,
        token_hex: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        try:
            endpoints = [e if isinstance(e, Endpoint) else msgspec.convert(e, Endpoint) for e in roster]
        except (msgspec.ValidationError, UnicodeEncodeError) as exc:
            raise ConfigError(f"an endpoint of prefill engine {engine_id!r} is malformed: {exc}") from exc
        self.engine_id = engine_id
        self.roster = tuple(sorted(endpoints, key=lambda e: (e.pp_stage, e.tp_rank)))
        self.pp_size, self.null_block = pp_size, null_block
        self.tp_size = len(self.roster) // max(pp_size, 1) if tp_size is None else tp_size
        self.lease = lease or LeaseConfig()
        ranks = [(e.pp_stage, e.tp_rank) for e in self.roster]
        if ranks != [(s, r) for s in range(pp_size) for r in range(self.tp_size)] or not ranks:
            raise ConfigError(
                f"prefill engine {engine_id!r} of tp_size {self.tp_size} and pp_size {pp_size} needs one endpoint for "
                f"each of its ranks, but was given (pp_stage, tp_rank) {ranks}"
            )
        self.memory_epoch = memory_epoch
        # Random, not derived from anything: a restarted scheduler must never repeat a key.
        self._token_hex = token_hex
        self._epoch = token_hex(8)
        self._sequence = itertools.count()

    def make_params(
        self,
        request_id: str,
        groups: Sequence[tuple[int, Sequence[int | None]]],
        num_tokens: int,
        *,
        lease_s: float | None = None,
        written: bool = False,
        hashes: Sequence[str] = (),
        hash_tokens: int = 0,
    ) -> dict[str, Any]:
        """Describe one request to the decode side, as plain data that JSON can carry.

        Every call mints a new key: call it once per request, and hand the result to all prefill ranks and to the
        decode side. The ranks lend requests in any order (`Engine.lend`), and withdraw those that were aborted before
        (`Engine.withdraw`).

        Args:
            request_id: The prefill side's id; arbitrary text.
            groups: Per cache group `(first_token, block ids)`; the first block holds `first_token`. `None`
                stands for a block that is not there: outside a sliding window, a state that was not kept.
            num_tokens: Tokens whose KV is, or will be, in these blocks.
            lease_s: How long the request stays lent if nobody claims it.
            written: The KV is complete already. Leave it False when params travel ahead of the data:
                readers then make sure that they began after the request was lent.
            hashes: One per `hash_tokens` tokens, each covering all tokens before it as well. Readers that
                give theirs take only the tokens on which both agree.
            hash_tokens: Tokens per hash.

        Raises:
            ConfigError: A value is out of range; the message names it.
        """
        lease_s = self.lease.lease_s if lease_s is None else lease_s
        if hashes and hash_tokens < 1:
            raise ConfigError(f"{len(hashes)} hashes were given of {hash_tokens} tokens each; give hash_tokens as well")
        try:
            blocks = tuple(BlockRuns(f, runs_of(as_block_ids(ids, self.null_block))) for f, ids in groups)
        except LayoutError as exc:
            raise ConfigError(f"request {request_id[:80]!r} cannot be described: {exc}") from exc
        check_lease(lease_s, self.lease.max_lease_s)
        params = Params(
            engine_id=self.engine_id,
            request_id=request_id,
            key=Key(self._epoch, self.memory_epoch, next(self._sequence), self._token_hex(16)),
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            roster=self.roster,
            groups=blocks,
            num_tokens=num_tokens,
            lease_s=lease_s,
            renew_s=min(self.lease.grant_s, lease_s) / 3,
            written=written,
            hashes=tuple(hashes),
            hash_tokens=hash_tokens,
        )
        plain: dict[str, Any] = msgspec.to_builtins(params)
        try:
            msgspec.convert(plain, Params)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"request {request_id[:80]!r} cannot be described: {exc}") from exc
        return plain
