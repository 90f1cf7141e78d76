"""asyncio: prefill, decode and scheduler in three processes. A worker's steps run in a thread next to its loop."""

import asyncio
from multiprocessing.connection import Connection

import kv

from asynckv import Announce, Engine, EngineConfig, EngineDesk, Lend, PrefillRanks, Pull


async def worker(role: str, seed: int, pipe: Connection) -> None:
    tensors, registration = kv.memory(seed)
    async with Engine(EngineConfig(engine_id=role), registration) as engine:
        desk = EngineDesk(engine)
        pipe.send(engine.endpoint)
        while (orders := await asyncio.to_thread(pipe.recv)) is not None:
            desk.submit(orders)  # from here on nothing else may clear or copy into the blocks of these orders
            await asyncio.to_thread(kv.forward)
            pipe.send(desk.take_finished())
    pipe.send(kv.content(tensors, pipe.recv()))


def scheduler() -> None:
    prefill, decode = kv.start(worker, "prefill", 1), kv.start(worker, "decode", 2)
    group, _ = PrefillRanks("prefill", [prefill.recv()]), decode.recv()
    params = group.make_params("r1", [(0, [3, 4, 9])], num_tokens=40, written=True)
    prefill.send([Lend(params)])
    decode.send([Announce("r1", params), Pull(request_id="r1", groups=[(0, [7, 5, 6])], params=params)])
    lent, pulled = prefill.recv(), decode.recv()
    while not (lent.finished_sending and pulled.finished_recving):
        for each in (prefill, decode):
            each.send([])  # a step without new orders
        lent, pulled = prefill.recv() or lent, decode.recv() or pulled
    assert kv.end(prefill, [3, 4, 9]) == kv.end(decode, [7, 5, 6])
    print(pulled.finished_recving[0].num_bytes, "bytes,", lent.finished_sending[0].cause)


if __name__ == "__main__":
    scheduler()
