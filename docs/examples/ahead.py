"""A head start, in three processes: finished chunks of a prompt travel while the next ones are computed."""

import secrets

import kv
from native import worker

from asynckv import PieceSizes, PrefillRanks
from asynckv.embed import DecodeLedger, PrefillLedger

THEIRS, OURS = list(range(32)), list(range(32, 64))  # blocks of 16 tokens, on either side
TOKENS, CHUNK = 512, 32


def schedulers() -> None:
    prefill, decode = kv.start(worker, "prefill", 1), kv.start(worker, "decode", 2)
    endpoints = [prefill.recv()]
    lender, reader = PrefillLedger(PrefillRanks("prefill", endpoints)), DecodeLedger(1)
    decode.recv()

    # A router sends both legs at once, with one ticket.
    ticket = secrets.token_hex(16)
    assert lender.take_ticket(ticket)
    follow = {"ticket": ticket, "engine_id": "prefill", "tp_size": 1, "pp_size": 1, "endpoints": endpoints}
    fetch, sizes = reader.follow("r1", follow, takes_pieces=True), PieceSizes()
    assert fetch is not None
    computed, received, free = 0, [], []
    while not (received and free):
        prefill.send(lender.take_orders())
        decode.send(reader.take_orders())
        lender.update(0, prefill.recv())  # here each worker has made a step
        reader.update(0, decode.recv())
        free += lender.take_free()
        if computed < TOKENS:
            computed += CHUNK
            # `followed` has the ticket once the reader waits for a piece.
            if piece := sizes.take(computed, TOKENS, is_followed=ticket in lender.followed):
                blocks = THEIRS[piece.start // 16 : piece.stop // 16]
                lender.lend_piece("r1", ticket, [(piece.start, blocks)], piece.stop)
            if computed == TOKENS:
                lender.lend("r1", [(0, THEIRS)], TOKENS, ticket=ticket)
        if fetch.piece is not None and not fetch.groups:
            reader.start_early("r1", [(0, OURS)])
        elif reader.may_pull("r1"):
            reader.pull("r1", [(0, OURS)])
        outcome = reader.take_outcome()
        assert not outcome.failed
        received += outcome.received
    result = fetch.results[0]
    assert kv.end(prefill, THEIRS) == kv.end(decode, OURS)
    print(f"{result.piece_bytes} bytes in pieces, then {result.num_bytes} bytes, {free[0].ends[0].cause}")


if __name__ == "__main__":
    schedulers()
