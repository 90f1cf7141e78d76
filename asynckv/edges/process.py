"""The data plane in a process of its own: what can die inside UCX dies there, and the engine goes on.

UCX ends the process on some of its paths when a connection that emulates remote reads breaks (`docs/reliability.md`).
Here that process is a child, which maps the same memory at the same addresses and runs `NixlPlane`. Its end is the end
of whatever could write: it is waited for, and only then are its transfers reported as failed. Another child follows at
once, with an agent of another name, and the engine is told (`AgentLost`, `AgentReplaced`).

Orders of a turn of the loop go out as one frame, and no call waits for an answer. Only `register` waits, for the first
agent, and `close`, each of them not for ever.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import msgspec

import asynckv
from asynckv.config import NixlConfig
from asynckv.core.layout import Memory
from asynckv.core.plan import PieceTable
from asynckv.core.types import TransferId
from asynckv.edges import process_wire as wire
from asynckv.edges.process_main import COLLISION
from asynckv.edges.sharing import Share, Shares
from asynckv.errors import BackendError
from asynckv.ports import AgentLost, AgentReplaced, DataNews, Ended, Ending

__all__ = ["ProcessPlane"]

START_S = 30.0
"""How long a child may take until its agent serves; it takes about one second."""

CLOSE_S = 10.0
"""How long a child may take to let go by itself; it is killed then."""

KILL_S = 5.0
"""How long the kernel may take to end a child that was killed."""

MAX_COLLISIONS = 32
"""How often in a row a child may find the addresses taken: chance, of some percent for a pool of 64 GB."""

DEATHS = 10
DEATHS_S = 60.0
"""So many deaths within so many seconds, and the next start waits until they are past."""

IndexArray = wire.IndexArray


class _Process:
    """One child, until it was waited for.

    Args:
        shares: What it maps before all else.

    Raises:
        BackendError: No process can be started.
    """

    def __init__(self, shares: Sequence[Share], fds: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        # Like the modules of this process, wherever it found them; never those of the current folder.
        home = str(Path(asynckv.__file__).parents[1])
        path = os.pathsep.join([home, *(entry for entry in sys.path if entry)])
        out = 2 if _is_open(2) else subprocess.DEVNULL
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "asynckv.edges.process_main", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": path},
                pass_fds=(theirs.fileno(), *fds),
                stdin=subprocess.DEVNULL,
                stdout=out,  # never into what the engine's process prints
                stderr=out,
                process_group=0,  # what the terminal sends is for the engine's process
            )
            self.exit_fd = os.pidfd_open(self._popen.pid)
        except OSError as exc:
            ours.close()
            raise BackendError(f"the data plane's process cannot be started: {exc}") from exc
        finally:
            theirs.close()
        self.link = wire.Link(ours)
        self.link.send_bytes(json.dumps(shares).encode())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def kill(self) -> None:
        """End it now; harmless if it has ended."""
        self._popen.kill()

    def wait(self, seconds: float) -> bool:
        """Wait for its end, and see it off; False if it has not ended."""
        if self._popen.returncode is not None:
            return True
        if not select.select([self.exit_fd], [], [], max(0.0, seconds))[0]:
            return False
        self._popen.wait()
        return True

    @property
    def status(self) -> int:
        """Its exit status once it was waited for; below 0 for a signal."""
        return self._popen.returncode

    @property
    def cause(self) -> str:
        """How it ended, once it was waited for."""
        status = self._popen.returncode
        if status >= 0:
            return f"exited with status {status}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
        return f"was ended by signal {-status}"

    def close(self) -> None:
        """Let go of the descriptors, once it was waited for."""
        self.link.close()
        os.close(self.exit_fd)


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


class ProcessPlane:
    """A NIXL agent in a process of its own, on the running event loop. Needs memory that can be shared.

    Args:
        config: As for `NixlPlane`, which runs there.
        agent_name: Unique per process start; later agents of this plane get a number.
        deaths: How many ends of the child within a minute are followed by another start at once.
    """

    def __init__(self, config: NixlConfig, agent_name: str, *, deaths: int = DEATHS) -> None:
        self._config = replace(config, process="never")
        self._name = self._base_name = agent_name
        self._max_deaths = deaths
        self._starts = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_ready: Callable[[], None] = lambda: None
        self._shares: Shares | None = None
        self._memories: tuple[Memory, ...] = ()
        self._process: _Process | None = None
        self._is_serving = False
        """The child's agent serves; else there is none, or it is being made."""
        self._is_closing = False
        self._metadata = b""
        self._facts: dict[str, str] = {}
        self._stats: dict[str, int] = {}
        self._decoder = msgspec.msgpack.Decoder(list[wire.News])
        self._orders: list[wire.Order] = []
        self._is_flush_due = self._is_writing = False
        self._users: Counter[str] = Counter()
        """Peers, and how often they were prepared."""
        self._loads: dict[int, asyncio.Future[None]] = {}
        self._num_loads = 0
        self._running: set[TransferId] = set()
        """Transfers that have not ended, those in doubt included."""
        self._doubtful: set[TransferId] = set()
        self._inbox: list[DataNews] = []
        self._is_watched = False
        self._settled = asyncio.Event()
        """Set when an agent serves, or none will for a while."""
        self._ended = asyncio.Event()
        """Set when there is no child."""
        self._deaths: deque[float] = deque()
        self._lost_at = 0.0
        self._cause = ""
        self._num_failed = 0
        self._collisions = 0
        self._timer: asyncio.TimerHandle | None = None
        self._counts = dict.fromkeys(("posts", "frames_out", "frames_in", "restarts"), 0)

    # -- life --------------------------------------------------------------------------------------

    def start(self, on_ready: Callable[[], None]) -> None:
        """Choose a name; the child is started when it is known what it maps."""
        if self._process is not None:
            raise BackendError(f"process {self._process.pid} of the last start has not ended; `close()` first")
        self._loop, self._on_ready = asyncio.get_running_loop(), on_ready
        self._is_closing = False

    def register(self, memories: Sequence[Memory]) -> None:
        """Start the child, which maps and registers the memory, and wait for its agent, at most `START_S`.

        Raises:
            BackendError: The memory cannot be shared (names the region and the remedy), or the child does not serve.
        """
        assert self._loop is not None
        if self._shares is not None:
            raise BackendError("all memory of a data plane in a process of its own is registered at once")
        self._shares, self._memories = Shares(memories), tuple(memories)
        deadline, self._collisions = time.monotonic() + START_S, 0
        try:
            self._spawn()
            while not self._is_serving:
                self._await_ready(deadline)
        except BaseException:
            self.close()
            raise
        self._inbox.clear()
        self._listen()

    def _spawn(self) -> None:
        """Start a child and give it its first order; it answers `Ready`."""
        assert self._shares is not None
        self._starts += 1
        self._name = self._base_name if self._starts == 1 else f"{self._base_name}-{self._starts}"
        self._process = _Process(self._shares.shares, self._shares.fds)
        self._ended.clear()
        self._orders = [wire.Setup(self._name, self._config, self._memories)]
        if self._is_watched:
            self._orders.append(wire.Watch(True))
        self._flush()

    def _await_ready(self, deadline: float) -> None:
        """Wait for the first agent: the one thing that holds up the loop."""
        process = self._process
        assert process is not None
        left = deadline - time.monotonic()
        if left <= 0:
            raise BackendError(f"the data plane's process did not serve within {START_S:g} s")
        unsent = [] if process.link.flush() else [process.link.fileno()]
        select.select([process.link.fileno(), process.exit_fd], unsent, [], left)
        self._take_news()
        if process.wait(0.0):
            self._take_news()
            if process.status != COLLISION or self._collisions >= MAX_COLLISIONS:
                raise BackendError(f"the data plane's process {self._why(process)}")
            self._collisions += 1
            process.close()
            self._spawn()

    def _why(self, process: _Process) -> str:
        """Say how a child ended, and what it had to say of it."""
        if process.status == COLLISION:
            return f"found the addresses of the memory taken {self._collisions + 1} times in a row"
        return self._cause or process.cause

    def _listen(self) -> None:
        assert self._process is not None
        assert self._loop is not None
        self._loop.add_reader(self._process.link.fileno(), self._on_news)
        self._loop.add_reader(self._process.exit_fd, self._on_exit)

    def _forget_process(self) -> None:
        """See off a child that was waited for."""
        process, self._process = self._process, None
        assert process is not None
        if self._loop is not None and not self._loop.is_closed():
            for fd in (process.link.fileno(), process.exit_fd):
                self._loop.remove_reader(fd)
            self._loop.remove_writer(process.link.fileno())
        process.close()
        self._is_serving = self._is_writing = False
        self._orders.clear()
        self._ended.set()

    @property
    def agent_name(self) -> str:
        """Unique per start of the child."""
        return self._name

    @property
    def pid(self) -> int:
        """The child's process id; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def metadata(self) -> bytes:
        """Return the metadata of the child's agent."""
        return self._metadata

    async def quiesce(self) -> None:
        """Tell the child to end, and wait for it off the loop, at most `CLOSE_S`."""
        self._begin_to_close()
        if self._process is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), CLOSE_S)
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Let go of everything. Idempotent. Waits for the child, at most `CLOSE_S`, and kills it then.

        Raises:
            BackendError: The kernel does not end it, so it may still write. Call again to wait again.
        """
        self._begin_to_close()
        if (process := self._process) is not None:
            if not process.wait(CLOSE_S):
                process.kill()
            if not process.wait(KILL_S):
                raise BackendError(
                    f"the data plane's process {process.pid} does not end, {KILL_S:g} s after it was killed: memory "
                    f"that is read into may still be written; keep it, and call close() again"
                )
            self._forget_process()
        if self._shares is not None:
            self._shares.close()
            self._shares = None
        self._fail_loads("the data plane was closed")
        for each in (self._users, self._running, self._doubtful, self._inbox, self._deaths):
            each.clear()
        self._is_watched = False

    def _begin_to_close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._is_closing:
            self._is_closing = True
            self._settled.set()
            if self._process is not None:
                self._orders.append(wire.Close())
                self._flush()

    # -- the child's death -------------------------------------------------------------------------

    def _on_exit(self) -> None:
        process = self._process
        if process is None or not process.wait(0.0):
            return
        self._take_news()  # what it said before
        cause, status = self._why(process), process.status
        self._forget_process()
        if self._is_closing:
            self._tell()
            return
        if status == COLLISION and self._collisions < MAX_COLLISIONS:
            self._collisions += 1
            self._restart()
            return
        self._die(cause)

    def _die(self, cause: str) -> None:
        """The child is gone: nothing of it writes any more. Say so, and make another."""
        assert self._loop is not None
        now = time.monotonic()
        self._cause = f"the data plane's process {cause}"
        self._deaths.append(now)
        while len(self._deaths) > self._max_deaths:
            self._deaths.popleft()
        pause = 0.0
        if len(self._deaths) == self._max_deaths:
            pause = max(0.0, self._deaths[0] + DEATHS_S - now)
        if self._metadata:
            self._lost_at, self._num_failed = now, len(self._running)
            self._inbox += [Ended(each, Ending.FAILED, self._cause) for each in sorted(self._running)]
            self._running.clear()
            self._doubtful.clear()
            self._users.clear()
            self._metadata = b""
            self._settled.clear()
        if pause:
            # Nobody waits for it so long.
            self._settled.set()
        self._inbox.append(AgentLost(self._cause, pause))
        self._fail_loads(self._cause)
        self._collisions = 0
        self._timer = self._loop.call_later(pause, self._restart)
        self._tell()

    def _restart(self) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._settled.clear()
        try:
            self._spawn()
        except BackendError as exc:
            self._timer = None
            self._die(f"could not be followed by another: {exc}")
            return
        self._listen()
        self._timer = self._loop.call_later(START_S, self._on_late)

    def _on_late(self) -> None:
        self._timer = None
        if self._process is not None and not self._is_serving:
            self._cause = f"did not serve within {START_S:g} s"
            self._process.kill()

    def _fail_loads(self, cause: str) -> None:
        loads, self._loads = self._loads, {}
        for future in loads.values():
            if not future.done():
                future.set_exception(BackendError(cause))

    # -- news --------------------------------------------------------------------------------------

    def _on_news(self) -> None:
        if not self._take_news() and self._process is not None:
            # It has closed its end: whatever it is about, it serves nobody, and its end is told by the kernel.
            assert self._loop is not None
            self._loop.remove_reader(self._process.link.fileno())
            if not self._is_closing:
                self._process.kill()
        self._tell()

    def _tell(self) -> None:
        if self._inbox:
            self._on_ready()

    def _take_news(self) -> bool:
        """Take what the child says; False if it says nothing any more."""
        assert self._process is not None
        frames, is_there = self._process.link.receive()
        for frame in frames:
            self._counts["frames_in"] += 1
            for news in self._decoder.decode(frame):
                self._hear(news)
        return is_there

    def _hear(self, news: wire.News) -> None:
        match news:
            case wire.Ends(ends):
                for ended in ends:
                    if ended.transfer_id not in self._running:
                        continue
                    if ended.ending is Ending.IN_DOUBT:
                        self._doubtful.add(ended.transfer_id)
                    else:
                        self._running.discard(ended.transfer_id)
                        self._doubtful.discard(ended.transfer_id)
                    self._inbox.append(ended)
            case wire.Loaded(number, cause):
                future = self._loads.pop(number, None)
                if future is not None and not future.done():
                    if cause:
                        future.set_exception(BackendError(cause))
                    else:
                        future.set_result(None)
            case wire.Stats(values):
                self._stats = values
            case wire.Ready(metadata, facts):
                self._serve(metadata, facts)
            case wire.Unready(cause):
                self._cause = cause
            case wire.Warm():
                pass
            case _:
                assert_never(news)

    def _serve(self, metadata: bytes, facts: dict[str, str]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._metadata, self._facts, self._is_serving = metadata, facts, True
        if self._lost_at:
            self._counts["restarts"] += 1
            seconds = time.monotonic() - self._lost_at
            self._inbox.append(AgentReplaced(self._name, metadata, self._cause, seconds, self._num_failed))
        self._cause, self._collisions = "", 0
        self._settled.set()

    def poll(self) -> list[DataNews]:
        """Return news; progress for remote readers is the child's."""
        news, self._inbox = self._inbox, []
        return news

    # -- orders ------------------------------------------------------------------------------------

    def _order(self, order: wire.Order) -> None:
        """Say something to the child, with all else of this turn."""
        if not self._is_serving:
            return
        self._orders.append(order)
        if not self._is_flush_due:
            assert self._loop is not None
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._process is None or not self._orders:
            return
        self._counts["frames_out"] += 1
        is_sent = self._process.link.send(self._orders)
        self._orders.clear()
        if not is_sent and not self._is_writing:
            assert self._loop is not None
            self._is_writing = True
            self._loop.add_writer(self._process.link.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        if self._process is not None and self._process.link.flush():
            assert self._loop is not None
            self._is_writing = False
            self._loop.remove_writer(self._process.link.fileno())

    async def prepare_peer(self, name: str, metadata: bytes) -> None:
        """Load a peer's metadata in the child; while there is none, once there is."""
        while not self._is_serving:
            if self._is_closing or self._settled.is_set():
                raise BackendError(self._cause or "the data plane was closed")
            await self._settled.wait()
        future = asyncio.get_running_loop().create_future()
        self._num_loads += 1
        self._loads[self._num_loads] = future
        self._order(wire.Load(self._num_loads, name, metadata))
        starts = self._starts
        await future
        if starts != self._starts or not self._is_serving:
            raise BackendError(f"{name} was loaded by a process that has ended")
        self._users[name] += 1

    def add_table(self, name: str, table: PieceTable, memories: Sequence[Memory], remote: Sequence[Memory]) -> None:
        """Have a table prepared; what NIXL has against it, reads of it tell."""
        if table.num_rows == 0:
            return
        if not self._users[name]:
            raise BackendError(f"peer {name} is not loaded")
        arrays = (table.length.tobytes(), table.local.tobytes(), table.remote.tobytes())
        blocks = table.local_blocks, table.remote_blocks
        self._order(wire.AddTable(name, table.table_id, *arrays, *blocks, tuple(memories), tuple(remote)))

    def remove_table(self, name: str, table_id: int) -> None:
        """Forget one table's descriptor lists."""
        if self._users[name]:
            self._order(wire.RemoveTable(name, table_id))

    def remove_peer(self, name: str, *, keep: bool = False) -> None:
        """Forget a peer, as `NixlPlane` does."""
        if self._users[name]:
            self._users[name] -= 1
            self._order(wire.Drop(name, keep))
        if not self._users[name]:
            del self._users[name]

    def post_read(
        self, transfer_id: TransferId, name: str, table_id: int, local: IndexArray, remote: IndexArray
    ) -> Ended | None:
        """Hand a read to the child; only without one is anything known at once."""
        self._counts["posts"] += 1
        if not self._is_serving:
            return Ended(transfer_id, Ending.FAILED, self._cause or "the data plane was closed")
        self._running.add(transfer_id)
        self._order(wire.Read(transfer_id, name, table_id, local.tobytes(), remote.tobytes()))
        return None

    def watch(self, serving: bool) -> None:
        """Have the child make progress for remote readers, or not."""
        self._is_watched = serving
        self._order(wire.Watch(serving))

    # -- questions ---------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Count transfers and restarts; what the present child counts is up to a tenth of a second old."""
        return {
            **self._stats,
            **self._counts,
            "running": len(self._running) - len(self._doubtful),
            "in_doubt": len(self._doubtful),
            "peers": len(self._users),
        }

    def describe(self) -> dict[str, str]:
        """Name versions and modes of the child's agent, and the child."""
        return {**self._facts, "data_plane": f"process {self.pid} of its own" if self.pid else "no process now"}
