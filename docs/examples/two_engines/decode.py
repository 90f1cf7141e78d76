"""The decode engine: its scheduler, and by default one worker. The scheduler needs no engine of asynckv."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from scenery import NUM_BLOCKS, Call, Ranks, blocks_of, run_engine
from worker import work

from asynckv import Announce, Cancel, Discharge, Finished, Order, Pull, token_hashes


@dataclass
class Request:
    """A request between its call and its answer."""

    call: Call
    params: dict[str, Any] | None
    """None: compute the prompt here."""
    blocks: list[int] = field(default_factory=list)
    is_aborted: bool = False
    num_bytes: int = 0
    why: str = ""
    """Why it was not pulled."""

    @property
    def prompt(self) -> list[int]:
        return list(self.call.body["prompt"])


@dataclass
class Pulling:
    """Blocks that a pull fills, on all ranks. They are free again when both sets are empty, and not before."""

    request: Request
    blocks: list[int]
    unfinished: set[int]
    """Ranks whose pull has not ended."""
    held: set[int] = field(default_factory=set)
    """Ranks whose pull has failed, and on which NIXL may still write these blocks."""
    failures: list[str] = field(default_factory=list)


class Scheduler:
    """Decides once per step what happens on all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.free = list(range(NUM_BLOCKS))
        self.waiting = deque[Request]()
        self.pulling: dict[str, Pulling] = {}
        self.ready: list[Request] = []
        self.orders: list[Order] = []
        """For the next step."""

    def take(self, call: Call) -> None:
        """Take a call of the router."""
        request_id = call.body.get("request_id", "")
        if call.path == "/decode":
            under_way = {each.call.body["request_id"] for each in (*self.waiting, *self.ready)} | self.pulling.keys()
            if request_id in under_way:  # an id names one request at a time: `returned` tells nothing but the id
                call.answer.set_result({"error": f"{request_id!r} is under way"})
                return
            self.waiting.append(Request(call, call.body["params"]))
            # Now, though there may be no blocks for it yet: ranks meet, and the lease is kept while the request waits.
            self.orders.append(Announce(request_id, call.body["params"]))
            return  # answered when the KV is there
        if call.path == "/abort":
            # Every rank tells the prefill engine, which frees its blocks.
            self.orders.append(Cancel(request_id))
            if request_id in self.pulling:
                self.pulling[request_id].request.is_aborted = True  # its Pull ends in `failed`, or just ended well
            for request in [each for each in self.waiting if each.call.body["request_id"] == request_id]:
                self.waiting.remove(request)
                request.call.answer.set_result({"from": "nowhere", "why": "aborted"})
        call.answer.set_result({"free_blocks": len(self.free)})

    def step(self) -> None:
        """Make one step on all ranks."""
        computed = []
        while self.waiting and blocks_of(self.waiting[0].prompt) <= len(self.free):
            request = self.waiting.popleft()
            count = blocks_of(request.prompt)
            request.blocks = self.free[:count]
            del self.free[:count]
            if request.params is None:
                computed.append(request)
            else:
                self.pull(request, request.params)

        orders, self.orders = self.orders, []
        ready, self.ready = self.ready + computed, []
        told = self.ranks.step(
            orders,
            compute=[(request.prompt, request.blocks) for request in computed],
            check=[(request.prompt, request.blocks) for request in ready],  # a real engine generates tokens from it
        )
        alive = [each for each in told if each is not None]
        for i, request in enumerate(ready):
            self.free += request.blocks
            if len(alive) < len(told):  # a rank's part of its KV is lost
                self.compute_here(request, "a rank of this engine has died")
                continue
            request.call.answer.set_result(
                {
                    "from": "here" if request.params is None else "the prefill engine",
                    "num_bytes": request.num_bytes,
                    "why": request.why,
                    "is_right": all(right[i] for _, right in alive),
                }
            )
        for rank, each in enumerate(told):
            if each is None:
                self.has_died(rank)
            else:
                self.take_finished(rank, each[0])

    def pull(self, request: Request, params: dict[str, Any]) -> None:
        """Have all ranks fill a request's blocks. Each of them says how that ended: it is in `received` or `failed`."""
        request_id = request.call.body["request_id"]
        groups = [(0, request.blocks)]  # from token 0 on; with a cached prefix: its length, and the blocks after it
        # Of its own prompt, of as many tokens as were lent: only those are read whose hashes are the same.
        hashes = token_hashes(request.prompt[: params["num_tokens"]], params["hash_tokens"])
        self.orders.append(Pull(request_id=request_id, groups=groups, params=params, timeout_s=10.0, hashes=hashes))
        self.pulling[request_id] = Pulling(request, request.blocks, set(range(len(self.ranks.endpoints))))

    def take_finished(self, rank: int, finished: Finished) -> None:
        """Hear what has ended on one rank."""
        for result in finished.received:
            pulling = self.pulling[result.request_id]
            pulling.request.num_bytes += result.num_bytes
            if result.num_tokens < len(pulling.request.prompt):
                pulling.failures.append(f"only {result.num_tokens} tokens are those that were lent")
            self.has_ended(rank, result.request_id)
        for failed in finished.failed:
            pulling = self.pulling[failed.request_id]
            pulling.failures.append(f"{type(failed.error).__name__}: {getattr(failed.error, 'reason', '')}")
            if failed.is_held:
                pulling.held.add(rank)
            if not getattr(failed.error, "failed_in", ""):
                # Refused before it began, so the prefill engine was told nothing: tell it.
                self.orders.append(Discharge(failed.request_id, pulling.request.params or {}))
            self.has_ended(rank, failed.request_id)
        for request_id in finished.returned:
            self.pulling[request_id].held.discard(rank)
            self.free_if_over(request_id)
        for request_id in finished.retired:
            # Never again: a transfer that does not end may still write these blocks. The rank stays in `held`.
            print(f"decode: blocks {self.pulling[request_id].blocks} are lost to this process", flush=True)

    def has_ended(self, rank: int, request_id: str) -> None:
        """Go on with a request when its pull has ended on all ranks: it is complete only if all of them say so."""
        pulling = self.pulling[request_id]
        pulling.unfinished.discard(rank)
        if pulling.unfinished:
            return
        request = pulling.request
        if not pulling.failures and not request.is_aborted:
            del self.pulling[request_id]
            self.ready.append(request)  # the bytes are there, and proven
            return
        self.free_if_over(request_id)
        if request.is_aborted:
            request.call.answer.set_result({"from": "nowhere", "why": "aborted"})
            return
        # The client need not notice: compute the prompt here, into other blocks.
        self.compute_here(request, pulling.failures[0])

    def compute_here(self, request: Request, why: str) -> None:
        """Queue a request whose KV is to be computed by this engine."""
        request.params, request.why = None, why
        self.waiting.appendleft(request)

    def has_died(self, rank: int) -> None:
        """Go on without a rank that has died, and with another in its place.

        Nothing can write its memory any more, so it holds no blocks. The pulls of the other ranks are cancelled; each
        still says how it ended, and whether its blocks are held. What the dead rank was owed to release comes back to
        the prefill engine when the lease ends.
        """
        print(f"decode: rank {rank} has died; it is started again", flush=True)
        for request_id, pulling in list(self.pulling.items()):
            self.orders.append(Cancel(request_id))
            pulling.failures.append("a rank of this engine has died")
            pulling.held.discard(rank)
            if rank in pulling.unfinished:
                self.has_ended(rank, request_id)
            else:
                self.free_if_over(request_id)
        for request in self.ready:
            self.free += request.blocks
            self.compute_here(request, "a rank of this engine has died")
        self.ready = []
        self.ranks.restart(rank)

    def free_if_over(self, request_id: str) -> None:
        """Give the blocks of a failed pull back, unless something may still write them."""
        pulling = self.pulling[request_id]
        if not pulling.unfinished and not pulling.held:
            self.free += pulling.blocks
            del self.pulling[request_id]


if __name__ == "__main__":
    run_engine("decode", Scheduler, work, tp_size=1)
