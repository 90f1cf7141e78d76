"""Inside an engine worker: orders and what comes of them, and the ways to run the engine beside a busy thread."""

from __future__ import annotations

from asynckv.embed.orders import Announce, Cancel, Discharge, Failed, Finished, Lend, Order, Pull, Refused, Withdraw
from asynckv.embed.thread import EngineThread

__all__ = [
    "Announce",
    "Cancel",
    "Discharge",
    "EngineThread",
    "Failed",
    "Finished",
    "Lend",
    "Order",
    "Pull",
    "Refused",
    "Withdraw",
]
