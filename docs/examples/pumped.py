"""EnginePump: prefill, decode and scheduler, each a process of its own. A worker has one thread."""

from multiprocessing.connection import Connection

import kv

from asynckv import Announce, EngineConfig, EnginePump, Lend, PrefillGroup, Pull


def worker(role: str, seed: int, pipe: Connection) -> None:
    tensors, registration = kv.memory(seed)
    with EnginePump(EngineConfig(engine_id=role), registration) as engine:
        pipe.send(engine.engine.endpoint)
        while (orders := pipe.recv()) is not None:
            engine.submit(orders)
            kv.forward()  # nothing happens meanwhile
            engine.pump(budget_s=0.002)
            pipe.send(engine.take_finished())
    pipe.send(kv.content(tensors, pipe.recv()))


def scheduler() -> None:
    prefill, decode = kv.start(worker, "prefill", 1), kv.start(worker, "decode", 2)
    group, _ = PrefillGroup("prefill", [prefill.recv()]), decode.recv()
    params = group.make_params("r1", [(0, [3, 4, 9])], num_tokens=40, written=True)
    prefill.send([Lend(params)])
    decode.send([Announce("r1", params), Pull(request_id="r1", groups=[(0, [7, 5, 6])], params=params)])
    lent, pulled = prefill.recv(), decode.recv()
    while not (lent.sent and pulled.received):
        for each in (prefill, decode):
            each.send([])  # a step in which nothing new is asked for
        lent, pulled = prefill.recv() or lent, decode.recv() or pulled
    assert kv.end(prefill, [3, 4, 9]) == kv.end(decode, [7, 5, 6])
    print(pulled.received[0].num_bytes, "bytes,", lent.sent[0].cause)


if __name__ == "__main__":
    scheduler()
