"""What the data plane says of transfers.

A transfer is one read that was handed to the data plane. A block may be used again only once nothing can write it any
more. `DONE`, `FAILED` and `REFUSED` prove that; `IN_DOUBT` says nothing of its bytes.
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
    transfer_id: TransferId
    ending: Ending
    cause: str = ""
    peer_lost: bool = False
    """The failure says that the remote process is gone."""
