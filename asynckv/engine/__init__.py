"""The engine: one rank on an asyncio loop, between the pure core and the planes that do input and output.

No decision is made here, because states and transitions are tables in `asynckv/core`. For example, `Engine.pull` checks
its arguments and schedules a turn of the loop. The core puts a claim and a read into its outbox, and in that turn the
driver sends the claim and posts the read. The answer and the end of the transfer arrive as events. After the second of
them the core reports that the pull has ended, and the driver wakes its caller.

Everything runs on one event loop, so the core is never entered twice at once, and takes no lock (`observation.py` has
one, for readers on other threads).
"""

from asynckv.engine.engine import Engine
from asynckv.engine.lent import LentRequest

__all__ = ["Engine", "LentRequest"]
