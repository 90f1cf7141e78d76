"""The engine: one rank on an asyncio loop, between the pure core and the planes that touch the world.

Nothing is decided here: states and what follows from them are tables in `asynckv/core`. `Engine.pull` checks its
arguments and asks for a turn of the loop. The core leaves a claim and a read in its outbox. In that turn the driver
sends the claim and posts the read. Answer and end of the transfer come in as events; with the second of them the core
says that the pull has ended, and the driver wakes its caller.

All of it happens on one event loop. The core is never entered twice at once, and nothing here takes a lock.
"""

from asynckv.engine.engine import Engine
from asynckv.engine.lent import LentRequest
from asynckv.engine.offload import Offload

__all__ = ["Engine", "LentRequest", "Offload"]
