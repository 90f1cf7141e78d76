"""Inside an engine's worker: orders and what comes of them, and two ways to run the engine beside a model's steps.

A worker is a loop of steps on a busy thread, and a scheduler decides once per step what is to happen. So a step hands
over a list of orders (`orders`) and takes a `Finished`, whichever way the engine runs:

- `thread`: on a thread and event loop of its own, usable from any thread. What most engines want.
- `desk`: on an event loop that is there already, beside whatever else runs on it; the other is built on it.

The scheduler's half is `ledgers`: which request has which blocks, and what every rank has said of it.

`bell` is how one thread wakes another without giving it Python's lock.
"""

from __future__ import annotations

from asynckv.embed.desk import EngineDesk
from asynckv.embed.ledgers import DecodeLedger, PrefillLedger
from asynckv.embed.orders import (
    Announce,
    Cancel,
    Failed,
    Finished,
    Lend,
    Load,
    Lookup,
    Order,
    Pull,
    Reclaim,
    Refused,
    Store,
    Withdraw,
)
from asynckv.embed.thread import EngineThread

__all__ = [
    "Announce",
    "Cancel",
    "DecodeLedger",
    "EngineDesk",
    "EngineThread",
    "Failed",
    "Finished",
    "Lend",
    "Load",
    "Lookup",
    "Order",
    "PrefillLedger",
    "Pull",
    "Reclaim",
    "Refused",
    "Store",
    "Withdraw",
]
