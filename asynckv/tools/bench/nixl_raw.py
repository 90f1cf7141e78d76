"""A plain NIXL loop that the engine is compared with. For benchmarks only.

`NixlPlane` makes, registers and connects the agent. Descriptor lists are prepared before any clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from asynckv.edges.nic.nixl import NixlPlane
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest
from asynckv.ports import AgentInfo


class RawLoop(NixlPlane):
    def open(self, memories: Sequence[Memory]) -> AgentInfo:
        """Begin, and make progress for remote readers when UCX wakes this agent, as an engine does."""
        return self.begin(memories, self._progress)

    def _progress(self) -> None:
        self.poll()

    def prepare_lists(self, name: str, requests: Sequence[Sequence[ReadRequest]]) -> Mapping[int, Any]:
        """Prepare all descriptor lists that the posts of these requests need, for `read_all`."""
        assert self._agent is not None
        tables = {id(post.table): post.table for posts in requests for post in posts}
        return {key: self._agent.prepare(name, table) for key, table in tables.items()}

    def read_all(
        self,
        lists: Mapping[int, Any],
        requests: Sequence[Sequence[ReadRequest]],
        *,
        concurrency: int,
        window_bytes: int,
        window_descriptors: int,
    ) -> list[float]:
        """Read everything, blocking: a closed loop of requests, with posts in order, within the engine's windows.

        Returns:
            Time at which each request was complete, in seconds after the start.
        """
        assert self._agent is not None
        raw, read = self._agent._raw, self._agent._read
        make, post_it, status, release = raw.makeXferReq, raw.postXferReq, raw.getXferStatus, raw.releaseXferReq
        left = [len(posts) for posts in requests]
        ends = [0.0] * len(requests)
        running: dict[int, tuple[int, ReadRequest]] = {}
        num_bytes = num_descriptors = 0
        todo = iter([(i, post) for i, posts in enumerate(requests) for post in posts])
        upcoming = next(todo, None)
        done = sum(not n for n in left)
        began = time.perf_counter()
        try:
            while upcoming is not None or running:
                while upcoming is not None:
                    number, post = upcoming
                    if running and (
                        number >= done + concurrency
                        or num_bytes + post.num_bytes > window_bytes
                        or num_descriptors + post.num_descriptors > window_descriptors
                    ):
                        break
                    upcoming = next(todo, None)
                    _, mine, theirs, *_ = lists[id(post.table)]
                    handle = make(read, mine._handle, post.local, theirs._handle, post.remote, b"", [], False)
                    if int(post_it(handle, b"")) == 0:
                        release(handle)
                        left[number] -= 1
                        if not left[number]:
                            ends[number] = time.perf_counter() - began
                            done += 1
                    else:
                        running[handle] = number, post
                        num_bytes += post.num_bytes
                        num_descriptors += post.num_descriptors
                for handle in list(running):
                    if int(status(handle)) == 0:
                        number, post = running.pop(handle)
                        release(handle)
                        num_bytes -= post.num_bytes
                        num_descriptors -= post.num_descriptors
                        left[number] -= 1
                        if not left[number]:
                            ends[number] = time.perf_counter() - began
                            done += 1
        except Exception as exc:
            raise BackendError(f"a read of the raw NIXL loop failed: {exc!r}") from exc
        return ends
