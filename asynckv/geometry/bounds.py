"""Bounded numbers and block runs that both pure rooms (geometry and core) use.

Messages from the wire are checked against these types while they are decoded. The bounds are larger than anything real,
and small enough that no product of two of them leaves 64 bits unseen.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from asynckv.arguments import MAX_NAME

MAX_RANKS = 65_536
MAX_GROUPS = 64
MAX_VIEWS = 2048
MAX_RUNS = 1 << 17  # per request, in all groups: two groups of a million tokens in scattered blocks of 16
MAX_TOKENS = 1 << 40
MAX_BLOCK_ID = (1 << 31) - 1
MAX_BYTES = 1 << 56
MAX_DESCRIPTORS = (1 << 31) - 1  # NIXL's prepared lists are indexed with int32
NULL = -1  # a placeholder for a place without a block: outside a sliding window, or a state that was not kept
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Size = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
BlockId = Annotated[int, Meta(ge=NULL, le=MAX_BLOCK_ID)]
Count = Annotated[int, Meta(ge=1, le=MAX_BLOCK_ID)]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class BlockRuns(Struct, frozen=True, array_like=True, gc=False):
    """The blocks of one group as runs of consecutive ids, and the tokens they cover.

    Attributes:
        first_token: First token that the list is valid for. The first block of the list is the one
            that holds it, so `first_token` need not be a multiple of the block size.
        runs: `(first block id, number of blocks)` in token order; with a first id of `NULL` it is that
            number of placeholders.
    """

    first_token: Tokens
    runs: Annotated[tuple[tuple[BlockId, Count], ...], Meta(max_length=MAX_RUNS)]
