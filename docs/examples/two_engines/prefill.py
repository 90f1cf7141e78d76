"""The prefill engine: a scheduler and, by default, two workers. The scheduler has a ledger, but no `Engine`."""

from __future__ import annotations

from collections import deque

from scenery import BLOCK_SIZE, NUM_BLOCKS, Call, Ranks, blocks_of, run_engine
from worker import work

from asynckv import PrefillLedger, PrefillRanks, token_hashes


class Scheduler:
    """Decide once per step for all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.ledger = ranks, PrefillLedger(PrefillRanks("prefill", ranks.endpoints))
        self.free = list(range(NUM_BLOCKS))
        self.waiting = deque[Call]()

    def take(self, call: Call) -> None:
        """Accept a call of the router."""
        request_id = call.body.get("request_id", "")
        if call.path == "/prefill":
            self.waiting.append(call)
            return  # answered when the prompt is computed
        waiting = [each for each in self.waiting if each.body["request_id"] == request_id]
        if call.path == "/abort" and waiting:
            self.waiting.remove(waiting[0])
            waiting[0].answer.set_result({"error": "aborted"})
        elif call.path == "/abort":
            # The params are already at the router. From now on readers are refused, and the blocks are free when no
            # reader is in the middle of a read. Without this they would be free when the lease ends, after 30 s.
            self.ledger.withdraw(request_id)
        call.answer.set_result({"free_blocks": len(self.free)})

    def step(self) -> None:
        """Run one step on all ranks. While one is being restarted, prompts wait, and all else goes on."""
        for rank in self.ranks.started():
            self.ledger.rank_joined(rank, self.ranks.endpoints[rank])
        batch: list[tuple[Call, list[int]]] = []
        while self.ranks.is_whole and self.waiting and blocks_of(self.waiting[0].body["prompt"]) <= len(self.free):
            call = self.waiting.popleft()
            count = blocks_of(call.body["prompt"])
            batch.append((call, self.free[:count]))
            del self.free[:count]

        told = self.ranks.step(
            self.ledger.take_orders(), compute=[(call.body["prompt"], blocks) for call, blocks in batch]
        )
        for rank, each in told.items():
            if each is None:
                self.has_died(rank)
            else:
                self.ledger.update(rank, each[0])
        # Read, withdrawn or expired. With a prefix cache a block is in several loans: count them, and free it at 0.
        for loan in self.ledger.take_free():
            self.free += [block for _, blocks in loan.groups for block in blocks if block is not None]
        if None in told.values():  # a rank's part of this KV is lost, so compute it again on a new rank
            for call, blocks in reversed(batch):
                self.free += blocks
                self.waiting.appendleft(call)
            return

        for call, blocks in batch:
            # The KV is in the blocks of all ranks now. The params are plain data that JSON can carry. The hashes
            # identify the prompt: the decode engine compares them with those of its own.
            prompt = call.body["prompt"]
            hashes = token_hashes(prompt, BLOCK_SIZE)
            params = self.ledger.lend(
                call.body["request_id"], [(0, blocks)], len(prompt), hashes=hashes, hash_tokens=BLOCK_SIZE
            )
            call.answer.set_result({"params": params})

    def has_died(self, rank: int) -> None:
        """Replace a rank that has died by a new one, which joins in a later step."""
        print(f"prefill: rank {rank} has died; it is started again", flush=True)
        self.ledger.rank_died(rank)
        self.ranks.restart(rank)


if __name__ == "__main__":
    run_engine("prefill", Scheduler, work, tp_size=2)
