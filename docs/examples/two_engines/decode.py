"""The decode engine: a scheduler and, by default, one worker. The scheduler has a ledger, but no `Engine`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scenery import NUM_BLOCKS, Call, Ranks, blocks_of, run_engine
from worker import work

from asynckv import AsyncKVError, DecodeLedger, token_hashes


@dataclass(eq=False)
class Request:
    """A request from its call to its answer."""

    call: Call
    blocks: list[int] = field(default_factory=list)
    num_bytes: int = 0
    why: str = ""
    """Reason why this engine computes the prompt."""

    def __post_init__(self) -> None:
        self.request_id, self.prompt = str(self.call.body["request_id"]), list(self.call.body["prompt"])


class Scheduler:
    """Decide once per step for all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.ledger = ranks, DecodeLedger(len(ranks.endpoints))
        self.free = list(range(NUM_BLOCKS))
        self.waiting = deque[Request]()
        self.requests: dict[str, Request] = {}
        self.ready: list[Request] = []

    def take(self, call: Call) -> None:
        """Accept a call of the router."""
        request_id = call.body.get("request_id", "")
        if call.path == "/decode":
            if request_id in self.requests:
                call.answer.set_result({"error": f"{request_id!r} is under way"})
                return
            request = self.requests[request_id] = Request(call)
            self.waiting.append(request)
            try:  # now, before it has blocks: ranks connect, and the lease lasts while it waits
                self.ledger.announce(request_id, call.body["params"])
            except AsyncKVError as error:  # the params do not come from an engine
                request.why = str(error)
            return  # answered when the KV is there
        if call.path == "/abort" and request_id in self.requests:
            request = self.requests[request_id]
            if request in self.waiting or self.ledger.get(request_id):
                self.ledger.cancel(request_id)  # every rank releases it, so the prefill engine frees its blocks
                if request in self.waiting:
                    self.waiting.remove(request)
                self.answer(request, {"from": "nowhere", "why": "aborted"})
        call.answer.set_result({"free_blocks": len(self.free)})

    def step(self) -> None:
        """Run one step on all ranks. While one is being restarted, requests wait, and all else goes on."""
        for rank in self.ranks.started():
            self.ledger.rank_joined(rank)
        computed = []
        while self.ranks.is_whole and self.waiting and blocks_of(self.waiting[0].prompt) <= len(self.free):
            request = self.waiting.popleft()
            count = blocks_of(request.prompt)
            request.blocks = self.free[:count]
            del self.free[:count]
            if self.ledger.may_pull(request.request_id):
                params = request.call.body["params"]
                # Hashes of our own prompt, as long as the lent one: only tokens with equal hashes are read.
                hashes = token_hashes(request.prompt[: params["num_tokens"]], params["hash_tokens"])
                # The blocks start at token 0. With a cached prefix, give its length and the blocks after it.
                self.ledger.pull(request.request_id, [(0, request.blocks)], timeout_s=10.0, hashes=hashes)
            else:
                self.ledger.cancel(request.request_id)
                computed.append(request)

        ready, self.ready = self.ready + computed, []
        told = self.ranks.step(
            self.ledger.take_orders(),
            compute=[(request.prompt, request.blocks) for request in computed],
            check=[(request.prompt, request.blocks) for request in ready],  # a real engine would generate tokens now
        )
        alive = [each[1] for each in told.values() if each is not None]
        for i, request in enumerate(ready):
            if len(alive) < len(told):
                self.ready.append(request)
                continue
            self.free += request.blocks
            source, is_right = "here" if request.why else "the prefill engine", all(right[i] for right in alive)
            told_of = {"from": source, "num_bytes": request.num_bytes, "why": request.why, "is_right": is_right}
            self.answer(request, told_of)
        for rank, each in told.items():
            if each is None:
                self.has_died(rank)
            else:
                self.ledger.update(rank, each[0])
        self.act()

    def act(self) -> None:
        """Act on the reports of the ranks."""
        outcome = self.ledger.take_outcome()
        for fetch in outcome.received:  # the bytes have arrived and are proven
            request = self.requests[fetch.request_id]
            request.num_bytes = sum(result.num_bytes for result in fetch.results.values())
            if fetch.num_tokens < len(request.prompt):
                self.free += request.blocks
                self.compute_here(request, f"only {fetch.num_tokens} tokens are those that were lent")
            else:
                self.ready.append(request)
        for fetch in outcome.failed:  # hide it from the client: compute the prompt here, in other blocks
            error = next(iter(fetch.errors.values()))
            why = f"{type(error).__name__}: {getattr(error, 'reason', '')}"
            self.compute_here(self.requests[fetch.request_id], why)
        for fetch in outcome.free:
            self.free += [block for _, blocks in fetch.groups for block in blocks if block is not None]
        for fetch in outcome.retired:
            print(f"decode: blocks {fetch.groups} are lost until this rank starts again", flush=True)

    def has_died(self, rank: int) -> None:
        """Replace a rank that has died by a new one, which joins in a later step; its part of all KV is lost."""
        print(f"decode: rank {rank} has died; it is started again", flush=True)
        self.ledger.rank_died(rank)
        for request in self.ready:
            self.free += request.blocks
            self.compute_here(request, "a rank of this engine has died")
        self.ready = []
        self.ranks.restart(rank)

    def compute_here(self, request: Request, why: str) -> None:
        """Queue a request so that this engine computes its KV."""
        request.why = why
        self.waiting.appendleft(request)

    def answer(self, request: Request, what: dict[str, object]) -> None:
        """Answer a request, and forget it."""
        del self.requests[request.request_id]
        request.call.answer.set_result(what)


if __name__ == "__main__":
    run_engine("decode", Scheduler, work, tp_size=1)
