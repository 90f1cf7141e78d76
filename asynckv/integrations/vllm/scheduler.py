"""The scheduler's half: translates vLLM's hooks, requests and blocks into orders of asynckv.

A request asks for transfers in its `kv_transfer_params`, which come from a client through a router:

- `{"do_remote_decode": true}`: lend its blocks when it ends, and answer with params for the reading engine:
  `{"do_remote_prefill": true, "do_remote_decode": false, "asynckv": {...}}`.
- `{"do_remote_prefill": true, "asynckv": {...}}`: read the KV that another engine has computed.
- `{"do_remote_prefill": true, "asynckv_follow": {...}}`: follow a ticket, which another engine's request brings as
  `asynckv_ticket`. The request waits until it is offered params, and goes on as if they had come with it.

A request may both read and lend. A client's params are checked once, and never raise: with bad params the prompt is
computed here, and one warning gives the reason.

**One token less.** The reader computes a prompt's last token again, to sample from it. A recurrent state cannot be
taken back by one token, and a sliding window may have lost the first token that the last one needs. So models with
either stop one token before the end (`Shape.back_off`).

**The same prompt.** The params carry a chain of hashes over the lent tokens, and over everything else that their KV
depends on. The reading engine reads only the tokens on which its own chain agrees. Claims compare the chain as well.

Orders go out with the next step. vLLM always makes one after a request is queued, allocated or ended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from asynckv.arguments import MAX_INTEGER, shown
from asynckv.core.types import KVTransferParams, Reason, check_ticket, of_vllm
from asynckv.embed.ledgers import DecodeLedger, PrefillLedger, State
from asynckv.embed.orders import Order, Reclaim
from asynckv.errors import AsyncKVError, ConfigError, LocalProtocolError, NoOffer, PullError
from asynckv.geometry.pairing import common_prefix
from asynckv.integrations.vllm.chain import MAX_CHAIN, chain_of, hash_tokens_of
from asynckv.integrations.vllm.compat import calls, copies_blocks, num_received, runs_late, zeroes_blocks
from asynckv.integrations.vllm.options import WORDS, Options
from asynckv.integrations.vllm.pieces import Pieces
from asynckv.integrations.vllm.shape import Blocks, Shape
from asynckv.observe.tracing import trace_context
from asynckv.scheduler import PrefillRanks

if TYPE_CHECKING:
    from asynckv.integrations.vllm.handover import FollowReports, StepOrders, WorkerAddress

PARAMS = "asynckv"  # our key in `kv_transfer_params`; vLLM and routers use others
TICKET, FOLLOW = "asynckv_ticket", "asynckv_follow"
OFFERS, ASKS, FOLLOWS = "asynckv_offers", "asynckv_ask", "asynckv_follows"  # what engines say of themselves to routers
READS, LENDS = "do_remote_prefill", "do_remote_decode"
GIVES_BACK = "give_back"  # set by `asynckv proxy`, beside the params of a request that it will not have read
NOT_FOR_NIXL = {"remote_engine_id": "asynckv", "remote_host": "asynckv.invalid", "remote_port": None}
"""Fields that `NixlConnector` reads. It waits for ever if one is missing, but fails at once to connect to no host."""

RECLAIM_S = 1.0  # seconds between two orders to make room
REPORT_S = 2.0  # for a worker to report that `pull.follow_s` is over, with the cause
CAUSES: Mapping[str, str] = WORDS["computed_locally"]
"""Causes for which a prompt or its end is computed instead of a transfer. Each is logged once, and always counted."""

UNOFFERED = NoOffer("no worker has reported it within pull.follow_s", reason=Reason.NO_OFFER, failed_in="follow")
FAILED = PullError("a worker could not load it; its log gives the reason")
FOLLOWING, EARLY = State.FOLLOWING, State.EARLY
WAIT_FOR_BLOCKS = (FOLLOWING, State.QUEUED, State.WAITING, State.REFUSED)
FINISHED_WELL = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
logger = logging.getLogger("vllm.asynckv")  # vLLM shows the lines of loggers below its own


@dataclass(slots=True)
class Queued:
    """A request that has no blocks yet, and which tokens of its prompt are to be read: from `first` up to `end`."""

    request: Any
    since: float
    first: int = 0
    end: int = 0  # 0 if nothing is to be read; while it follows a ticket: the most
    fetch: Any = None  # of a request that follows a ticket
    hashes: Sequence[str] = ()  # of its prompt, if it was offered a piece of it


class SchedulerHalf:
    """The connector in vLLM's scheduler; only for that scheduler's thread."""

    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any) -> None:
        self.options = options
        self.engine_id: str = vllm_config.kv_transfer_config.engine_id
        self.shape = Shape.of(vllm_config, kv_cache_config)
        self._reads = vllm_config.parallel_config.prefill_context_parallel_size == 1
        self.pulls = DecodeLedger(num_ranks=1)  # vLLM joins its workers' reports
        self.loans: PrefillLedger | None = None  # None until the workers' addresses are known
        self._failing: list[str] = []  # loads that workers must report as failed, without an order
        self._erred: set[str] = set()  # requests that ended with an error while they were loaded
        from asynckv.integrations.vllm.stats import SchedulerTally

        self.tally = SchedulerTally()
        self._adapters: dict[tuple[str, str], int] = {}  # name and path of each adapter, and its number; 0: reloaded
        self.pool: Any = None  # vLLM's blocks, once it has given them
        self._queued: dict[str, Queued] = {}  # by id, the oldest first
        self._following: dict[str, Queued] = {}  # those that follow a ticket, until vLLM asks for them after the offer
        # The most tokens by which a prefix cache may end before a prompt does.
        self._block = max((group.block_size for group in self.shape.groups if not group.is_state), default=0)
        self._can_follow = self._reads and calls("build_connector_worker_meta")  # by which workers report offers
        self._early: dict[str, Queued] = {}  # those that have a head start, until their loan is offered
        self._offered = set[str]()  # requests that were offered, and have no blocks
        self._tickets: dict[str, str] = {}  # by id, the tickets that unfinished requests have taken
        self._runs_late = runs_late(vllm_config)
        self.pieces = Pieces(self.shape, self._runs_late and zeroes_blocks(kv_cache_config))
        self._reclaimed_at = -math.inf

    # -- where the workers are ----------------------------------------------------------------------

    def set_workers(self, found: Mapping[tuple[int, int], WorkerAddress]) -> None:
        """Take the workers' addresses by pipeline stage and rank, at the start or after they registered memory anew."""
        from asynckv.integrations.vllm.handover import WorkerAddress

        for place, address in found.items():
            if not isinstance(address, WorkerAddress):
                raise ConfigError(
                    f"the worker (pp, tp) {place} has a {type(address).__name__} as its address: in MultiConnector "
                    f"vLLM takes only the first connector's addresses; name AsyncKVConnector before it"
                )
        if not found:
            logger.warning("asynckv: no worker has an address; nothing can be lent")
            return
        ranks = PrefillRanks(
            self.engine_id,
            [address.endpoint for address in found.values()],
            lease=self.options.lease,
            memory_epoch=max(address.memory_epoch for address in found.values()),
            pp_size=1 + max(stage for stage, _ in found),
            num_token_shards=self.shape.num_token_shards,
            null_block=0,
        )
        if self.loans is None:
            self.loans = PrefillLedger(ranks)
        self.loans.ranks = ranks

    # -- a request comes, and gets blocks -----------------------------------------------------------

    def add(self, request: Any) -> None:
        self._queued[request.request_id] = Queued(request, monotonic())
        self._look_at_adapter(request)
        given = request.kv_transfer_params
        if given is not None and not isinstance(given, dict):
            self.count(request, has_params=True)
            self._computes(request, "malformed", f"they are a {type(given).__name__}, but must be an object")
            request.kv_transfer_params = None  # because vLLM reads it next, and would raise
            return
        given = given or {}
        # vLLM's own connectors test both for truth.
        reads, lends = bool(given.get(READS)), bool(given.get(LENDS))
        if (has_params := reads or any(given.get(name) is not None for name in (PARAMS, FOLLOW))) or not lends:
            self.count(request, has_params)
        if lends:
            self.tally.ends_row()
            # If the request also reads, this may be the engine that generates, so truncation is optional.
            self._truncate(request, must=not reads)
            self._take_ticket(request, given.get(TICKET))
        if has_params and given.get(READS) is not False and not self._fetch(request, given, reads):
            _reads_no_more(request)

    def _take_ticket(self, request: Any, ticket: Any) -> None:
        if ticket is None or self.loans is None:
            return
        try:
            if self.loans.take_ticket(check_ticket(ticket)):
                self._tickets[request.request_id] = ticket
                if self.options.has_head_start(request.num_prompt_tokens):
                    self.pieces.add(request, ticket)
        except LocalProtocolError as exc:
            self._computes(request, "malformed", str(exc))

    def count(self, request: Any, has_params: bool) -> None:
        """Count a prompt, unless no engine could have computed it in advance."""
        if not (_is_marker(request) or _needs_all(request) or request.pooling_params is not None):
            if said := self.tally.prompt(has_params):
                logger.warning("asynckv: %s", said)

    def _look_at_adapter(self, request: Any) -> None:
        """Warn once of each adapter that was loaded again, perhaps with other weights."""
        if (adapter := getattr(request, "lora_request", None)) is not None:
            name, number = (adapter.lora_name, adapter.lora_path), adapter.lora_int_id
            known = self._adapters.get(name)
            if known is None:
                self._adapters[name] = number
            elif known and (number > known or getattr(adapter, "load_inplace", False)):
                self._adapters[name] = 0
                logger.warning("asynckv: adapter %s was loaded again: %s", shown(name), WORDS["adapters"]["reloaded"])

    def _fetch(self, request: Any, given: Mapping[str, Any], is_asked: bool) -> bool:
        name, params, follow = request.request_id, given.get(PARAMS), given.get(FOLLOW)
        if params is None and follow is None:
            self.tally.ends_row()
            return self._computes(request, "no_params", of_vllm(given))
        is_wanted = is_asked and not _is_marker(request)
        if params is None and not is_wanted:
            return self._computes(request, "not_asked")  # nothing was lent to it yet
        # The trace of this engine's own HTTP request is nearer than the one in the params.
        trace = trace_context(_headers(request))
        try:
            if params is None:
                early = self.options.has_head_start(request.num_prompt_tokens)
                fetch = self.pulls.follow(name, follow or {}, trace=trace, takes_pieces=early)
            else:
                fetch = self.pulls.announce(name, params, trace=trace)
        except AsyncKVError as exc:
            return self._computes(request, "malformed", str(exc))
        if is_wanted:
            self.tally.ends_row()
        if fetch is None:
            return self._computes(request, "spent")
        if is_wanted and fetch.params is not None:
            return self._compare(request, fetch.params)
        if cause := self._hindrance(request) if is_wanted else "not_asked":
            self._computes(request, cause)
            self.spare(request)
            return False
        queued = self._following[name] = self._queued.pop(name)
        queued.fetch, queued.end = fetch, request.num_prompt_tokens - self.shape.back_off
        return True

    def _compare(self, request: Any, params: KVTransferParams) -> bool:
        """Decide which tokens of this prompt are read; return False, and spare the request, if none are."""
        if not (end := self._covered(request, params)):
            self.spare(request)
            return False
        self._queued[request.request_id].end = end
        self._offered.add(request.request_id)
        return True

    def _covered(self, request: Any, params: KVTransferParams) -> int:
        """Return how many tokens of this prompt are read, and count the cause if not all are."""
        try:
            (cause, end), why = self._readable(request, params), ""
        except AsyncKVError as exc:
            cause, end, why = "malformed", 0, str(exc)
        if cause:
            self._computes(request, cause, why)
        return end

    def _computes(self, request: Any, cause: str, why: str = "") -> bool:
        """Count a prompt that is computed instead of a transfer, and log the first of each cause; returns False."""
        if _is_marker(request):
            return False
        if self.tally.computed_locally(cause):
            logger.warning(
                "asynckv: request %s is computed without a transfer: %s. Further requests are only counted "
                "(computed_locally, cause %s)",
                *(shown(request.request_id), ": ".join(filter(None, (CAUSES[cause], why))), cause),
            )
        return False

    def _hindrance(self, request: Any) -> str:
        """Return the cause for which nothing can be read for a request, whatever is offered; empty if there is none."""
        if not self._reads:
            return "prefill_only"
        return "prompt_logprobs" if _needs_all(request) else ""  # vLLM computes every token itself

    def _readable(self, request: Any, params: KVTransferParams) -> tuple[str, int]:
        """Return how many tokens of this prompt can be read, and the cause if not all of them can."""
        if cause := self._hindrance(request):
            return cause, 0
        most, every = min(params.num_tokens, request.num_tokens), params.hash_tokens
        end: int = request.num_prompt_tokens - self.shape.back_off
        if not params.hashes and not self.options.allow_unhashed:
            return "no_hashes", 0
        if not params.hashes:
            same = most
        elif most > every * MAX_CHAIN:
            same = 0  # only a client can have made this, to cost much time
        else:
            same = common_prefix(chain_of(request, most, every), params.hashes, every, most)
        if not same:
            return "other_prompt", 0
        if same < most:
            # States and windows are valid only at the last token, and a draft's KV depends on the token that follows.
            return "other_end", 0 if self.shape.back_off or self.shape.has_drafts else min(same, end)
        if self.shape.back_off and params.num_tokens > end:
            return "too_far", 0  # its last state cannot be taken back
        return "", min(same, end)

    def _truncate(self, request: Any, must: bool) -> None:
        """Remove the last tokens of a prompt, which the reading engine computes."""
        fewer = self.shape.back_off
        if not fewer or request.num_prompt_tokens <= fewer or not (must or request.max_tokens == 1):
            return
        if _needs_all(request):
            return  # the other engine computes the whole prompt as well
        # A prompt may come as ids, as embeddings, or as both, and vLLM's workers end if these differ in length. Lists
        # are replaced, not shortened, because all completions of a prompt may share one.
        for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
            if (given := getattr(request, name)) is not None:
                setattr(request, name, given[:-fewer])
        del request._all_token_ids[-fewer:]
        request.num_prompt_tokens -= fewer
        request.max_tokens = 1

    def match(self, request: Any, num_cached: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local prefix cache can be read; None to be asked again."""
        name = request.request_id
        queued = self._following.get(name)
        # vLLM asks for each request in every step, and many may follow. A prompt that is cached up to a block begins.
        if queued is not None and queued.fetch.state is FOLLOWING and not 0 < num_cached >= queued.end - self._block:
            queued.first = num_cached
            return (queued.end - num_cached, True) if queued.hashes and self._has_room(queued) else (None, False)
        fetch, queued = self.pulls.get(name), queued or self._queued.get(name)
        if fetch is None or queued is None:
            self.spare(request)  # with blocks of its own, it is not read any more
            return 0, False
        # If the load that it waited for has failed, or nothing was offered, it fails as a load, so that vLLM's policy
        # applies.
        may_pull = True if fetch.errors else self.pulls.may_pull(name)
        if may_pull is None and fetch.state is not FOLLOWING:
            return None, False
        if self._following.pop(name, None) is not None:
            queued.since, self._queued[name] = monotonic(), queued  # from now on it waits for blocks
            if may_pull is None:
                self.spare(request)
                _reads_no_more(request)
                return 0, False
            if fetch.params is not None and not self._compare(request, fetch.params):
                return 0, False
        more, queued.first = queued.end - num_cached, num_cached
        if not may_pull:
            if more > self._block:
                self._computes(request, "sibling")
            self.spare(request)
            more = 0
        return (more, True) if more > 0 else (0, False)

    def _has_room(self, queued: Queued) -> bool:
        """Return True if a head start may have blocks: none before those that were offered, and half of all at most."""
        offered = filter(None, map(self.pulls.get, self._offered))
        if self.pool is None or any(fetch.state is State.QUEUED for fetch in offered):
            return False
        held = sum(self.shape.num_blocks(each.end) for each in self._early.values())
        return 2 * (held + self.shape.num_blocks(queued.end)) <= held + int(self.pool.get_num_free_blocks())

    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """Order the pull of a request that has its blocks (`update_state_after_alloc`); called with 0 after a load."""
        name, fetch = request.request_id, self.pulls.get(request.request_id)
        queued = self._queued.pop(name, None) or self._following.pop(name, None)
        self._offered.discard(name)
        if queued is None or fetch is None or fetch.state not in WAIT_FOR_BLOCKS:
            return
        if num_external > 0 and fetch.errors:
            if fetch.params is None:
                self.tally.failed(UNOFFERED)
            self._failing.append(name)
            self.spare(request)
        elif num_external > 0 and fetch.state in (FOLLOWING, State.QUEUED):
            queued.end = queued.first + num_external
            lists = self.shape.missing(blocks, queued.first, queued.end)
            if fetch.state is FOLLOWING:
                queued.since, self._early[name] = monotonic(), queued
                self.pulls.start_early(name, lists, num_tokens=queued.end, hashes=queued.hashes)
            else:
                self._pull(queued, lists)
        else:
            self.spare(request)
        _reads_no_more(request)

    def _pull(self, queued: Queued, lists: Any) -> None:
        request, priority = queued.request, max(-MAX_INTEGER, min(queued.request.priority, MAX_INTEGER))
        self.pulls.pull(request.request_id, lists, num_tokens=queued.end, priority=priority)

    def spare(self, request: Any) -> None:
        """Release what is lent, or will be offered, to a request that needs none of it. The request may be unknown."""
        if request.request_id not in self._erred:
            self.pulls.release(request.request_id)

    # -- steps --------------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        return bool(
            self._failing
            or self._erred
            or self.tally.has_total
            or self.pulls.has_orders
            or (self.loans is not None and self.loans.has_orders)
        )

    def orders(self, step: Any) -> StepOrders:
        """Return what goes to the workers with a step; pieces of prompts that it computes are ordered first."""
        from asynckv.integrations.vllm.handover import StepOrders

        if self._runs_late and copies_blocks(step):
            self.pieces.stop()
        if self.loans is not None:
            self.pieces.step(step, self.loans)
        failing, self._failing = self._failing, []
        return StepOrders(self.take_orders(), failing, self.tally.take_total())

    def take_orders(self) -> Sequence[Order]:
        while self._erred:
            self.pulls.cancel(self._erred.pop())
        reclaims = self._reclaim(monotonic()) if self._queued else []
        for waiting in filter(None, (self._following, self._early)):
            self._end_follows(waiting, monotonic())
        lends = () if self.loans is None else self.loans.take_orders()
        return [*lends, *self.pulls.take_orders(), *reclaims]  # pieces end before a pull may fill their blocks

    def _reclaim(self, now: float) -> list[Order]:
        """Have workers revoke requests, to make room for the oldest queued one, once it has waited for `grant_s`."""
        oldest = next(iter(self._queued.values()))
        if self.pool is None or now - oldest.since < self.options.lease.grant_s or now - self._reclaimed_at < RECLAIM_S:
            return []
        if (lacking := self.shape.num_blocks(oldest.request.num_tokens) - self.pool.get_num_free_blocks()) <= 0:
            return []
        self._reclaimed_at = now
        return [Reclaim(lacking)]

    def _end_follows(self, waiting: dict[str, Queued], now: float) -> None:
        """Refuse requests that no worker has reported in time, because a sleep or a lost rank may take the report."""
        limit_s = self.options.pull.follow_s + REPORT_S
        while now - (oldest := next(iter(waiting.values()))).since >= limit_s:
            name = oldest.request.request_id
            if oldest.fetch.params is None and not oldest.fetch.errors:
                logger.warning("asynckv: request %s follows a ticket: %s", shown(name), UNOFFERED)
                self.pulls.refuse(name, UNOFFERED)
            oldest.since, waiting[name] = now, waiting.pop(name)

    def reported(self, reports: FollowReports) -> None:
        """Note what workers were offered, and the ends of what they follow; the first report of each decides."""
        for failed in reports.not_offered:
            self.pulls.not_offered(0, failed)
        for offer in reports.offered:
            self.pulls.offered(0, offer)
        for name in {offer.request_id for offer in reports.offered if offer.is_piece}:
            if (queued := self._following.get(name)) is not None:
                queued.hashes = self._hashes(queued)
        if reports.offered:
            self._offered.update(name for name, each in self._following.items() if each.fetch.params is not None)
        for name, queued in list(self._early.items()):
            if queued.fetch.state is not EARLY:
                del self._early[name]  # it was refused, and fails as a load
            elif queued.fetch.params is not None:
                del self._early[name]
                if self._covered(queued.request, queued.fetch.params) >= queued.end:
                    self._pull(queued, queued.fetch.groups)
                else:
                    self.pulls.cancel(name)  # a worker reports the failed load
        if self.loans is not None:
            self.loans.followed_by(reports.followed)

    def _hashes(self, queued: Queued) -> Sequence[str]:
        """Return the chain of a prompt if a piece of it was offered; empty if the piece is of another prompt."""
        piece, request = queued.fetch.piece, queued.request
        if piece is None or not 0 < request.num_prompt_tokens <= piece.hash_tokens * MAX_CHAIN:
            return ()
        try:
            own, end = chain_of(request, request.num_prompt_tokens, piece.hash_tokens), piece.num_tokens
        except AsyncKVError:
            return ()  # the loan will be compared too, and the cause counted
        return own if common_prefix(own, piece.hashes, piece.hash_tokens, end) >= end else ()

    def loaded(
        self, received: Iterable[str] | None, sent: Iterable[str] | None, failed: Collection[str] | None = None
    ) -> None:
        """Note the pulls and loans that all workers have ended (`update_connector_output`), and the failed pulls."""
        for request_id in received or ():
            self._erred.discard(request_id)
            self._early.pop(request_id, None)
            self.pulls.ended(request_id, FAILED if request_id in (failed or ()) else None)
        self.pulls.take_outcome()  # vLLM's own scheduler acts on what the workers reported
        if self.loans is not None:
            for request_id in sent or ():
                self.loans.ended(request_id)
            self.loans.take_free()

    # -- a request ends -----------------------------------------------------------------------------

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """End a request; return True if its blocks are lent, and the params for the engine that reads them."""
        name = request.request_id
        for waiting in (self._queued, self._following, self._early):
            waiting.pop(name, None)
        self._offered.discard(name)
        fetch, ticket = self.pulls.get(name), self._tickets.pop(name, "")
        if request.status.name == "FINISHED_ERROR" and fetch is not None and fetch.state in (EARLY, State.PULLING):
            self._erred.add(name)  # vLLM ends it before `loaded` reports the failed load
        if name not in self._erred:
            self.pulls.cancel(name)
        (every, has_pieces), given = self.pieces.end(name), request.kv_transfer_params
        if not given:
            return False, None
        _reads_no_more(request)
        is_lent, out = False, dict[str, Any]()
        if given.get(LENDS) and request.status.name in FINISHED_WELL:
            try:
                out, is_lent = self._lend(request, block_ids, ticket, every), True
            except AsyncKVError as exc:
                self._computes(request, "not_lent", str(exc))
        if ticket and not is_lent and self.loans is not None:
            if has_pieces:
                self.loans.end_pieces(ticket)  # vLLM frees the blocks now
            self.loans.withdraw_ticket(ticket)
        if given.get(ASKS) and self._can_follow:
            out[FOLLOWS] = True
        return is_lent, out or None

    def _lend(self, request: Any, block_ids: Sequence[Sequence[int]], ticket: str, every: int) -> dict[str, Any]:
        lists, num_tokens = self._lists(request, block_ids)
        if self.loans is None:
            raise LocalProtocolError("the workers' addresses are not known")
        every = max(every, hash_tokens_of(num_tokens))
        # vLLM may give the last tokens away before the drafter has run, so workers lend behind it (`WorkerHalf`).
        params = self.loans.lend(
            request.request_id,
            lists,
            num_tokens,
            written=not self.shape.has_drafts,
            lease_s=self.options.turn_lease_s if request.max_tokens > 1 else None,
            hashes=chain_of(request, num_tokens, every),
            hash_tokens=every,
            trace=_headers(request),
            ticket=ticket,
        )
        if self.shape.has_drafts:
            self.loans.mark_written(request.request_id)
        return {
            READS: True,
            LENDS: False,
            # Routers that were written for NixlConnector count the block ids. asynckv does not read them.
            "remote_block_ids": [ids for _, ids in lists],
            **NOT_FOR_NIXL,
            "remote_request_id": request.request_id,
            PARAMS: params,
            OFFERS: True,
        }

    def _lists(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[Blocks, int]:
        num_tokens = num_received(request)
        if any(group.is_state for group in self.shape.groups):
            # A state is valid only after its own token.
            is_guessed = self.shape.has_drafts and request.num_output_tokens > 1
            if is_guessed or num_tokens != request.num_computed_tokens:
                raise LocalProtocolError("its state is of another token")
        lists = self.shape.held(block_ids, num_tokens) if num_tokens > 0 else None
        if lists is None:
            raise LocalProtocolError("its blocks or its state are gone")
        return lists, num_tokens


def _headers(request: Any) -> Mapping[str, str]:
    """Return the trace context of a request; vLLM keeps it only if it traces."""
    given = getattr(request, "trace_headers", None)
    return given if isinstance(given, Mapping) else {}


def _is_marker(request: Any) -> bool:
    """Return True if vLLM, or a router, adds a request with any prompt only to give back what was lent to it."""
    given = request.kv_transfer_params
    return bool(getattr(request, "abort_immediately", False) or (isinstance(given, dict) and given.get(GIVES_BACK)))


def _needs_all(request: Any) -> bool:
    """Return True if vLLM computes every token of a prompt itself, for log-probabilities or pooling."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def _reads_no_more(request: Any) -> None:
    """Clear `do_remote_prefill`, so that a request is not read again, above all after it was preempted."""
    if request.kv_transfer_params and request.kv_transfer_params.get(READS):
        request.kv_transfer_params = {**request.kv_transfer_params, READS: False}
