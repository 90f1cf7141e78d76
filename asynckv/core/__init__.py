"""The protocol: who may read which blocks, when bytes are believed, and when memory is free again.

A prefill engine has computed the KV of a prompt; a decode engine reads it out of the prefill engine's memory. The read
is one-sided, and that is what makes it hard:

- The owner of the memory neither sees the read nor can stop it.
- A read of blocks that were freed succeeds, and returns somebody else's KV.
- A read that was begun cannot be called back.

Everything in this folder follows from these three facts. Which bytes are read is the business of `asynckv/geometry`;
nothing in here knows what a block holds.

The ideas
---------

*Decide, then do.* Nothing in here reads a clock, touches a socket, logs or awaits. Calls, packets, ends of transfers
and the passing of time come in with `now` (seconds, of any epoch, that only move forward). Messages and commands come
out, left in an outbox. The engine drives the core with real planes; a simulator drives it with simulated ones, through
thousands of faulty days in a minute.

*Tables are the machine.* There are five machines: a lease, a pull, a peer, a request over its attempts, and the
engine's life. Each has a table of events, `ON_EVENT`; an event that it does not list raises before anything was
changed. A lease, a pull and a request also have a table of conditions, `WHEN`, which are acted upon as soon as they
hold. A transition of a pull or a lease returns its effects, and the caller carries them out; nobody searches the rest
of the rank for changes after an event. `docs/states.md` is drawn from the tables.

*A grant is a promise, and bytes need a proof.* The owner promises that blocks stay what they are for some seconds. The
reader counts these seconds from before it asked. It believes its bytes if every read had ended, by its own clock,
before the promise had. The claim travels beside the read, so the proof costs no time where all goes well.

*Sets of who, not counts of how many.* The readers that are owed a release are a set, and so are the holders of a block.
So a lost message is repeated, and a repeated, late or forged one changes nothing.

*Memory follows the writer.* The outcome of a pull is bounded in time. The custody of its blocks may not be. So the two
are separate events. Blocks go back to their owner when nothing can write them any more, and for no other reason.

*Every start of a process is somebody else.* It has an incarnation of its own, which is in everything that it says. A
message for a process that died is never taken by its successor.

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

- *The pull comes before the request is lent.* The claim finds no lease: it is parked and answered `NotYet`. The pull
  stops posting, and goes back to its queue when nothing runs. Lending answers the parked claim with a grant. If bytes
  had landed by then and cannot be shown to be younger than the lease, they are read again.
- *The prefill process restarts between params and pull.* The params name the old incarnation, so every message is for
  that one. The new process answers `Unwelcome` or `Refused`, with the reason `restarted`; the peer is GONE, and the
  pull fails at once unless other ranks hold the same. With the same params no attempt can do better; with new ones it
  may.
- *The pull is cancelled while it reads.* Nothing more is posted, and the pull waits in DRAINING for the transfers that
  run, until its deadline and for `drain_s` at most. Then its caller is told, and every rank is released. If something
  may still write, the blocks stay with the pull, in QUARANTINED in the end, until there is evidence that nothing can.

Other ends: a lease expires or is revoked (its grants are kept); a pull fails (it drains as if it were cancelled) or
runs out of time (then it waits for nothing); a peer is lost, with the pulls that still need it.

Where to look
-------------

- `rank` is one rank put together: calls, packets and time enter there.
- Lending: `prefill` (all leases, what came early, what has ended), `lease` (one lent request), `spent` (which keys were
  used), `readers` (who shook hands with us).
- Reading: `decode` (the side put together), `attempts` (one request over its attempts), `pull` (one attempt), `source`
  (one remote rank of one attempt), `routes` (which those are), `peers` (all that were met), `peer` (one start of one
  remote process), `flow` (who reads next).
- Evidence: `events`, what the data plane says of a transfer; blocks return on no other ground.
- Both sides: `ledger` (who holds which block), `limits` (how often), `timers` (when to wake whom), `lifecycle` (the
  engine's own states), `inspect` (who holds what; what does not add up), `survey` (the same for somebody who asks from
  outside, a slice at a time), `watch` (what has been held for long).
- In and out: `types` (names, keys, reasons), `wire` (what ranks say, and the one decoder), `account` (what a rank says
  of itself to people and tools), `outbox` (what is to be done).

The engine does not only talk to `rank`. It also reaches these parts:

- `rank.decode`: what the planes say (of transfers `ended`, `destroyed`; of peers `loaded`, `load_failed`; of addresses
  `hint`, `refused`), when there is time to post (`admit`, `next_read`, `spent`), and that an attempt or a peer is given
  up (`cancel`, `forget`, `leave`);
- `rank.prefill`: `revoke`;
- `rank.inspect`: all questions;
- `rank.outbox`: it is emptied.

The `Request` of `attempts` and the `Lifecycle` are made and driven by the engine itself.

Words
-----

- *place*: address and incarnation of a remote rank: one start of one process. (In a list of blocks, `asynckv/geometry`
  calls the positions places.)
- *route*: the ranks of one prefill group that this reader answers for. *Source*: one of them in one attempt. *Peer*:
  one start of a remote process, for all attempts.
- *reader*: a decode rank, as the lease sees it. *Cohort*: the ranks of one decode engine that read a request
  together.
- *claim*: ask for a promise. *Grant*: the promise, for some seconds. *Renew*: ask again before it ends.
- *covered*: a grant runs. *Proven*: the bytes are known to be what was lent.
- *release*: the message that one attempt is over, to every rank of its route. *Owed*: a reader whose last release is
  still awaited.
- *discharge*: to strike a reader off: it released and will not try again. A pull that only says so is one, too.
- *settled*, of a source: its rank needs no release any more (acknowledged, refused, gone, or given up).
- *RELEASED*: of a pull, everybody was told and nothing can write its blocks (`released_at` is when everybody was told,
  which may be earlier); of a lease, all readers are discharged and no grant runs.
- *parked*: a claim or release that came before its request was lent. *Spent*: a key that is never lent again.
- *in doubt*: a transfer failed and may still write. *Quarantined*: blocks that wait for evidence after their pull has
  failed. *Retired*: they have waited for `held_s`, and are given up for this process.
- *flow*, *line*: who reads from one prefill engine, and from one peer. *Set aside*: nothing comes from the peer, and it
  takes no room from others.
- *history*: what happened to a pull or lease, with times. *Traced*: logged entry by entry. *Sampled*: a lease whose
  life is logged though nothing is wrong with it.

What the core does not know
---------------------------

What a block holds and where its bytes lie (`asynckv/geometry`); how bytes and messages travel (`asynckv/edges`); what
time it is; which blocks are free (the engine has that list); and how people are told (`asynckv/observe`).
`tests/test_imports.py` says which modules may be imported.
"""
