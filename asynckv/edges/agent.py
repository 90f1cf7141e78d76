"""One NIXL agent without a progress thread: its peers, their descriptor lists, and every transfer until its end.

It belongs to one thread at a time, which posts, asks and makes progress: the event loop's, or a posting
thread's. It never waits. NIXL itself is handed in, so that one module imports it.

What is known about the end of a transfer (measured, and held to strictly): `DONE` is the end; a remote
disconnect is the end, because no thread of NIXL's own is left to write; the end of the agent is the end.
Any other trouble is *doubt*, and a transfer in doubt keeps its handle and is asked again for as long as it takes.

NIXL's agent lives as long as anything refers to it, and a traceback refers to the locals of NIXL's frames. So no
exception of NIXL's leaves this module, not even as a cause, and `close` looks whether the agent is gone.
"""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckv.core.types import TransferId
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import DescTable
from asynckv.ports import Ended, Ending

__all__ = ["Agent", "IndexArray", "make_epoll"]

MEMORY_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}

IndexArray = npt.NDArray[np.int32]

_creating = threading.Lock()
"""Descriptors are found by comparing before and after, so agents are made one at a time."""


def _descriptors() -> set[str]:
    """Name this process's descriptors."""
    return set(os.listdir("/proc/self/fd"))


def _epolls(names: set[str]) -> set[int]:
    """Return those of some descriptors that are epoll sets.

    Asked for few: every look lets go of Python's lock, which a thread that never sleeps gives back only after 5 ms.
    """
    found = set()
    for name in names:
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def _own(found: set[int]) -> tuple[int, ...]:
    """Leave out the set in which UCX's asynchronous thread watches those of all agents of the process.

    Only the first agent meets it. It is ready whenever any agent has something to do, on whatever thread.
    """
    own = []
    for fd in sorted(found):
        with suppress(OSError):
            lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
            watched = {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
            if not watched & found:
                own.append(fd)
    return tuple(own or sorted(found))


def make_epoll() -> select.epoll:
    """Make an epoll descriptor that no agent takes for one of UCX's."""
    with _creating:
        return select.epoll()


class Agent:
    """One NIXL agent.

    Args:
        api: NIXL's Python API.
        name: Unique in this process and all others.
        backend: NIXL back end.
        params: Its parameters.

    Raises:
        BackendError: The back end cannot be created.
    """

    def __init__(self, api: Any, name: str, backend: str, params: Mapping[str, str]) -> None:
        self.name = name
        config = api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            # One thread posts, but another may load metadata; an unlocked agent crashes under two.
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        agent, refused = None, ""
        with _creating:
            try:
                agent = api.nixl_agent(name, config)
                before = _descriptors()
                agent.create_backend(backend, dict(params))
            except Exception as exc:
                plugins = ", ".join(getattr(agent, "plugin_list", [])) or "none"
                refused = f"NIXL back end {backend!r} cannot be created: {exc!r}; plug-ins found: {plugins}"
            if agent is None or refused:
                agent = None
                raise BackendError(refused)
            self.fds = _own(_epolls(_descriptors() - before))
            """UCX's own epoll descriptors, which tell when there is something to do; none for some back ends."""
        self._agent: Any = agent
        self._raw: Any = agent.agent
        self._life = weakref.finalize(self._raw, int)
        """Alive until NIXL's destructor has run, which is later than `close` if something else refers to the agent."""
        self._life.atexit = False
        self._read = agent.nixl_ops["READ"]
        self._lost: type[Exception] = sys.modules[f"{api.__package__}._bindings"].nixlRemoteDisconnectError
        self._registered: list[Any] = []
        self._tables: dict[str, dict[int, tuple[Any, Any]]] = {}
        self._gone: set[str] = set()
        """Peers whose process ended under a transfer: NIXL refuses them from then on."""
        self.running: dict[TransferId, tuple[int, str]] = {}
        """Handle and peer of every transfer that was posted and has not ended."""
        self.doubtful: dict[TransferId, tuple[int, str]] = {}
        self.unreleased: list[int] = []
        self.done_in_post = 0
        self.notifications = 0

    # -- memory and peers --------------------------------------------------------------------------

    def register(self, memories: Sequence[Memory]) -> None:
        """Register local memory.

        Raises:
            BackendError: NIXL refuses.
        """
        for kind in sorted({m.kind for m in memories}):
            rows = [(m.base, m.length, m.device, "") for m in memories if m.kind == kind]
            refused = ""
            try:
                self._registered.append(self._agent.register_memory(rows, MEMORY_KINDS[kind]))
            except Exception as exc:
                refused = f"NIXL cannot register {len(rows)} ranges of {kind} memory: {exc!r}"
            if refused:
                raise BackendError(refused)

    def metadata(self) -> bytes:
        """Return NIXL's metadata blob."""
        return bytes(self._agent.get_agent_metadata())

    def load(self, name: str, metadata: bytes) -> None:
        """Load a peer's metadata, which opens the connection: 4 to 14 ms. May run on another thread.

        Raises:
            BackendError: NIXL refuses it, or it is somebody else's.
        """
        loaded, refused = None, ""
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except Exception as exc:
            refused = f"NIXL refuses the metadata of {name}: {exc!r}"
        if refused:
            raise BackendError(refused)
        found = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
        if found != name:
            # Never somebody else's: metadata under a false name may be that of a peer in use.
            if found not in self._tables:
                with suppress(Exception):
                    self._agent.remove_remote_agent(found)
            raise BackendError(f"NIXL metadata is of agent {found!r}, but {name!r} was announced")
        self._tables[name] = {}

    def drop(self, name: str) -> None:
        """Forget a peer and its descriptor lists; harmless if it is not loaded."""
        tables = self._tables.pop(name, None)
        self._gone.discard(name)
        if tables is None:
            return
        for pair in tables.values():
            self._release_lists(pair)
        with suppress(Exception):  # a connection that broke is gone as it is
            self._agent.remove_remote_agent(name)

    def has_table(self, name: str, table_id: int) -> bool:
        """Say whether descriptor lists are prepared."""
        return table_id in self._tables.get(name, ())

    def add_table(self, name: str, table: DescTable, memories: Sequence[Memory], remote: Sequence[Memory]) -> None:
        """Prepare one table's two descriptor lists, one strided row per piece.

        Raises:
            BackendError: The peer is not loaded, or NIXL refuses.
        """
        if name not in self._tables:
            raise BackendError(f"peer {name} is not loaded")
        lists, refused = [], ""
        try:
            lists.append(self._prepare("", table.local, table.length, table.local_blocks, memories))
            lists.append(self._prepare(name, table.remote, table.length, table.remote_blocks, remote))
        except BackendError as exc:
            refused = str(exc)
        except Exception as exc:
            refused = f"NIXL cannot prepare descriptors of {name}: {exc!r}"
        if refused:
            self._release_lists(lists)
            lists.clear()
            raise BackendError(refused)
        mine, theirs = lists
        self._tables[name][table.table_id] = (mine, theirs)

    def remove_table(self, name: str, table_id: int) -> None:
        """Forget one table's descriptor lists; harmless if there are none."""
        self._release_lists(self._tables.get(name, {}).pop(table_id, ()))

    def _release_lists(self, lists: Sequence[Any]) -> None:
        for handle in lists:
            with suppress(Exception):
                self._agent.release_dlist_handle(handle)

    def _prepare(
        self, name: str, rows: npt.NDArray[np.int64], length: npt.NDArray[np.int64], count: int, at: Sequence[Memory]
    ) -> Any:
        kinds = {at[int(m)].kind for m in np.unique(rows[:, 0])}
        if len(kinds) != 1:
            raise BackendError(
                f"one table mixes {' and '.join(sorted(kinds))} memory; give each kind a group of its own"
            )
        base = np.array([m.base for m in at], np.uint64)
        device = np.array([m.device for m in at], np.uint64)
        descs = np.empty((len(rows), 5), np.uint64)
        descs[:, 0] = base[rows[:, 0]] + rows[:, 1].astype(np.uint64)
        descs[:, 1] = length
        descs[:, 2] = device[rows[:, 0]]
        descs[:, 3] = rows[:, 2]
        descs[:, 4] = count
        return self._agent.prep_xfer_dlist(name, descs, MEMORY_KINDS[kinds.pop()])

    # -- transfers ---------------------------------------------------------------------------------

    def post(
        self, transfer_id: TransferId, name: str, table_id: int, local: IndexArray, remote: IndexArray
    ) -> Ended | None:
        """Post a read; local transports finish it in here. News if it has ended or is in doubt."""
        if name in self._gone:
            return Ended(transfer_id, Ending.FAILED, "the remote process is gone", peer_lost=True)
        try:
            mine, theirs = self._tables[name][table_id]
            # The bare handle: the wrapper would release it behind our back when it is collected.
            handle = self._raw.makeXferReq(self._read, mine._handle, local, theirs._handle, remote, b"", [], False)
        except Exception as exc:
            # Nothing was posted, so nothing will be written.
            return Ended(transfer_id, Ending.FAILED, repr(exc))
        try:
            status = int(self._raw.postXferReq(handle, b""))
        except Exception as exc:
            return self._trouble(transfer_id, handle, name, exc)
        if status == 0:
            self.done_in_post += 1
            self._release(handle)
            return Ended(transfer_id, Ending.DONE)
        self.running[transfer_id] = (handle, name)
        return None

    @property
    def is_busy(self) -> bool:
        """Whether anything is left to ask for or to release."""
        return bool(self.running or self.doubtful or self.unreleased)

    def sweep(self) -> list[Ended]:
        """Ask about every transfer until nothing new is found; without any, make progress for remote readers."""
        news: list[Ended] = []
        while self.running and (found := self._ask(self.running)):
            news += found
        if self.doubtful:
            news += self._ask(self.doubtful)
        if not self.running:
            self._progress()
        if self.unreleased:
            waiting, self.unreleased = self.unreleased, []
            for handle in waiting:
                self._release(handle)
        return news

    def look(self) -> list[Ended]:
        """Ask about the oldest transfer of each peer, and about all if one has ended.

        One question makes progress for all, and on one connection transfers end about in order.
        """
        heads: dict[str, TransferId] = {}
        for transfer_id, (_, name) in self.running.items():
            heads.setdefault(name, transfer_id)
        chosen = {transfer_id: self.running.pop(transfer_id) for transfer_id in heads.values()}
        news = self._ask(chosen)
        if chosen:
            # Those that still run stay the oldest.
            self.running = chosen | self.running
        return news + self.sweep() if news else news

    def _ask(self, transfers: dict[TransferId, tuple[int, str]]) -> list[Ended]:
        status = self._raw.getXferStatus
        news = []
        for transfer_id, (handle, name) in list(transfers.items()):
            try:
                code = int(status(handle))
            except Exception as exc:
                if transfers is not self.doubtful or isinstance(exc, self._lost):
                    del transfers[transfer_id]
                    news.append(self._trouble(transfer_id, handle, name, exc))
                continue
            if code == 0:
                del transfers[transfer_id]
                self._release(handle)
                news.append(Ended(transfer_id, Ending.DONE))
        return news

    def _trouble(self, transfer_id: TransferId, handle: int, name: str, exc: Exception) -> Ended:
        if isinstance(exc, self._lost):
            if name in self._tables:
                self._gone.add(name)
            self._release(handle)
            return Ended(transfer_id, Ending.FAILED, f"the remote process is gone ({exc})", peer_lost=True)
        self.doubtful[transfer_id] = (handle, name)
        return Ended(transfer_id, Ending.IN_DOUBT, repr(exc))

    def _release(self, handle: int) -> None:
        try:
            self._raw.releaseXferReq(handle)
        except Exception:
            # Its bytes are settled; only the handle is kept, and tried again.
            self.unreleased.append(handle)

    def _progress(self) -> None:
        # Anybody can send notifications in anybody's name: they are emptied, counted and ignored.
        if arrived := self._raw.getNotifs({}, []):
            self.notifications += sum(map(len, arrived.values()))

    # -- end ---------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether the agent is gone, and with it whatever could write."""
        return not self._life.alive

    def close(self) -> None:
        """Destroy the agent, which ends whatever still runs before the memory goes. Idempotent.

        Raises:
            BackendError: Something still refers to it, so it lives and may write. Call again to look again.
        """
        if self._agent is not None:
            self._let_go()
        if self._life.alive:
            # Cycles, such as those of exceptions that somebody caught, are found by a collection only.
            gc.collect()
        if self._life.alive:
            raise BackendError(
                f"NIXL agent {self.name} is still referred to, such as by the traceback of an exception that is kept"
            )

    def _let_go(self) -> None:
        if not self.running and not self.doubtful:
            for name in list(self._tables):
                self.drop(name)
            for handle in self._registered:
                with suppress(Exception):
                    self._agent.deregister_memory(handle)
        for left in (self._tables, self._registered, self._gone, self.running, self.doubtful, self.unreleased):
            left.clear()
        self._raw = None
        self._agent = None
