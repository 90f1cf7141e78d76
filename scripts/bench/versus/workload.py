"""Common parts of both contenders: requests, bytes and timing. This needs the standard library and numpy only.

Each contender is two processes of a fleet, prefill and decode. The driver calls `ready` for their descriptions, `meet`
to pass the prefill process's description on, and `window` for each window. A *window* is a number of requests in a
closed loop. Block ids, memory, pattern and checks are the same for both, to the byte.
"""

from __future__ import annotations

import mmap
import resource
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckv.tools.bench.garbage import settle
from tests.lab.fleet import SharedNumber, pattern

BLOCK_TOKENS = 32
"""Tokens per block; vLLM's CPU platform requires a multiple of this."""
ITEM = 2
NUM_SOURCES = 256
"""Different lists of remote blocks; requests use them in turn, so that making them is not timed."""
AHEAD = 64
SERVE_S = 30.0
"""Seconds for which the prefill side waits for the last release."""

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One process of a contender.

    Attributes:
        folder: Folder of both processes. It has the board, where the prefill process publishes the number of requests
            to pull, and vLLM's description of the model.
    """

    role: str
    layers: int
    block_bytes: int
    num_blocks: int
    seed: int
    folder: str
    progress_thread: bool = True

    @property
    def heads(self) -> tuple[int, int]:
        """Return heads and elements per head, so that keys and values of a block are `block_bytes`."""
        per_token = self.block_bytes // (2 * BLOCK_TOKENS * ITEM)
        return max(1, per_token // 128), min(per_token, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Requests to move.

    Attributes:
        first: Number of the first request; numbers are never reused.
        step_ms: Time of a model step between `submit` and `collect`; 0 is a busy loop.
        check_all: Compare every request, not only the last of each slot.
    """

    first: int
    requests: int
    blocks: int
    concurrency: int
    step_ms: float = 0.0
    check_all: bool = False


def board(folder: str) -> SharedNumber:
    """Return the number of requests that may be pulled, as shared by the prefill process."""
    return SharedNumber(Path(folder) / "board")


class Memory:
    """One rank's blocks: a region of touched plain pages per layer; word `w` of block `b` has a known value."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._maps = [mmap.mmap(-1, setup.num_blocks * setup.block_bytes) for _ in range(setup.layers)]
        self.arrays: list[Words] = [np.frombuffer(m, np.uint64).reshape(setup.num_blocks, -1) for m in self._maps]
        for array in self.arrays:
            array[:] = 0

    def _expected(self, layer: int, blocks: list[int]) -> Words:
        return pattern(layer + 1, np.array(blocks) + 1, self.arrays[layer].shape[1])

    def fill(self) -> None:
        """Write the pattern."""
        for layer, array in enumerate(self.arrays):
            for start in range(0, len(array), 256):
                array[start : start + 256] = self._expected(layer, list(range(start, min(start + 256, len(array)))))

    def poison(self, blocks: list[int]) -> None:
        """Write values that the pattern never has."""
        for array in self.arrays:
            array[blocks] = ~np.uint64(0)

    def is_right(self, local: list[int], remote: list[int]) -> bool:
        """Return True if every byte is that of the remote block."""
        return all(bool((array[local] == self._expected(i, remote)).all()) for i, array in enumerate(self.arrays))


def sources(setup_seed: int, remote_blocks: int, blocks: int) -> list[list[int]]:
    """Return lists of remote blocks."""
    rng = np.random.default_rng([setup_seed, blocks, 1])
    return [rng.permutation(remote_blocks)[:blocks].tolist() for _ in range(NUM_SOURCES)]


def slots(setup_seed: int, blocks: int, concurrency: int) -> deque[list[int]]:
    """Return local blocks: one list per request in flight."""
    ids = np.arange(blocks * concurrency)
    np.random.default_rng([setup_seed, blocks, 2]).shuffle(ids)
    return deque(ids[i : i + blocks].tolist() for i in range(0, len(ids), blocks))


class Checks:
    """Compares requests and collects the results, with the latency of each."""

    def __init__(self, memory: Memory, window: Window, remote_blocks: int) -> None:
        seed = memory.setup.seed
        self.memory, self.window = memory, window
        self.sources = sources(seed, remote_blocks, window.blocks)
        self.free = slots(seed, window.blocks, window.concurrency)
        self.latencies: list[float] = []
        self.steps: list[float] = []
        self.checked = self.wrong = self.failed = 0
        self._last: dict[int, tuple[list[int], list[int]]] = {}
        for local in self.free:
            memory.poison(local)
        # Set the garbage collector as a warm serving engine does; it is the same for both contenders.
        settle()
        self._faults, self._cpu, self._began = minor_faults(), time.process_time(), time.perf_counter()

    def source(self, number: int) -> list[int]:
        """Return the remote blocks of a request."""
        return self.sources[number % NUM_SOURCES]

    def done(self, number: int, local: list[int], seconds: float) -> None:
        """Record a complete request, and free its slot."""
        self.latencies.append(seconds)
        self._last[local[0]] = (local, self.source(number))
        if self.window.check_all:
            self._check(local, self.source(number))
            self.memory.poison(local)
            del self._last[local[0]]
        self.free.append(local)

    def result(self) -> dict[str, Any]:
        """Stop the clock, compare the last request of each slot, and return the result."""
        wall_s, cpu_s = time.perf_counter() - self._began, time.process_time() - self._cpu
        faults = minor_faults() - self._faults
        for local, remote in self._last.values():
            self._check(local, remote)
        took = np.array(self.latencies or [0.0])
        number, setup = len(self.latencies), self.memory.setup
        return {
            "requests": number,
            "wall_s": wall_s,
            "requests_per_s": number / wall_s,
            "gbytes_per_s": number * self.window.blocks * setup.layers * setup.block_bytes / wall_s / 1e9,
            "p50_ms": float(np.quantile(took, 0.5, method="higher")) * 1e3,
            "p99_ms": float(np.quantile(took, 0.99, method="higher")) * 1e3,
            "cpu_us": cpu_s / max(number, 1) * 1e6,
            "faults": faults / max(number, 1),
            "step_p99_ms": float(np.quantile(self.steps, 0.99)) * 1e3 if self.steps else 0.0,
            "checked": self.checked,
            "wrong": self.wrong,
            "failed": self.failed,
        }

    def _check(self, local: list[int], remote: list[int]) -> None:
        self.checked += 1
        self.wrong += not self.memory.is_right(local, remote)


def minor_faults() -> int:
    """Return the number of pages that this process has touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def numbers(window: Window) -> range:
    """Return the numbers of all requests of a window."""
    return range(window.first, window.first + window.requests)


def lend_ahead(window: Window) -> int:
    """Return the number of requests that prefill has ready beyond the released ones."""
    return 2 * window.concurrency + AHEAD
