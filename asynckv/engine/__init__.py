"""The engine: one rank on an asyncio loop, between the pure core and the planes that touch the world.

Nothing is decided in here. The states of an engine, a request or a pull, and what follows from what, are tables in
`asynckv/core`. The engine

- checks a call and hands it to the core;
- hands to the core whatever happens, with the time;
- does what the core wants done;
- tells callers that wait.

Where to look:

- `engine`: what its owner calls; how it starts.
- `ending`: how it ends: drained, suspended until it is resumed, or closed.
- `driver`: events in, commands out. Packets, ends of transfers and timers go to the core. Once per turn of the loop the
  driver does what the core has left in its outbox.
- `attempts`: how a caller waits for a pull, through one attempt or several, and what it is told.
- `lent`: a lent request in its owner's hands.
- `offload`: what its owner calls to keep blocks in host memory and files, and to load them. Behind it: `tiers` (how
  memory and files are opened and closed), `shelf` (where blocks are kept), `copying` (what is copied between that and
  the device), `mover` (hands to planes what catalogues want), `jobs` (who waits for that, and which blocks are in use),
  `lending` (stored blocks over the network), `figures` (counts).
- `observation`: what metrics and traces are told, and can ask.
- `lag`: how late the loop came.
- `home`: the event loop that an engine belongs to, and what a caller from elsewhere is told.

A call, from entry to exit:

1. `Engine.pull` checks its arguments and asks for a turn.
2. The core takes the request, and leaves a claim and a read in its outbox.
3. In the turn that follows the driver sends the claim and posts the read.
4. The answer and the end of the transfer come in as events.
5. When the second of them has come, the core says that the pull has ended, and the driver wakes its caller.

All of it happens on one event loop. The core is never entered twice at once, and nothing in here takes a lock.
"""

from asynckv.engine.engine import Engine
from asynckv.engine.lent import LentRequest
from asynckv.engine.offload import Offload

__all__ = ["Engine", "LentRequest", "Offload"]
