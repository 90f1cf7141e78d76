"""The prefill engine: its scheduler, and by default two workers. It has a `PrefillGroup`, and no `Engine`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from scenery import BLOCK_SIZE, NUM_BLOCKS, Call, Ranks, blocks_of, run_engine
from worker import work

from asynckv import Finished, Lend, Order, PrefillGroup, Withdraw, token_hashes


@dataclass
class Lent:
    """A request that was computed, and whose blocks are not this engine's to use."""

    params: dict[str, Any]
    blocks: list[int]
    lent_by: set[int]
    """Ranks on which the loan has not ended."""


class Scheduler:
    """Decides once per step what happens on all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.group = ranks, PrefillGroup("prefill", ranks.endpoints)
        self.free = list(range(NUM_BLOCKS))
        self.waiting = deque[Call]()
        self.lent: dict[str, Lent] = {}
        self.orders: list[Order] = []
        """For the next step."""

    def take(self, call: Call) -> None:
        """Take a call of the router."""
        request_id = call.body.get("request_id", "")
        waiting = [each for each in self.waiting if each.body["request_id"] == request_id]
        if call.path == "/prefill":
            if waiting or request_id in self.lent:  # an id names one request at a time: `sent` tells nothing but the id
                call.answer.set_result({"error": f"{request_id!r} is under way"})
                return
            self.waiting.append(call)
            return  # answered when the prompt is computed
        if call.path == "/abort" and waiting:
            self.waiting.remove(waiting[0])
            waiting[0].answer.set_result({"error": "aborted"})
        elif call.path == "/abort" and request_id in self.lent:
            # The params have left. Whoever comes with them is refused from now on, and the blocks come back when
            # nobody is in the middle of a read. Without this they would come back when the lease ends, after 30 s.
            self.orders.append(Withdraw(self.lent[request_id].params))
        call.answer.set_result({"free_blocks": len(self.free)})

    def step(self) -> None:
        """Make one step on all ranks."""
        batch: list[tuple[Call, list[int]]] = []
        while self.waiting and blocks_of(self.waiting[0].body["prompt"]) <= len(self.free):
            call = self.waiting.popleft()
            count = blocks_of(call.body["prompt"])
            batch.append((call, self.free[:count]))
            del self.free[:count]

        orders, self.orders = self.orders, []
        told = self.ranks.step(orders, compute=[(call.body["prompt"], blocks) for call, blocks in batch])
        for rank, each in enumerate(told):
            if each is None:
                self.has_died(rank)
            else:
                self.take_finished(rank, each[0])
        if None in told:  # a rank's part of this KV is lost: compute it again, when there is another rank
            for call, blocks in reversed(batch):
                self.free += blocks
                self.waiting.appendleft(call)
            return

        for call, blocks in batch:
            # The KV is in the blocks of all ranks. The params are for everybody: each rank lends by them in the next
            # step, and the decode engine pulls by them. They are plain data, so they may travel as JSON.
            request_id, prompt = call.body["request_id"], call.body["prompt"]
            # The hashes say which prompt the KV is of: the decode engine compares them with its own.
            params = self.group.make_params(
                request_id,
                [(0, blocks)],
                num_tokens=len(prompt),
                written=True,
                hashes=token_hashes(prompt, BLOCK_SIZE),
                hash_tokens=BLOCK_SIZE,
            )
            self.orders.append(Lend(params))
            self.lent[request_id] = Lent(params, blocks, set(range(len(told))))
            call.answer.set_result({"params": params})

    def take_finished(self, rank: int, finished: Finished) -> None:
        """Hear what has ended on one rank."""
        for end in finished.sent:  # read, withdrawn or expired: `end.cause`
            if end.cause != "closed":  # the engine was closed too soon: a reader may still read until the process ends
                self.has_ended(rank, end.request_id)
        for refused in finished.refused:
            if isinstance(refused.order, Lend):
                # Nothing is lent on this rank. Tell readers so; they would wait until their deadlines.
                self.orders.append(Withdraw(refused.order.params))
                self.has_ended(rank, refused.order.params["request_id"])

    def has_died(self, rank: int) -> None:
        """Go on without a rank that has died, and with another in its place.

        Its part of every request is lost, so no request can be read whole any more. It will tell nothing, and nothing
        can read its memory: its loans are over. On the other ranks a reader may be in the middle of a read. They tell
        in `sent` when it is over.
        """
        print(f"prefill: rank {rank} has died; it is started again", flush=True)
        for request_id, lent in list(self.lent.items()):
            self.orders.append(Withdraw(lent.params))
            self.has_ended(rank, request_id)
        self.ranks.restart(rank)
        self.group = PrefillGroup("prefill", self.ranks.endpoints)  # readers meet the new rank by the next params

    def has_ended(self, rank: int, request_id: str) -> None:
        """Give blocks back when they are lent by no rank: all ranks use the same block ids."""
        lent = self.lent[request_id]
        lent.lent_by.discard(rank)
        if not lent.lent_by:
            self.free += lent.blocks
            del self.lent[request_id]


if __name__ == "__main__":
    run_engine("prefill", Scheduler, work, tp_size=2)
