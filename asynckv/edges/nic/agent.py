"""One NIXL agent without a progress thread: remote agents, their descriptor lists, and every transfer until its end.

An agent belongs to one thread at a time, and never waits. A transfer ends by `DONE`, by a remote disconnect (no NIXL
thread is left to write), or with its agent. Any other trouble is *doubt*: the transfer keeps its handle, and its status
is asked again for as long as it takes.

A read is posted by index into two descriptor lists, which NIXL prepares at the first read of a table (20 to 40 us).
The lists are kept until the remote agent is dropped or newer tables need the room, and are never released under a
transfer. An entry holds its table, so that no other table gets the same id. A staged read is posted into a slot of the
agent's staging memory (`staging.py`), and is done once its pieces are placed.

NIXL's agent lives as long as anything refers to it, and a traceback refers to the locals of NIXL's frames. So no NIXL
exception leaves this module, not even as a cause, and `close` checks whether the agent is gone.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.nic.metadata import is_known, renamed
from asynckv.edges.nic.places import Places
from asynckv.edges.nic.staging import Bytes, Chunk, Pieces, Stage
from asynckv.errors import BackendError
from asynckv.geometry.gather import Packing
from asynckv.geometry.layout import Memory
from asynckv.geometry.look import PLACE_BYTES, Look
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.staging import SLOT_BYTES
from asynckv.geometry.tables import MAX_KEPT_ROWS, DescTable
from asynckv.ports import AgentInfo

MEMORY_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}
MEASURE_S = 1.0  # seconds after which the read of a measurement is given up
MAX_LISTS = 1024  # tables of one remote agent with kept descriptor lists, in addition to those in use
SOURCE, SINK = " is copied from", " is copied to"  # appended to the memory's name, by the direction of the copy
NO_PACKING = Packing(0, 1)
_creating = threading.Lock()  # an agent's descriptors are found by a comparison before and after it is made
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _after_fork() -> None:
    """Never destroy agents in the child of a fork, because they share UCX's sockets and epolls with the parent."""
    for agent in tuple(_agents):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))


