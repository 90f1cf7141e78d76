"""The protocol room: who may read which blocks, when bytes are believed, and when memory is free again.

A prefill engine has computed the KV of a prompt; a decode engine reads it out of its memory. The read is one-sided: the
owner neither sees nor stops it, a read of blocks that were freed succeeds and returns somebody else's KV, and a read
that was begun cannot be called back. Everything in here follows from that. It is kept apart from `asynckv/geometry`,
which knows which bytes to read and nothing of messages; here nobody knows what a block holds.

The few ideas
-------------

*Decide, then do.* Nothing in here reads a clock, touches a socket, logs or awaits. Calls, packets, ends of transfers
and the passing of time come in with `now` (seconds, of any epoch, that only move forward); messages and commands come
out, left in an outbox. The engine drives it with real planes, a simulator drives it with simulated ones through
thousands of faulty days in a minute, and neither decides anything.

*Tables are the machine.* A lease, a pull, a peer, a request over its attempts and the engine's life have one table
each. It is looked into whenever something happens: what it does not list raises before anything was changed. A
transition returns its effects, and whoever asked for it sees to them; nobody looks over the whole world after every
event.

*A grant is a promise, and bytes need a proof.* The owner promises that blocks stay what they are for some seconds; the
reader counts these seconds from before it asked. It believes its bytes if every read had ended, by its own clock,
before the promise had. The claim travels beside the read, so that a proof costs no time where all goes well.

*Sets of who, not counts of how many.* Who is owed a release is a set of readers, who holds a block a set of holders. So
a message that is lost is repeated, and one that is repeated, late or forged changes nothing.

*Memory follows the writer.* The outcome of a pull, which is bounded in time, and the custody of its blocks, which may
not be, are two events. Blocks go back to their owner when nothing can write them any more, and on no other ground.

*Every start of a process is somebody else.* It has an incarnation of its own, which is in everything that it says; what
was written for a process that died is never taken by its successor.

A request's life
----------------

    prefill rank                                      decode rank
    scheduler   make_params: blocks, key, endpoints
                ------------- params, by way of a router ------------->
    prefill     lend: blocks into the ledger          rank       pull: the blocks to fill into the ledger
    lease       LENT                                  attempts   one request, over its attempts
                                                      routes     which remote ranks, cached per set of them
                                                      peer       Hello -> Welcome, once per start of a process
                                                      flow       its turn, within budgets
    lease       Claim -> Granted                      source     claim, then reads: one per remote rank
                (NotYet, parked, if it came early)
    lease       Renew -> Granted, till it is drained  pull       all reads done, each proven: COMPLETE, published
    lease       Release -> Ack, reader struck off     source     Release to every rank it answers for, read or not
    lease       RELEASED: nobody owed, nothing granted
    ledger      the blocks are the engine's again     ledger     the blocks are the caller's when nothing writes them

It may end otherwise at any place: a lease expires or is revoked (its grants are kept), a pull fails, is cancelled or
runs out of time (it drains first, and its blocks may be quarantined), a peer is lost, a process starts anew.

Where to look
-------------

- `rank` is one rank put together, and the only entrance: calls and packets in, outbox out.
- Lending: `prefill` (all leases, what came early, what has ended), `lease` (one lent request), `spent` (which keys were
  used), `readers` (who shook hands with us).
- Reading: `decode` (the side put together), `attempts` (one request over its attempts), `pull` (one attempt), `source`
  (one remote rank of one attempt), `routes` (which those are), `peers` (all that were met), `peer` (one start of one
  remote process), `flow` (who reads next).
- Both: `ledger` (who holds which block), `limits` (how often), `timers` (when to wake whom), `lifecycle` (the engine's
  own states), `inspect` (who holds what; what does not add up), `watch` (what has been held for long).
- At the door: `types` (names, keys, reasons), `wire` (what ranks say, and the one decoder), `outbox` (what is to be
  done).

What it refuses to know
-----------------------

What a block holds and where its bytes lie (`asynckv/geometry`); how bytes and messages travel (`asynckv/edges`); what
time it is; which blocks are free, for the engine owns the list of those; and what a person would like to be told
(`asynckv/observe`). `tests/test_imports.py` says which modules may be imported.
"""
