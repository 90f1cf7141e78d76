"""Embed asynckv in an engine's worker: orders and their results (`orders`), and two ways to carry them out.

- `thread`: an engine on its own thread and event loop, usable from any thread. Most engines want this.
- `desk`: an engine on an event loop that already runs.

The scheduler's half is `ledgers`, which records the blocks of each request and the reports of every rank.
"""

from __future__ import annotations

from asynckv.embed.desk import EngineDesk as EngineDesk
from asynckv.embed.ledgers import DecodeLedger as DecodeLedger
from asynckv.embed.ledgers import PrefillLedger as PrefillLedger
from asynckv.embed.orders import Announce as Announce
from asynckv.embed.orders import Cancel as Cancel
from asynckv.embed.orders import Failed as Failed
from asynckv.embed.orders import Finished as Finished
from asynckv.embed.orders import Lend as Lend
from asynckv.embed.orders import Load as Load
from asynckv.embed.orders import Lookup as Lookup
from asynckv.embed.orders import Order as Order
from asynckv.embed.orders import Pull as Pull
from asynckv.embed.orders import Reclaim as Reclaim
from asynckv.embed.orders import Refused as Refused
from asynckv.embed.orders import Store as Store
from asynckv.embed.orders import Withdraw as Withdraw
from asynckv.embed.thread import EngineThread as EngineThread
