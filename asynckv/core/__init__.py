"""The protocol: which rank may read which blocks, when bytes are trusted, and when memory is free again.

A decode engine reads KV out of a prefill engine's memory. The read is one-sided: its owner neither sees nor stops it. A
read of freed blocks succeeds, but returns another request's KV. A read that has begun cannot be cancelled. The rules
that follow from these three facts are in `docs/design.md`, the words in `docs/glossary.md`, and the states in
`docs/structure.md` (generated from the tables here).

Nothing in this package reads a clock, touches a socket, logs or awaits, or knows the content of a block. Calls,
packets, ends of transfers and the passing of time come in with `now` (seconds that only move forward). The package
leaves messages and commands in an outbox. `tests/test_imports.py` says which modules it may import.

Five machines are tables: a lease, a pull, a peer, a request over its attempts, and the engine's life. `ON_EVENT` lists
the events that a state takes; any other event raises before anything has changed. `WHEN` lists conditions that act as
soon as they hold.

**From `pull` to the release.** A request passes through these files and functions:

1. *Begin.* `Engine.pull` calls `RankCore.pull` (`rank.py`), which makes a `Request` (`attempts.py`). `_attempt` checks
   the blocks and makes a `Pull` (`pull.py`) with a `Source` (`source.py`) for each prefill rank that this rank answers
   for (`Routes.answered_for`, `routes.py`). If any of this raises, nothing has begun.
2. *Meet.* `DecodeSide.start` (`decode.py`) has `Peers.meet` (`peers.py`) send a Hello to each rank to read that is not
   known, a few at a time, and writes the blocks into the `Ledger` (`ledger.py`). A Welcome becomes the command
   `LoadPeer` (`outbox.py`), and its end calls `load_ended`, where `_ready` continues all pulls that waited for the
   peer.
3. *Route.* Each rank that is ready is claimed at (`Pull.met`). Once all are, `_route` chooses what is read of which,
   and `Pull.routed` leads to QUEUED. The next request of the same ranks finds `Route.ready`, so that `start` does steps
   2 to 4 at once. A request that is announced (`RankCore.announce`) comes to its claims without blocks.
4. *Claim and queue.* `_carry_out` carries out the effects of each step of the pull in order. SEND lets `make_messages`
   claim; QUEUE asks `Admission` (`flow.py`) for a place. The driver (`engine/driver.py`) sends what is in the outbox
   before it posts, so that the claim travels ahead of the read.
5. *Read.* The driver calls `admit`, which plans the reads (`geometry/plan.py`) and leads to READING; then `next_read`
   as long as `Posting` has room. Ends of transfers come back to `DecodeSide.ended`, and so to `Pull.ended`.
6. *Grant.* On the prefill rank the claim meets `PrefillSide.receive` (`prefill.py`), which parks it while the request
   is not lent, and `Lease.receive` (`lease.py`), which binds the reader and grants. The answer comes to `Pull.answered`
   and `Source.granted`. Renewals follow until the outcome (`timers.py` wakes the pull).
7. *Prove.* When all reads have landed the pull is CONFIRMING. `Source.prove` compares the end of the read with the
   grants; `_ask_for_proof` claims once more if none covers it. What was read before it was lent is read again.
8. *Outcome.* NOTIFYING publishes: RETURN gives the blocks back, and TELL becomes `PullReached` and `RequestReached`, by
   which the driver tells the request's `Waiter` (`Engine.pull`, or the desk of `embed`). After a failure the pull is
   DRAINING until its reads have ended or `drain_s` is over. If another attempt may help, the request pauses
   (`Request.ended`), and `RankCore._go_on` begins the attempt once the blocks are back.
9. *Release.* Every source gets a Release, whether it was read or not, until it is acknowledged or given up
   (`Pull.tick`). On the prefill rank `everybody_has_released` ends the lease, and `_follow` frees the blocks. On this
   side the last `Pull.settled` leads to RELEASED and FINISH, or to QUARANTINED while a transfer may still write: then
   the blocks return with its end, or are retired after `held_s`.

Besides `rank`, the engine calls `rank.decode` (reports of the planes; posting; `forget`, `leave`) and `rank.prefill`
(`revoke`, `reclaim`, `unreachable`, copies), empties `rank.outbox`, and answers questions (`rank.on_question`,
`asynckv/account`). It makes the `Lifecycle` itself. An offload holds its blocks in `rank.ledger`.
"""
