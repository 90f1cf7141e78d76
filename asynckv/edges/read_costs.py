"""The costs of reads on this host, measured when a data plane starts: per descriptor, per byte read, per byte placed.

One agent of the process reads from another, so UCX chooses the transport that it chooses for other processes of this
host. Between hosts a network may cost more or less. The decision that follows (`asynckv/geometry/staging.py`) changes
only where direct and staged reads are about equally fast.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt

from asynckv.edges.agent import Agent
from asynckv.geometry.layout import Memory
from asynckv.geometry.staging import SLOT_BYTES, ReadCosts

PIECE = 256  # bytes: one token of one head of 128 elements of 2 bytes
NUM_PIECES = 256
ROUNDS = 3  # the fastest counts


def measure_costs(reader: Agent, owner: Agent) -> ReadCosts | None:
    """Measure with an agent that has staging memory and is not used yet; return None if it cannot read."""
    source = np.frombuffer(mmap.mmap(-1, SLOT_BYTES), np.uint8)
    source.fill(1)  # or the kernel's one page of zeros would be read
    memory = Memory(base=source.ctypes.data, length=SLOT_BYTES, device=0, kind="cpu")
    try:
        with owner.registered([memory]):
            reader.load(owner.info(), [memory])
            costs = _measure(reader, owner, memory)
            reader.drop(owner.name)
    except Exception:
        return None
    # A read that did not end may still write its slot.
    return costs if math.isfinite(sum(costs)) else None


def _measure(reader: Agent, owner: Agent, memory: Memory) -> ReadCosts:
    assert reader.stage is not None
    bases = reader.stage.memory.base, memory.base
    apart = np.arange(NUM_PIECES) * 2 * PIECE  # no two of them touch, so NIXL merges none
    whole = [_rows(base + np.zeros(1, np.int64), SLOT_BYTES) for base in bases]
    pieces = [_rows(base + apart, PIECE) for base in bases]
    one_s, many_s = (min(reader.time_read(owner, *rows) for _ in range(ROUNDS)) for rows in (whole, pieces))
    read_s = one_s / SLOT_BYTES
    descriptor_s = max(many_s / NUM_PIECES - PIECE * read_s, 0.0)
    place_s = min(reader.stage.time_placement(PIECE) for _ in range(ROUNDS))
    return ReadCosts(descriptor_s, read_s, place_s, SLOT_BYTES)


def _rows(addresses: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint64]:
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses, length
    return rows
