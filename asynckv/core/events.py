"""What the data plane tells of transfers: one fact, one name, on both sides of the port.

A transfer is one read that was handed to the data plane under a `TransferId`. What is heard of it afterwards is a
`TransferEnded`: the plane makes it, the engine passes it on as it is, and the core acts on it. What matters most
in it is evidence. A block may be used again only once nothing can write it any more, and only `DONE`, `FAILED` and
`REFUSED` say that; `IN_DOUBT` says that a transfer is in trouble and says nothing of its bytes.

A plane may also lose its whole agent and get another one; those events are the port's (`asynckv/ports.py`), because
only the engine hears of them.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from asynckv.core.types import TransferId, members


class Ending(enum.StrEnum):
    """What is known about a transfer that is no longer simply running."""

    DONE = "done"
    """All bytes are in place."""
    FAILED = "failed"
    """It failed, and it is proven that nothing will be written any more."""
    IN_DOUBT = "in_doubt"
    """It failed, but it may still write. `DONE` or `FAILED` may follow, or nothing at all."""
    REFUSED = "refused"
    """It was not posted, because no descriptor lists can be prepared for its table; nor can any other read of it be."""


ENDING = members(Ending)


class TransferEnded(NamedTuple):
    """A transfer has ended, or is in doubt."""

    transfer_id: TransferId
    ending: Ending
    cause: str = ""
    peer_lost: bool = False
    """The failure says that the remote process is gone."""
