"""Moves bytes to and from files by NIXL's POSIX back end. A tool that only lists a directory needs no NIXL."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence

import numpy as np

from asynckv.core.events import Ending
from asynckv.core.types import TransferId
from asynckv.edges.files.io import Extent
from asynckv.edges.nic.agent import Agent, closed_on_failure
from asynckv.edges.nic.nixl import load_nixl
from asynckv.geometry.layout import Memory

AIO = {"use_aio": "true"}  # as fast as io_uring, which many containers forbid; POSIX aio reaches 0.7 to 0.9 of that
NAP_S = 0.0001


class NixlFiles:
    """Move batches by a NIXL agent with the POSIX back end; every new agent adds a number to the name."""

    def __init__(self, name: str, memory: Memory, fds: Mapping[int, int]) -> None:
        self._api, self._name, self._memory, self._fds = load_nixl(), name, memory, fds
        self._numbers = itertools.count(1)
        self._ended: list[tuple[int, bool]] = []
        self._agent: Agent | None = self._make_agent()

    def _make_agent(self) -> Agent:
        agent = Agent(self._api, f"{self._name}-files{next(self._numbers)}", "POSIX", AIO)
        with closed_on_failure(agent.close):
            agent.register([self._memory])
            agent.register_files(self._fds)
        return agent

    def submit(self, number: int, extents: Sequence[Extent], is_write: bool) -> None:
        assert self._agent is not None
        base = self._memory.base
        rows = [(base + near, size, 0, offset, size, fd) for near, fd, offset, size in extents]
        near, far = np.ascontiguousarray(np.array(rows, np.uint64).reshape(-1, 2, 3).swapaxes(0, 1))
        ended = self._agent.post_file(TransferId(number), near, far, is_write=is_write)
        if ended is not None:
            self._ended.append((number, ended.ending is Ending.DONE))

    def collect(self) -> list[tuple[int, bool]]:
        assert self._agent is not None
        ended, self._ended = self._ended, []
        if self._agent.running:
            ended += [(int(each.transfer_id), each.ending is Ending.DONE) for each in self._agent.ask()]
        return ended

    def reset(self) -> None:
        while self._agent is not None and self._agent.running:
            self._ended = self.collect()  # includes those that ended before
            time.sleep(NAP_S)
        self.close()
        self._agent = self._make_agent()

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None