os.register_at_fork(after_in_child=_after_fork)


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def _epolls(names: set[str]) -> set[int]:
    """Return the descriptors that are epoll sets. Pass only a few, because each check gives up Python's lock."""
    found = set()
    for name in names:
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def _own(found: set[int]) -> tuple[int, ...]:
    """Leave out the epoll set of UCX's asynchronous thread, which all agents share; only the first agent finds it."""
    own = []
    for fd in sorted(found):
        with suppress(OSError):
            lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
            watched = {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
            if not watched & found:
                own.append(fd)
    return tuple(own or sorted(found))


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """Hide variables of the environment for a moment; safe because agents are made one at a time."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def make_epoll() -> select.epoll:
    with _creating:
        return select.epoll()


@contextmanager
def closed_on_failure(close: Callable[[], None]) -> Iterator[None]:
    """Close an agent, or a plane of them, if its set-up fails; one that cannot be closed says so at its next start."""
    try:
        yield
    except BaseException:
        with suppress(BackendError):
            close()
        raise


class _Lists(NamedTuple):
    table: DescTable
    local: Any
    remote: Any
    firsts: Mapping[int, int]  # of a staged table: the first descriptor of the first slot, by length
    pieces: dict[int, Pieces]  # of a staged table, by row


@dataclass(slots=True, eq=False)
class _RemoteMemory:
    memories: Sequence[Memory]
    own: str = ""  # `SOURCE` or `SINK` for memory of this process
    alias: str = ""  # the name under which NIXL knows it here
    packing: Packing = NO_PACKING
    lists: dict[int, _Lists] = field(default_factory=dict)  # by the id of their table, the oldest first


@dataclass(slots=True, eq=False)
class _Staged:
    """A staged read on its way through its slot."""

    stage: Stage
    lists: _Lists
    chunks: Iterator[Chunk]
    chunk: Chunk  # read now, or about to be placed


def _unstaged(transfer_id: TransferId, staged: _Staged, ending: Ending, cause: str = "") -> TransferEnded:
    staged.stage.slots.give_back(transfer_id)
    return TransferEnded(transfer_id, ending, cause)


class _NixlTransfer(NamedTuple):
    handle: int
    name: str
    lists: _Lists | None  # None for files
    remote: _RemoteMemory | None  # as it was loaded at the post; it may have been loaded anew since
    staged: _Staged | None = None
    look: Look | None = None


def byte_ranges(addresses: npt.NDArray[Any], lengths: npt.NDArray[Any] | int) -> npt.NDArray[np.uint64]:
    """Return ranges of host memory as NIXL takes them: rows of address, length, device 0."""
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses, lengths
    return rows


class Agent:
    """One NIXL agent, with a name that is unique in this process and all others.

    `unheeded` are environment variables that are meant for other agents, and would override the parameters.
    """

    def __init__(
        self, api: Any, name: str, backend: str, params: Mapping[str, str], unheeded: Sequence[str] = ()
    ) -> None:
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
                with _without(unheeded):
                    agent.create_backend(backend, dict(params))
            except Exception as exc:
                plugins = ", ".join(getattr(agent, "plugin_list", [])) or "none"
                refused = f"NIXL back end {backend!r} cannot be created: {exc!r}; plug-ins found: {plugins}"
            if agent is None or refused:
                agent = None
                raise BackendError(refused)
            self.fds = _own(_epolls(_descriptors() - before))  # UCX's epoll descriptors of this agent, if any
        self._agent: Any = agent
        self._raw: Any = agent.agent
        self._life = weakref.finalize(self._raw, int)  # alive until NIXL's destructor has run
        self._life.atexit = False
        self._read, self._write = agent.nixl_ops["READ"], agent.nixl_ops["WRITE"]
        self._lost: type[Exception] = sys.modules[f"{api.__package__}._bindings"].nixlRemoteDisconnectError
        self._registered: list[Any] = []
        self._memories: tuple[Memory, ...] = ()
        self.stage: Stage | None = None
        self._places: Places | None = None
        self._remotes: dict[str, _RemoteMemory] = {}
        self._loads = 0
        self._knows_form: bool | None = None  # this NIXL's metadata has the known form; None before the first load
        self._gone: set[str] = set()  # remote agents that ended during a transfer; NIXL refuses them
        self.running: dict[TransferId, _NixlTransfer] = {}
        self.doubtful: dict[TransferId, _NixlTransfer] = {}
        self.unreleased: list[int] = []  # handles of ended transfers that NIXL could not release yet
        self.done_in_post = 0
        self.notifications = 0
        _agents.add(self)

    # -- memory and remote agents ------------------------------------------------------------------

    def register(self, memories: Sequence[Memory]) -> None:
        self._register(memories)
        self._memories += tuple(memories)

    def add_stage(self, num_slots: int, areas: list[Bytes]) -> None:
        """Make and register staging memory, for reads into the memory that is registered now."""
        try:
            self.stage = Stage(self._memories, num_slots, areas)
        except (OSError, OverflowError, ValueError) as exc:
            size = f"{num_slots} slots of {SLOT_BYTES} bytes"
            raise BackendError(f"{size} of staging memory cannot be had: {exc}; lower nixl.staging_bytes") from exc
        self._register([self.stage.memory])

    def add_places(self, places: Places) -> None:
        """Register memory for second looks; after `info`, so that no remote agent reaches it."""
        self._register(tuple(places.memories.values()))
        self._places = places

    def register_own(self, name: str, memories: Sequence[Memory]) -> None:
        """Register memory for copies within this process: from it as `name + SOURCE`, to it as `name + SINK`."""
        self._register(memories)
        for suffix in (SOURCE, SINK):
            self._remotes[name + suffix] = _RemoteMemory(memories, suffix, self.name)

    def register_besides(self, memory: Memory) -> Callable[[], None]:
        """Register memory that no table names; return a function that deregisters it, if it is still the last one."""
        self._register([memory])
        return lambda: self._agent.deregister_memory(self._registered.pop())

    def register_files(self, fds: Mapping[int, int]) -> None:
        self._register_rows([(0, length, fd, "") for fd, length in fds.items()], "FILE", "files")

    def _register(self, memories: Sequence[Memory]) -> None:
        for kind in sorted({m.kind for m in memories}):
            rows = [(m.base, m.length, m.device, "") for m in memories if m.kind == kind]
            self._register_rows(rows, MEMORY_KINDS[kind], f"ranges of {kind} memory")

    def _register_rows(self, rows: list[tuple[int, int, int, str]], kind: str, what: str) -> None:
        refused = ""
        try:
            self._registered.append(self._agent.register_memory(rows, kind))
        except Exception as exc:
            refused = f"NIXL cannot register {len(rows)} {what}: {exc!r}"
        if refused:
            raise BackendError(refused)

    def info(self) -> AgentInfo:
        return AgentInfo(self.name, bytes(self._agent.get_agent_metadata()))

    def load(self, remote: AgentInfo, memories: Sequence[Memory]) -> None:
        """Load a remote agent's metadata, which opens the connection: 4 to 14 ms. May run on another thread."""
        name, alias, metadata, loaded, refused = remote.name, remote.name, remote.metadata, None, ""
        if self._knows_form is None:
            self._knows_form = is_known(self.info().metadata)
        if self._knows_form:
            self._loads += 1
            alias = f"{name}~{self._loads}"
            metadata = renamed(metadata, name, alias)
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except Exception as exc:
            refused = f"NIXL refuses the metadata of {name}: {exc!r}"
        if refused:
            raise BackendError(refused)
        found = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
        if found != alias:
            raise BackendError(f"NIXL metadata is of agent {found!r}, but {name!r} was announced")
        self._remotes[name] = _RemoteMemory(memories, alias=alias, packing=remote.packing or NO_PACKING)

    def is_connected(self, name: str) -> bool:
        return name in self._remotes and name not in self._gone

    def forget_broken(self, name: str) -> None:
        """Forget a broken connection, so that the remote agent can be loaded anew; transfers in doubt stay."""
        if name not in self._gone:
            return
        if any(transfer.name == name for transfer in self.running.values()):
            raise BackendError(f"the connection to {name} has broken, and a transfer over it has not ended yet")
        for transfer in self.doubtful.values():
            if transfer.name == name and transfer.lists is not None:
                self._remotes[name].lists.pop(id(transfer.lists.table), None)
        self.drop(name)

    def drop_lists(self, name: str) -> None:
        if (remote := self._remotes.get(name)) is not None:
            for lists in remote.lists.values():
                self._release_lists(lists.local, lists.remote)
            remote.lists.clear()

    def drop(self, name: str) -> None:
        self._gone.discard(name)
        if name not in self._remotes:
            return
        self.drop_lists(name)
        remote = self._remotes.pop(name)
        if remote.own:
            return
        with suppress(Exception):  # a broken connection is gone already
            self._agent.remove_remote_agent(remote.alias)

    def prepare(self, name: str, table: DescTable) -> _Lists:
        """Prepare a table's two descriptor lists, one strided row per piece."""
        if (remote := self._remotes.get(name)) is None:
            raise BackendError(f"peer {name} is not loaded")
        if (known := remote.lists.get(id(table))) is not None:
            return known
        made: list[Any] = []
        firsts, refused = dict[int, int](), ""
        try:
            mine, theirs = (remote.alias, "") if remote.own == SOURCE and not table.boxes else ("", remote.alias)
            if table.boxes:
                assert self.stage is not None
                rows, firsts = self.stage.rows(table)
                made.append(self._agent.prep_xfer_dlist(mine, rows, "DRAM"))
            else:
                made.append(self._prepare(mine, table.local, table.length, table.local_blocks, self._memories))
            made.append(self._prepare(theirs, table.remote, table.length, table.remote_blocks, remote.memories))
        except BackendError as exc:
            refused = str(exc)
        except Exception as exc:
            refused = f"NIXL cannot prepare descriptors of {name}: {exc!r}"
        if refused:
            self._release_lists(*made)
            made.clear()
            raise BackendError(refused)
        self._make_room(remote, table.num_rows)
        lists = remote.lists[id(table)] = _Lists(table, made[0], made[1], firsts, {})
        return lists

    def _make_room(self, remote: _RemoteMemory, num_rows: int) -> None:
        num_rows += sum([lists.table.num_rows for lists in remote.lists.values()])
        if len(remote.lists) < MAX_LISTS and num_rows <= MAX_KEPT_ROWS:
            return
        posted = (*self.running.values(), *self.doubtful.values())
        in_use = {id(each.lists.table) for each in posted if each.lists is not None}
        for key in [key for key in remote.lists if key not in in_use]:
            if len(remote.lists) < MAX_LISTS and num_rows <= MAX_KEPT_ROWS:
                break
            lists = remote.lists.pop(key)
            num_rows -= lists.table.num_rows
            self._release_lists(lists.local, lists.remote)

    def _release_lists(self, *handles: Any) -> None:
        for handle in handles:
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

    def post(self, transfer_id: TransferId, name: str, read: ReadRequest | Look) -> TransferEnded | None:
        """Post a read or a copy; return its end if it has ended (local transports finish it here) or is in doubt."""
        if name in self._gone:
            return TransferEnded(transfer_id, Ending.FAILED, "the remote process is gone", peer_lost=True)
        if (remote := self._remotes.get(name)) is None:
            return TransferEnded(transfer_id, Ending.FAILED, f"peer {name} is not loaded")
        if isinstance(read, Look):
            return self._post_look(transfer_id, name, remote, read)
        if read.table.boxes:
            if remote.own == SINK:
                return TransferEnded(transfer_id, Ending.REFUSED, "only what is read can be staged")
            post = self._post_staged if read.is_staged else self._post_ranges
            return post(transfer_id, name, remote, read)
        if (lists := remote.lists.get(id(read.table))) is None:
            try:
                lists = self.prepare(name, read.table)
            except BackendError as exc:
                return TransferEnded(transfer_id, Ending.REFUSED, str(exc))
        op, local, mine = self._read, lists.local._handle, read.local
        theirs, remotes = lists.remote._handle, read.remote
        if remote.own:
            # Within a process UCX writes faster than it reads (measured: 1.4 to 1.7 times).
            op = self._write
            if remote.own == SOURCE:
                local, mine, theirs, remotes = theirs, remotes, local, mine
        try:
            # The bare handle is used, because NIXL's wrapper would release it when the wrapper is collected.
            handle = self._raw.makeXferReq(op, local, mine, theirs, remotes, b"", [], False)
        except Exception as exc:
            # Nothing was posted, so nothing will be written.
            return TransferEnded(transfer_id, Ending.FAILED, repr(exc))
        return self._post(transfer_id, _NixlTransfer(handle, name, lists, remote))

    def _post_staged(
        self, transfer_id: TransferId, name: str, remote: _RemoteMemory, read: ReadRequest
    ) -> TransferEnded | None:
        """Post a read into a slot, or its pieces one by one if this agent has none for it."""
        stage = self.stage
        has_slot = stage is not None and stage.slots.has_room(name)
        if stage is not None and not stage.begin(transfer_id, is_direct=not has_slot):
            return TransferEnded(transfer_id, Ending.FAILED, "cancelled")
        if stage is None or not has_slot:
            return self._post_ranges(transfer_id, name, remote, read)
        try:
            lists = self.prepare(name, read.table)
        except BackendError as exc:
            return TransferEnded(transfer_id, Ending.REFUSED, str(exc))
        slot = stage.slots.take(transfer_id, name)
        try:
            chunks = stage.cut(read, slot, lists.firsts, lists.pieces)
        except Exception as exc:
            stage.slots.give_back(transfer_id)
            return TransferEnded(transfer_id, Ending.FAILED, f"it cannot be cut into chunks: {exc!r}")
        staged = _Staged(stage, lists, iter(chunks), chunks[0])
        return self._advance(transfer_id, _NixlTransfer(0, name, lists, remote, staged), staged)

    def _advance(self, transfer_id: TransferId, transfer: _NixlTransfer, staged: _Staged) -> TransferEnded | None:
        """Read and place chunk after chunk, until one takes a while, or all are placed."""
        mine, theirs = staged.lists.local._handle, staged.lists.remote._handle
        for chunk in staged.chunks:
            staged.chunk = chunk
            try:
                handle = self._raw.makeXferReq(self._read, mine, chunk.local, theirs, chunk.remote, b"", [], False)
            except Exception as exc:
                return _unstaged(transfer_id, staged, Ending.FAILED, repr(exc))
            try:
                status = int(self._raw.postXferReq(handle, b""))
            except Exception as exc:
                return self._trouble(transfer_id, transfer._replace(handle=handle), exc)
            if status:
                self.running[transfer_id] = transfer._replace(handle=handle)
                return None
            if (ended := self._place(transfer_id, handle, staged)) is not None:
                return ended
        return _unstaged(transfer_id, staged, Ending.DONE)

    def _place(self, transfer_id: TransferId, handle: int, staged: _Staged) -> TransferEnded | None:
        """Place a chunk that has landed; return the transfer's end if that fails."""
        self._release(handle)
        try:
            is_placed = staged.stage.place(transfer_id, staged.chunk)
        except Exception as exc:
            return _unstaged(transfer_id, staged, Ending.FAILED, f"its pieces could not be placed: {exc!r}")
        return None if is_placed else _unstaged(transfer_id, staged, Ending.FAILED, "it was detached, and not placed")

    def _post_ranges(
        self, transfer_id: TransferId, name: str, remote: _RemoteMemory, read: ReadRequest
    ) -> TransferEnded | None:
        """Post a read of a staged table in ranges of its own: its pieces, or the long ranges of a packed copy."""
        try:
            ours, base = (np.array([m.base for m in each], np.uint64) for each in (self._memories, remote.memories))
            kind = "DRAM"
            if read.slot < 0:
                pieces = read.pieces().astype(np.uint64)
                mine = byte_ranges(ours[pieces[:, 0]] + pieces[:, 1], pieces[:, 4])
                theirs = byte_ranges(base[pieces[:, 2]] + pieces[:, 3], pieces[:, 4])
                theirs[:, 2] = np.array([m.device for m in remote.memories])[pieces[:, 2]]
                kind = MEMORY_KINDS[remote.memories[int(pieces[0, 2])].kind]
            else:
                places, begin = read.places(), remote.packing.base + read.slot * remote.packing.slot_bytes
                mine = byte_ranges(ours[places[:, 0]] + places[:, 1].astype(np.uint64), places[:, 2])
                theirs = byte_ranges(begin + np.cumsum(places[:, 2]) - places[:, 2], places[:, 2])
            handle = self._create(self._read, mine, theirs, remote.alias, kind)
        except Exception as exc:
            return TransferEnded(transfer_id, Ending.FAILED, repr(exc))
        return self._post(transfer_id, _NixlTransfer(handle, name, None, remote))

    def _post_look(self, transfer_id: TransferId, name: str, remote: _RemoteMemory, look: Look) -> TransferEnded | None:
        """Post a read of a look's pieces into its place."""
        assert self._places is not None
        try:
            here, far = self._places.of(look), remote.memories
            memory, offset, lengths = look.ranges(2).T
            mine = byte_ranges(here.base + look.place * PLACE_BYTES + np.cumsum(lengths) - lengths, lengths)
            base, devices = (np.array([getattr(m, what) for m in far], np.uint64) for what in ("base", "device"))
            theirs = byte_ranges(base[memory] + offset.astype(np.uint64), lengths)
            mine[:, 2], theirs[:, 2] = here.device, devices[memory]
            kinds = MEMORY_KINDS[far[int(memory[0])].kind], MEMORY_KINDS[here.kind]
            handle = self._create(self._read, mine, theirs, remote.alias, *kinds)
        except Exception as exc:
            return TransferEnded(transfer_id, Ending.FAILED, repr(exc))
        return self._post(transfer_id, _NixlTransfer(handle, name, None, remote, look=look))

    def post_file(
        self, transfer_id: TransferId, near: npt.NDArray[np.uint64], far: npt.NDArray[np.uint64], *, is_write: bool
    ) -> TransferEnded | None:
        """Post a copy between host memory (rows of address, length, 0) and files (rows of offset, length, fd)."""
        op = self._write if is_write else self._read
        try:
            handle = self._create(op, near, far, self.name, "FILE")
        except Exception as exc:
            return TransferEnded(transfer_id, Ending.FAILED, repr(exc))
        return self._post(transfer_id, _NixlTransfer(handle, self.name, None, None))

    def time_read(self, owner: Agent, mine: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64]) -> float:
        """Return the seconds of one read from another agent of this thread; infinite if it fails or takes too long.

        Both sides are rows of address, length, 0.
        """
        try:
            handle = self._create(self._read, mine, theirs, self._remotes[owner.name].alias)
            began = time.monotonic()
            status = int(self._raw.postXferReq(handle, b""))
            while status and time.monotonic() - began < MEASURE_S:
                owner.sweep()
                status = int(self._raw.getXferStatus(handle))
        except Exception:
            return math.inf
        if status:
            return math.inf  # its handle is kept, because it may still read and write
        seconds = time.monotonic() - began
        self._release(handle)
        return seconds

    def _create(
        self,
        op: Any,
        mine: npt.NDArray[np.uint64],
        theirs: npt.NDArray[np.uint64],
        name: str,
        kind: str = "DRAM",
        near: str = "DRAM",
    ) -> int:
        """Make a transfer of byte ranges outside of any table; `kind` is that of the far side."""
        sides = self._agent.get_xfer_descs(mine, near), self._agent.get_xfer_descs(theirs, kind)
        return int(self._raw.createXferReq(op, *sides, name, b"", []))

    def _post(self, transfer_id: TransferId, transfer: _NixlTransfer) -> TransferEnded | None:
        try:
            status = int(self._raw.postXferReq(transfer.handle, b""))
        except Exception as exc:
            return self._trouble(transfer_id, transfer, exc)
        if status == 0:
            self.done_in_post += 1
            return self._done(transfer_id, transfer)
        self.running[transfer_id] = transfer
        return None

    def _done(self, transfer_id: TransferId, transfer: _NixlTransfer) -> TransferEnded:
        self._release(transfer.handle)
        if transfer.look is None:
            return TransferEnded(transfer_id, Ending.DONE)
        try:
            assert self._places is not None
            return TransferEnded(transfer_id, Ending.DONE, difference=self._places.compare(transfer.look))
        except Exception as exc:
            return TransferEnded(transfer_id, Ending.FAILED, f"it cannot be compared: {exc!r}")

    @property
    def is_busy(self) -> bool:
        return bool(self.running or self.doubtful or self.unreleased)

    def sweep(self) -> list[TransferEnded]:
        news = self.ask()
        if not self.running:
            self._progress()
        return news

    def ask(self) -> list[TransferEnded]:
        news: list[TransferEnded] = []
        while self.running and (found := self._ask(self.running)):
            news += found
        if self.doubtful:
            news += self._ask(self.doubtful)
        if self.unreleased:
            waiting, self.unreleased = self.unreleased, []
            for handle in waiting:
                self._release(handle)
        return news

    def look(self) -> list[TransferEnded]:
        """Ask for the oldest transfer of each peer, which makes progress for all; ask for all if one has ended."""
        heads: dict[str, TransferId] = {}
        for transfer_id, transfer in self.running.items():
            heads.setdefault(transfer.name, transfer_id)
        chosen = {transfer_id: self.running.pop(transfer_id) for transfer_id in heads.values()}
        news = self._ask(chosen)
        if chosen:
            # Transfers that still run stay the oldest.
            self.running = chosen | self.running
        return news + self.sweep() if news else news

    def _ask(self, transfers: dict[TransferId, _NixlTransfer]) -> list[TransferEnded]:
        status = self._raw.getXferStatus
        news = []
        for transfer_id, transfer in list(transfers.items()):
            try:
                code = int(status(transfer.handle))
            except Exception as exc:
                if transfers is not self.doubtful or isinstance(exc, self._lost):
                    del transfers[transfer_id]
                    news.append(self._trouble(transfer_id, transfer, exc))
                continue
            if code == 0:
                del transfers[transfer_id]
                if (staged := transfer.staged) is None:
                    news.append(self._done(transfer_id, transfer))
                    continue
                placed = self._place(transfer_id, transfer.handle, staged)
                if ended := placed or self._advance(transfer_id, transfer, staged):
                    news.append(ended)
        return news

    def _trouble(self, transfer_id: TransferId, transfer: _NixlTransfer, exc: Exception) -> TransferEnded:
        if isinstance(exc, self._lost):
            # A transfer that was in doubt says nothing about a connection that was made since.
            is_current = self._remotes.get(transfer.name) is transfer.remote
            if is_current:
                self._gone.add(transfer.name)
            self._release(transfer.handle)
            if transfer.staged is not None:
                transfer.staged.stage.slots.give_back(transfer_id)
            return TransferEnded(transfer_id, Ending.FAILED, f"the remote process is gone ({exc})", is_current)
        # No other error of NIXL means that the transfer has stopped writing.
        self.doubtful[transfer_id] = transfer
        if transfer.staged is None:
            return TransferEnded(transfer_id, Ending.IN_DOUBT, repr(exc))
        transfer.staged.stage.detach(transfer_id)
        return TransferEnded(transfer_id, Ending.DETACHED, repr(exc))

    def _release(self, handle: int) -> None:
        try:
            self._raw.releaseXferReq(handle)
        except Exception:
            # The transfer has ended, so only its handle is kept; the release is tried again.
            self.unreleased.append(handle)

    def _progress(self) -> None:
        # Any agent can forge notifications of any other, so they are drained, counted and ignored.
        if arrived := self._raw.getNotifs({}, []):
            self.notifications += sum(map(len, arrived.values()))

    # -- end ---------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return not self._life.alive

    def close(self) -> None:
        """Destroy the agent and its transfers; raise `BackendError` if it lives on and may write. Idempotent."""
        if self._agent is not None:
            self._let_go()
        if self._life.alive:
            # Only a collection finds cycles, such as those of exceptions that the application caught.
            gc.collect()
        if self._life.alive:
            raise BackendError(
                f"NIXL agent {self.name} is still referred to, for example by the traceback of a kept exception"
            )

    def _let_go(self) -> None:
        if not self.running and not self.doubtful:
            for name in list(self._remotes):
                self.drop(name)
            for handle in self._registered:
                with suppress(Exception):
                    self._agent.deregister_memory(handle)
        for transfer in (*self.running.values(), *self.doubtful.values()):
            # UCX may abort the process if a read still waits for its connection when the agent is destroyed.
            self._release(transfer.handle)
        for left in (self._remotes, self._registered, self._gone, self.running, self.doubtful, self.unreleased):
            left.clear()
        self._raw = None
        self._agent = None
