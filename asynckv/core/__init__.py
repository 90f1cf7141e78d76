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
soon as they hold. `docs/structure.md` follows a request through these files.

Besides `rank`, the engine calls `rank.decode` (reports of the planes; posting; `cancel`, `forget`, `leave`) and
`rank.prefill.revoke`, empties `rank.outbox`, and answers questions (`rank.on_question`, `asynckv/account`). It makes
the `Lifecycle` itself.
"""
