"""Your own engine: two workers, each a process with an EngineThread, and a scheduler with two ledgers."""

from multiprocessing.connection import Connection

import kv

from asynckv import DecodeLedger, EngineConfig, EngineThread, PrefillLedger, PrefillRanks


def worker(role: str, seed: int, pipe: Connection) -> None:
    tensors, registration = kv.memory(seed)
    with EngineThread(EngineConfig(engine_id=role), registration) as thread:
        pipe.send(thread.engine.endpoint)
        while (orders := pipe.recv()) is not None:
            thread.submit(orders)  # from here on nothing else may clear or copy into the blocks of these orders
            kv.forward()  # meanwhile the engine works in its thread
            pipe.send(thread.take_finished())
    pipe.send(kv.content(tensors, pipe.recv()))


def scheduler() -> None:
    prefill, decode = kv.start(worker, "prefill", 1), kv.start(worker, "decode", 2)
    loans, pulls = PrefillLedger(PrefillRanks("prefill", [prefill.recv()])), DecodeLedger(num_ranks=1)
    decode.recv()  # its endpoint, not needed because no engine reads from it
    params = loans.lend("r1", [(0, [3, 4, 9])], num_tokens=40)
    pulls.announce("r1", params)
    pulls.pull("r1", [(0, [7, 5, 6])])
    free, received = [], []
    while not (free and received):  # one step of each engine, mostly without new orders
        for rank, ledger in ((prefill, loans), (decode, pulls)):
            rank.send(ledger.take_orders())
            ledger.update(0, rank.recv())
        free += loans.take_free()
        received += pulls.take_outcome().received
    assert kv.end(prefill, [3, 4, 9]) == kv.end(decode, [7, 5, 6])
    print(received[0].results[0].num_bytes, "bytes,", free[0].ends[0].cause)


if __name__ == "__main__":
    scheduler()
