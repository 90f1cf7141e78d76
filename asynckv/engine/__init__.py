"""The engine's room: one rank on an asyncio loop, between the pure core and the planes that touch the world.

Nothing is decided in here. A call is checked and handed to the core; whatever happens is handed to the core with the
time; what the core wants is done; and whoever waits is told. Which states an engine, a request or a pull can be in, and
what follows from what, are tables in `asynckv/core`.

- `engine`: what its owner calls; how it starts.
- `ending`: how it ends: drained, suspended until it is resumed, or closed.
- `driver`: events in, commands out: packets, ends of transfers and timers go to the core, and once per turn of the loop
  the driver does what the core has left in its outbox.
- `attempts`: how a caller waits for a pull, through one attempt or several, and what it is told.
- `lent`: a lent request in its owner's hands.
- `offload`: blocks that go to host memory and files, and come back: what its owner calls. `tiers`: how their memory and
  files are opened and let go of; `shelf`: where blocks are kept; `copying`: what is copied between that and the device;
  `mover`: what catalogues want is handed to planes; `jobs`: who waits for that, and which blocks are in use; `lending`:
  stored blocks over the network; `figures`: what is told.
- `lag`: how late the loop came.
- `home`: the event loop that an engine belongs to, and what is said to whoever calls from elsewhere.

A call, from entry to exit: `Engine.pull` checks its arguments and asks for a turn; the core takes the request, and
leaves a claim and a read in its outbox. In the turn that follows the driver sends the one and posts the other. The
answer and the end of the transfer come in as events; when the second of them has come, the core says that the pull has
ended, and the driver wakes its caller.

All of it happens on one event loop. The core is never entered twice at once, and nothing in here takes a lock.
"""

from asynckv.engine.engine import Engine
from asynckv.engine.lent import LentRequest
from asynckv.engine.offload import Offload

__all__ = ["Engine", "LentRequest", "Offload"]
