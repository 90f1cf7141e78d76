"""The protocol: who may read which blocks, when bytes are believed, and when memory is free again.

A decode engine reads KV out of a prefill engine's memory. The read is one-sided: its owner neither sees nor stops it. A
read of freed blocks succeeds and returns another request's KV. A read that has begun cannot be called back. The rules
that follow from these three facts are in `docs/design.md`, the words in `docs/glossary.md`, the states in
`docs/structure.md` (drawn from the tables here).

Nothing here reads a clock, touches a socket, logs or awaits, or knows what a block holds. Calls, packets, ends of
transfers and the passing of time come in with `now` (seconds that only move forward). Messages and commands are left in
an outbox. `tests/test_imports.py` says which modules may be imported.

Five machines are tables: a lease, a pull, a peer, a request over its attempts, and the engine's life. `ON_EVENT` lists
the events that a state takes; any other raises before anything has changed. `WHEN` lists conditions that are acted upon
as soon as they hold.

`docs/structure.md` follows a request through these files.

Besides `rank`, the engine calls `rank.decode` (what the planes say; posting; `cancel`, `forget`, `leave`),
`rank.prefill.revoke` and `rank.inspect`, and empties `rank.outbox`. It makes the `Request`s and the `Lifecycle` itself.
"""
