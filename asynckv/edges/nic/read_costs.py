"""The costs of reads on this host, measured when a data plane starts: per descriptor, per byte read, per byte placed.

One agent of the process reads from another, so UCX chooses the transport that it chooses for other processes of this
host. Between hosts a network may cost more or less. The decision that follows (`asynckv/geometry/staging.py`) changes
only where direct and staged reads are about equally fast.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from asynckv.edges.nic.agent import Agent, byte_ranges
from asynckv.geometry.layout import Memory
from asynckv.geometry.staging import SLOT_BYTES, ReadCosts

PIECE = 256  # bytes: one token of one head of 128 elements of 2 bytes
NUM_PIECES = 256
ROUNDS = 3  # the fastest counts


_kept: list[npt.NDArray[np.uint8]] = []  # memory that a read may still read, because it took too long


def measure_costs(reader: Agent, owner: Agent) -> ReadCosts | None:
    """Measure with an agent that has staging memory and is not used yet.

    Return None if a read fails or takes too long. It may then still write staging memory, so nothing may be staged.
    """
    source = np.ones(SLOT_BYTES, np.uint8)  # of zeros the kernel has one page
    memory = Memory(base=source.ctypes.data, length=SLOT_BYTES, device=0, kind="cpu")
    try:
        deregister = owner.register_besides(memory)
        reader.load(owner.info(), [memory])
        if (costs := _measure(reader, owner, memory)) is not None:
            reader.drop(owner.name)
            deregister()
            return costs
    except Exception:  # an engine without staged reads is better than none
        pass
    _kept.append(source)
    return None


def _measure(reader: Agent, owner: Agent, memory: Memory) -> ReadCosts | None:
    assert reader.stage is not None
    bases = reader.stage.memory.base, memory.base
    apart = np.arange(NUM_PIECES) * 2 * PIECE  # no two of them touch, so NIXL merges none
    fastest = []
    for offsets, length in ((np.zeros(1, np.int64), SLOT_BYTES), (apart, PIECE)):
        rounds: list[float] = []
        for _ in range(ROUNDS):
            rounds.append(reader.time_read(owner, *(byte_ranges(base + offsets, length) for base in bases)))
            if math.isinf(rounds[-1]):
                return None
        fastest.append(min(rounds))
    read_s = fastest[0] / SLOT_BYTES
    descriptor_s = max(fastest[1] / NUM_PIECES - PIECE * read_s, 0.0)
    place_s = min(reader.stage.time_placement(PIECE) for _ in range(ROUNDS))
    return ReadCosts(descriptor_s, read_s, place_s, SLOT_BYTES)
