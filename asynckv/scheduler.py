"""The scheduler's part of a prefill engine: mint keys, and make the params that travel to the decode side.

A scheduler describes a prompt's blocks once (`make_params`). It gives the same params to all ranks of its engine, which
lend the blocks, and through a router to the decode engine, which pulls them. Params describe the blocks of all ranks,
and carry a key that is minted only once. No worker, socket, clock or event loop is needed.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from asynckv.arguments import MAX_INTEGER, MAX_NAME, flag, integer, seconds, shown, text, texts
from asynckv.config import LeaseConfig, check_lease
from asynckv.core.types import MAX_HASH, MAX_HASHES, MAX_ID, MAX_TRACESTATE, Endpoint, Key, KVTransferParams, sendable
from asynckv.errors import ConfigError, LayoutError
from asynckv.geometry.blocks import BlockIds, runs_of
from asynckv.geometry.bounds import MAX_BLOCK_ID, MAX_GROUPS, MAX_RANKS, MAX_RUNS, MAX_TOKENS, NULL

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class PrefillRanks:
    """All ranks of one prefill engine, for its scheduler. It may be used from any thread.

    Make one per scheduler, not one per request, because the ranks remember a bounded number of schedulers and the lent
    requests of each. A copy (pickled, forked) is another scheduler to them.

    Args:
        engine_id: The prefill engine.
        endpoints: Every rank's endpoint (`Engine.endpoint`, or its form in JSON).
        lease: Defaults for lease and renewal times; give the ranks' own.
        memory_epoch: Number of times that the ranks' memory was registered anew: the greatest `Engine.memory_epoch` of
            all ranks, never less than before.
        tp_size: Ranks per pipeline stage; their number if left out.
        pp_size: Pipeline stages.
        num_token_shards: Number of neighbouring ranks that share the tokens of a block (`Layout.token_shards`).
        null_block: Id that marks a place without a block in the engine's lists (vLLM: 0). `None` always marks one.
        token_hex: Source of randomness, as `secrets.token_hex`; for simulations.

    Raises:
        ConfigError: Ranks are missing, given twice or malformed.
    """

    def __init__(
        self,
        engine_id: str,
        endpoints: Sequence[Endpoint | dict[str, Any]],
        *,
        lease: LeaseConfig | None = None,
        memory_epoch: int = 0,
        tp_size: int | None = None,
        pp_size: int = 1,
        num_token_shards: int = 1,
        null_block: int = NULL,
        token_hex: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        self.engine_id = text("engine_id", engine_id, MAX_NAME, 1, ConfigError)
        if not isinstance(endpoints, Iterable):
            raise ConfigError(f"endpoints is {shown(endpoints)}; it must be a sequence of them, one per rank")
        self.endpoints = tuple(sorted(map(self._endpoint, endpoints), key=lambda e: (e.pp_stage, e.tp_rank)))
        self.pp_size = integer("pp_size", pp_size, 1, MAX_RANKS, ConfigError)
        size = len(self.endpoints) // self.pp_size if tp_size is None else tp_size
        self.tp_size = integer("tp_size", size, 0 if tp_size is None else 1, MAX_RANKS, ConfigError)
        self.num_token_shards = integer("num_token_shards", num_token_shards, 1, MAX_RANKS, ConfigError)
        if self.tp_size % self.num_token_shards:
            raise ConfigError(
                f"num_token_shards {num_token_shards} does not divide the tp_size {self.tp_size} of prefill engine "
                f"{engine_id!r}; give the number that its layouts have (Layout.num_token_shards)"
            )
        self.null_block = integer("null_block", null_block, NULL, MAX_BLOCK_ID, ConfigError)
        self.lease = LeaseConfig() if lease is None else lease
        if not isinstance(self.lease, LeaseConfig):
            raise ConfigError(f"lease is {shown(lease)}; it must be a LeaseConfig")
        ranks = [(e.pp_stage, e.tp_rank) for e in self.endpoints]
        whole = len(ranks) == self.tp_size * self.pp_size > 0
        if not whole or ranks != [(s, r) for s in range(self.pp_size) for r in range(self.tp_size)]:
            raise ConfigError(
                f"prefill engine {engine_id!r} of tp_size {self.tp_size} and pp_size {pp_size} needs one endpoint for "
                f"each of its ranks, but was given (pp_stage, tp_rank) {shown(ranks)}"
            )
        self.memory_epoch = integer("memory_epoch", memory_epoch, 0, MAX_INTEGER, ConfigError)
        self._token_hex = token_hex
        self._mint = self._new_mint()

    def __repr__(self) -> str:
        shared = f", num_token_shards {self.num_token_shards}" if self.num_token_shards > 1 else ""
        return f"<PrefillRanks {self.engine_id!r}, tp_size {self.tp_size}, pp_size {self.pp_size}{shared}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mint": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._mint = self._new_mint()  # a copy must not mint the keys of its original

    def _new_mint(self) -> tuple[int, str, Iterator[int]]:
        """Process, epoch and sequence of keys; random, because a restarted scheduler must never repeat a key."""
        return os.getpid(), self._token_hex(8), itertools.count()

    def _key(self) -> Key:
        process, epoch, sequence = self._mint
        if process != os.getpid():
            # A forked scheduler is another one: with its parent's epoch it would mint its parent's keys.
            _, epoch, sequence = self._mint = self._new_mint()
        return Key(epoch, self.memory_epoch, next(sequence), self._token_hex(16))

    def _endpoint(self, given: Endpoint | dict[str, Any]) -> Endpoint:
        try:
            return sendable(given, Endpoint)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"an endpoint of prefill engine {self.engine_id!r} is malformed: {exc}") from exc

    def make_params(
        self,
        request_id: str,
        groups: Sequence[tuple[int, BlockIds]],
        num_tokens: int,
        *,
        lease_s: float | None = None,
        written: bool = False,
        hashes: Sequence[str] = (),
        hash_tokens: int = 0,
        trace: Mapping[str, str] | None = None,
        recall: bool = False,
    ) -> dict[str, Any]:
        """Describe one request to the decode side, as plain data that JSON can carry.

        Every call makes a new key. Call it once per request, and give the result to all prefill ranks and to the decode
        side. Each rank lends the request (`Engine.lend`), or withdraws an aborted one (`Engine.withdraw`).

        Args:
            request_id: The prefill side's id; arbitrary text.
            groups: One `(first_token, block ids)` per cache group, the ids in a list or a numpy array; the first block
                holds `first_token`. `None` stands for a missing block: outside a sliding window, or a state that was
                not kept.
            num_tokens: Number of tokens with KV in these blocks, now or later.
            lease_s: Seconds for which the request stays lent if no reader claims it; `LeaseConfig.lease_s` if left out.
            written: True if the KV is complete already. Leave it False if params travel ahead of the data: readers then
                make sure that they began after the request was lent.
            hashes: One hash per `hash_tokens` tokens, each covering all tokens before it too. Readers that give their
                own hashes take only the tokens on which both agree.
            hash_tokens: Tokens per hash.
            trace: Headers with the trace of the request (W3C's `traceparent` and `tracestate`), or
                `asynckv.trace_context()` inside a span. Other keys are ignored.
            recall: True if the loan may have to end at once, whatever was granted (`Engine.recall`). Readers confirm
                each read of it, which takes one more message.

        Raises:
            ConfigError: A value is out of range or of another type; the message names it. No key was minted.
        """
        wait = self.lease.lease_s if lease_s is None else seconds("lease_s", lease_s, ConfigError)
        check_lease(wait, self.lease.max_lease_s)
        chain = texts("hashes", hashes, MAX_HASHES, MAX_HASH, ConfigError)
        per_hash = integer("hash_tokens", hash_tokens, 0, MAX_TOKENS, ConfigError)
        if chain and not per_hash:
            raise ConfigError(f"{len(chain)} hashes were given of {per_hash} tokens each; give hash_tokens too")
        name = text("request_id", request_id, MAX_ID, 1, ConfigError)
        blocks = self._runs(groups)
        tokens = integer("num_tokens", num_tokens, 0, MAX_TOKENS, ConfigError)
        is_written, may_recall = flag("written", written, ConfigError), flag("recall", recall, ConfigError)
        traceparent, tracestate = trace_of(trace)
        # Checked arguments are not checked again, because a long prompt may have thousands of runs, and this is the
        # scheduler's thread.
        plain: dict[str, Any] = msgspec.to_builtins(
            KVTransferParams(
                engine_id=self.engine_id,
                request_id=name,
                key=self._key(),
                tp_size=self.tp_size,
                pp_size=self.pp_size,
                endpoints=self.endpoints,
                groups=(),
                num_tokens=tokens,
                lease_s=wait,
                renew_s=min(self.lease.grant_s, wait) / 3,
                written=is_written,
                hashes=chain,
                hash_tokens=per_hash,
                traceparent=traceparent,
                tracestate=tracestate,
                num_token_shards=self.num_token_shards if self.num_token_shards > 1 else UNSET,
                recall=may_recall or UNSET,
            )
        )
        plain["groups"] = blocks
        return plain

    def set_endpoint(self, rank: int, endpoint: Endpoint | dict[str, Any]) -> None:
        """Name another process in all later params: the one that replaces `endpoints[rank]`.

        Raises:
            ConfigError: The endpoint is malformed, or of another rank.
        """
        before, after = self.endpoints[rank], self._endpoint(endpoint)
        if (after.pp_stage, after.tp_rank) != (before.pp_stage, before.tp_rank):
            raise ConfigError(
                f"rank {rank} is (pp_stage, tp_rank) {before.pp_stage, before.tp_rank}, and the endpoint is of "
                f"{after.pp_stage, after.tp_rank}"
            )
        self.endpoints = (*self.endpoints[:rank], after, *self.endpoints[rank + 1 :])

    def _runs(self, groups: Sequence[tuple[int, BlockIds]]) -> tuple[list[Any], ...]:
        """Check block lists, and write them as plain data in the form of `BlockRuns`."""
        given: Any = groups
        try:
            pairs: list[tuple[Any, Any]] = [(first, ids) for first, ids in given]
        except (TypeError, ValueError):
            raise ConfigError(f"groups is {shown(groups)}; give one (first_token, block_ids) per group") from None
        if len(pairs) > MAX_GROUPS:
            raise ConfigError(f"{len(pairs)} groups were given; at most {MAX_GROUPS} can be described")
        out, total = [], 0
        for index, (first, ids) in enumerate(pairs):
            begin = integer(f"first_token of group {index}", first, 0, MAX_TOKENS, ConfigError)
            try:
                runs = runs_of(ids, self.null_block)
            except LayoutError as exc:
                raise ConfigError(f"group {index}: {exc}") from exc
            total += len(runs)
            if total > MAX_RUNS:
                raise ConfigError(
                    f"group {index} is at {total} runs of block ids; at most {MAX_RUNS} can be sent in all"
                )
            out.append([begin, runs])
        return tuple(out)


def trace_of(given: Mapping[str, str] | None) -> tuple[str, str]:
    """Return traceparent and tracestate, or empty texts, because a client's malformed headers must not fail its
    request.

    Raises:
        ConfigError: `given` is not a mapping of headers.
    """
    if given is None:
        return "", ""
    if not isinstance(given, Mapping):
        raise ConfigError(f"trace is {shown(given)}; give headers, such as trace_context() returns")
    parent, state = given.get("traceparent"), given.get("tracestate")
    if not isinstance(parent, str) or not _TRACEPARENT.fullmatch(parent):
        return "", ""
    is_state = isinstance(state, str) and len(state) <= MAX_TRACESTATE and state.isascii() and state.isprintable()
    return str(parent), str(state) if is_state else ""


class PieceSizes:
    """Decides which finished chunks of one request become a piece: few, and so that little is left for the end.

    A piece costs both sides about a millisecond of CPU. While its reader keeps up, each piece is twice as long as the
    one before. Towards the end of the prompt a piece is as long as what is left to compute, so the last ones are short.
    If the reader does not keep up, all that is finished when it asks becomes one piece. Make one for each request, and
    another after a preemption.
    """

    def __init__(self) -> None:
        self._begin = self._end = self._computed = self._least = 0
        self._is_read = True

    def take(self, computed: int, num_tokens: int, *, is_followed: bool) -> range | None:
        """Return the tokens to lend as a piece now, if any; the next piece begins at their end. Call it for each chunk.

        Args:
            computed: Tokens whose KV is written on every rank, rounded down to whole blocks.
            num_tokens: Tokens of the whole prompt.
            is_followed: True if a reader waits for a piece.
        """
        chunk, self._computed = computed - self._computed, computed
        if not is_followed:
            return None
        if not self._is_read:
            size, self._is_read = self._end - self._begin, True
            keeps_up = computed - self._end <= max(2 * chunk, size // 4)  # engines hear of the reader a step late
            self._least = 2 * size if keeps_up else 0
        ready, left = computed - self._end, num_tokens - computed
        if left <= 0 or ready < max(min(self._least, left), 1):
            return None
        self._begin, self._end, self._is_read = self._end, computed, False
        return range(self._begin, self._end)
