"""Offload, as its owner sees it: blocks go to host memory and to files, and come back before they are needed.

Blocks are found by what they hold, not by who stored them: a caller gives the hashes of a prompt, and the longest
prefix of it that is kept anywhere is loaded. `asynckv/offload/` decides what is where, what is given up and what is
moved next; the copy plane moves it, on threads of its own. What is said here is who may call, which blocks of the
engine are in use meanwhile, and what a caller hears.

No call waits for a copy but those that are awaited, and these may be cancelled. What is under way then is drained:
blocks that are read for a store stay *lent*, and blocks that are loaded into stay *written* in the engine's ledger,
until nothing can read or write them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from asynckv.config import OffloadConfig
from asynckv.core.inspect import HeldBlocks
from asynckv.engine.engine import Engine, Groups
from asynckv.geometry.check import Registration
from asynckv.ports import Clock
from asynckv.results import Loaded, Statistics, Stored

__all__ = ["Offload"]


class Offload:
    """What one rank keeps of its blocks outside of the accelerator.

    Use it as an async context manager inside of its engine's, or call `start` and `aclose`. It belongs to the engine's
    event loop, and every method raises `WrongThread` elsewhere.

    Ranks of one engine have one each, and are told the same in the same order. A prefix is usable if every rank has it:
    take the least `Found.num_tokens`, and the least `Loaded.num_tokens`.

    Args:
        config: Checked configuration.
        engine: Whose blocks these are, started before; or a registration, for a process without an engine.

    Raises:
        ConfigError: A block size is not a multiple of `hash_tokens`, or a group cannot be kept; names the remedy.
    """

    def __init__(self, config: OffloadConfig, engine: Engine | Registration, *, clock: Clock | None = None) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Take the memory, open the files, and find out what they hold.

        Raises:
            BackendError: The memory, the disk's space or NIXL is not to be had, or another process has the directory.
        """
        raise NotImplementedError

    async def aclose(self, timeout_s: float | None = None) -> tuple[HeldBlocks, ...]:
        """Take nothing new, cancel loads and stores, wait until nothing is copied any more, and let go. Idempotent.

        What is in files stays there. What was only in host memory is written back for as long as `timeout_s` has room.
        """
        raise NotImplementedError

    # -- questions: answered at once -----------------------------------------------------------------

    def lookup(self, hashes: Sequence[str | bytes], num_tokens: int | None = None) -> Any:
        """Say how long a prefix of a prompt could be loaded.

        Args:
            hashes: One per `hash_tokens` tokens, each covering all tokens before it as well.
            num_tokens: Consider no more tokens than these.
        """
        raise NotImplementedError

    # -- moves: awaited, and cancelled by cancelling -------------------------------------------------

    async def store(self, request_id: str, groups: Groups, hashes: Sequence[str | bytes]) -> Stored:
        """Copy blocks to the host tier; returns when they are there, and nobody reads the blocks any more."""
        raise NotImplementedError

    async def load(self, request_id: str, groups: Groups, hashes: Sequence[str | bytes], *, num_tokens: int) -> Loaded:
        """Fill blocks with what is kept of a prompt."""
        raise NotImplementedError

    def statistics(self) -> Statistics:
        """Take a snapshot of counters and gauges."""
        raise NotImplementedError

    def describe(self) -> dict[str, str]:
        """Name tiers, sizes and modes."""
        raise NotImplementedError

    on_news: Callable[[], None]
