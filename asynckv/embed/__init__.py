"""Inside an engine's worker: orders and what comes of them (`orders`), and two ways to carry them out.

- `thread`: an engine on a thread and event loop of its own, usable from any thread. Most engines want this.
- `desk`: an engine on an event loop that is there already.

The scheduler's half is `ledgers`: which request has which blocks, and what every rank has said of it.
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
