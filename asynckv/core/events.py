"""Reports of the data plane about transfers.

A transfer is one read that was handed to the data plane. A block may be used again only once nothing can write it any
more. `DONE`, `FAILED`, `REFUSED` and `DETACHED` prove that. `IN_DOUBT` says nothing about its bytes.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from asynckv.core.types import TransferId, members
from asynckv.geometry.look import Difference


class Ending(enum.StrEnum):
    """The known end of a transfer, or the doubt about it."""

    DONE = "done"  # all bytes are in place
    FAILED = "failed"  # the transfer failed, and it is proven that it writes nothing any more
    IN_DOUBT = "in_doubt"  # the transfer failed, but may still write; `DONE` or `FAILED` may follow, or nothing at all
    DETACHED = "detached"
    """The transfer is staged, and places nothing any more, but may still write its slot of staging memory. So its
    blocks are free, and its peer is not. `FAILED` or `DONE` may follow, or nothing at all."""
    REFUSED = "refused"
    """The transfer was not posted, because no descriptor lists can be prepared for its table. The same holds for all
    other reads of that table."""


ENDING = members(Ending)


class TransferEnded(NamedTuple):
    transfer_id: TransferId
    ending: Ending
    cause: str = ""
    peer_lost: bool = False  # True if the failure says that the remote process is gone
    difference: Difference | None = None  # of a look that is done
