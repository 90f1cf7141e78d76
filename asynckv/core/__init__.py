"""The protocol: who may read which blocks, when bytes are believed, and when memory is free again.

A decode engine reads KV out of a prefill engine's memory. The read is one-sided: its owner neither sees nor stops it. A
read of freed blocks succeeds and returns another request's KV. A read that has begun cannot be called back. The rules
that follow from these three facts are in `docs/design.md`, the words in `docs/glossary.md`, the states in
`docs/states.md` (drawn from the tables here).

Nothing here reads a clock, touches a socket, logs or awaits, or knows what a block holds. Calls, packets, ends of
transfers and the passing of time come in with `now` (seconds that only move forward). Messages and commands are left in
an outbox. `tests/test_imports.py` says which modules may be imported.

Five machines are tables: a lease, a pull, a peer, a request over its attempts, and the engine's life. `ON_EVENT` lists
the events that a state takes; any other raises before anything has changed. `WHEN` lists conditions that are acted upon
as soon as they hold.

A request's life
----------------

    prefill rank                                      decode rank
    scheduler   make_params: blocks, key, endpoints
                ------------- params, by way of a router ------------->
    prefill     lend: blocks into the ledger          attempts   one request, over its attempts: each is a pull
    lease       LENT                                  rank       pull: the blocks to fill into the ledger
                                                      routes     which remote ranks, cached per set of them
                                                      peer       Hello -> Welcome, once per start of a process
                                                      flow       its turn, within budgets
    lease       Claim -> Granted                      source     claim, then reads: one per remote rank
                (NotYet, parked, if it came early)
    lease       Renew -> Granted, till it is drained  pull       all reads done, each proven: COMPLETE, published
    lease       Release -> Ack, reader struck off     source     Release to every rank it answers for, read or not
    lease       RELEASED: nobody owed, nothing granted
    ledger      the blocks are the engine's again     ledger     the blocks are the caller's when nothing writes them

Three other lives:

- *The pull comes before the request is lent.* The claim is parked and answered `NotYet`. The pull stops posting, and
  goes back to its queue when nothing runs. Lending answers the claim. Bytes that had landed by then are read again.
- *The prefill process restarts between params and pull.* The params name the old incarnation, so the new process
  answers `restarted`, and the pull fails at once unless other ranks hold the same.
- *The pull is cancelled while it reads.* It waits in DRAINING for the transfers that run. Then its caller is told, and
  every rank is released. If something may still write, the blocks stay with the pull, in QUARANTINED.

Besides `rank`, the engine calls `rank.decode` (what the planes say; posting; `cancel`, `forget`, `leave`),
`rank.prefill.revoke` and `rank.inspect`, and empties `rank.outbox`. It makes the `Request`s and the `Lifecycle` itself.
"""
