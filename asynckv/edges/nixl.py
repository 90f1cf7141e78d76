"""The data plane on NIXL: the only file that imports it.

NIXL's progress thread stays off (it would spin on a core), so this side makes progress itself, on the
event loop: when one of UCX's own epoll descriptors fires, once after every post, and every 5 ms while
transfers run or remote readers may need us. Where those descriptors cannot be found it polls, tightly
at first and then up to once a millisecond, only while something runs.

What is known about the end of a transfer (measured, and held to strictly): `DONE` is the end; a remote
disconnect is the end, because no thread of NIXL's own is left to write; any other trouble is *doubt*,
and a transfer in doubt keeps its handle and is asked again for as long as it takes.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import re
import stat
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import numpy.typing as npt

from asynckv.config import NixlConfig
from asynckv.core.layout import Memory
from asynckv.core.plan import PieceTable
from asynckv.core.types import TransferId
from asynckv.errors import BackendError
from asynckv.ports import Ended, Ending

__all__ = ["NixlPlane"]

SAFETY_S = 0.005
"""Some wake-ups are missed; a timer this long finds what they would have told."""

DOUBT_S = 0.25
"""How often a transfer in doubt is asked again when nothing else runs."""

TIGHT_POLLS = 200
DEFAULTS = {"engine_config": "TCP_TX_SEG_SIZE=64k,TCP_RX_SEG_SIZE=64k"}
MAX_KEPT = 64
"""Remote agents that are kept connected though nobody reads from them."""

MEMORY_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}

IndexArray = npt.NDArray[np.int32]


def _variant() -> str:
    """Name the NIXL package to load: the one that is loaded, else the one for torch's CUDA version.

    Two variants in one process abort it, so this must agree with what `import nixl` would choose; that
    itself would import torch to find out, for three seconds.
    """
    for name in ("nixl_cu13", "nixl_cu12"):
        if f"{name}._bindings" in sys.modules:
            return name
    order = ["nixl_cu13", "nixl_cu12"]
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin:
        with suppress(OSError):
            text = (Path(torch.origin).parent / "version.py").read_text()
            if found := re.search(r"^cuda\b.*=\s*['\"](\d+)", text, re.MULTILINE):
                order.sort(key=lambda name: name != f"nixl_cu{found[1]}")
    for name in order:
        if importlib.util.find_spec(name) is not None:
            return name
    raise BackendError("NIXL is not installed; `pip install nixl` brings it")


def _load() -> Any:
    """Import NIXL's Python API without letting it touch stdout or the application's logging."""
    # UCX reads its environment when it is loaded, and prints warnings to stdout by default.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if "UCX_LOG_FILE" not in os.environ and _is_reopenable(2):
        os.environ["UCX_LOG_FILE"] = "/dev/stderr"
    root = logging.getLogger()
    handlers, raises = list(root.handlers), logging.raiseExceptions
    try:
        return importlib.import_module(f"{_variant()}._api")
    except ImportError as exc:
        raise BackendError(f"NIXL cannot be loaded: {exc}; reinstall it with `pip install nixl`") from exc
    finally:
        logging.raiseExceptions = raises
        for handler in handlers:
            if handler not in root.handlers:
                root.addHandler(handler)


def _is_reopenable(fd: int) -> bool:
    """UCX opens its log file anew and empty: that must never be a file that somebody's stderr is kept in."""
    with suppress(OSError):
        return not stat.S_ISREG(os.fstat(fd).st_mode)
    return False


def _epolls() -> set[int]:
    """Return this process's epoll descriptors."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


class _Remote:
    """What is prepared for one peer."""

    def __init__(self, metadata: bytes) -> None:
        self.metadata = metadata
        self.ready = asyncio.Event()
        self.users = 1
        self.tables: dict[int, tuple[Any, Any]] = {}


class NixlPlane:
    """One NIXL agent on the running event loop.

    Args:
        config: Back end and its parameters.
        agent_name: Unique per process start; later agents of this plane get a number.
    """

    def __init__(self, config: NixlConfig, agent_name: str) -> None:
        self._config = config
        self._name = self._base_name = agent_name
        self._starts = 0
        self._api: Any = None
        self._agent: Any = None
        self._raw: Any = None
        self._lost: type[Exception] = Exception
        self._registered: list[Any] = []
        self._remotes: dict[str, _Remote] = {}
        self._kept: OrderedDict[str, None] = OrderedDict()
        """Remote agents that nobody uses now, the oldest first."""
        self._running: dict[TransferId, int] = {}
        self._doubtful: dict[TransferId, int] = {}
        self._unreleased: list[int] = []
        self._fds: tuple[int, ...] = ()
        self._on_ready: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_sweep_due = False
        self._is_serving = False
        self._polls = 0
        self._counts = dict.fromkeys(("posts", "done_in_post", "wakeups", "rescued", "notifications"), 0)
        self._is_timer_poll = False

    # -- life --------------------------------------------------------------------------------------

    def start(self, on_ready: Callable[[], None]) -> None:
        """Create the agent and hand UCX's descriptors to the loop."""
        self._api = _load()
        self._starts += 1
        if self._starts > 1:
            self._name = f"{self._base_name}-{self._starts}"
        self._loop, self._on_ready = asyncio.get_running_loop(), on_ready
        config = self._api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            # Metadata is loaded in a worker thread; an unlocked agent crashes under two threads.
            sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent = self._api.nixl_agent(self._name, config)
            before = _epolls()
            self._agent.create_backend(self._config.backend, DEFAULTS | self._config.params)
        except Exception as exc:
            plugins = ", ".join(getattr(self._agent, "plugin_list", [])) or "none"
            self._agent = None
            raise BackendError(
                f"NIXL back end {self._config.backend!r} cannot be created: {exc!r}; plug-ins found: {plugins}"
            ) from exc
        self._raw = self._agent.agent
        self._lost = sys.modules[f"{self._api.__package__}._bindings"].nixlRemoteDisconnectError
        fds = []
        for fd in sorted(_epolls() - before):
            # asyncio refuses descriptors that it cannot watch; polling serves then.
            with suppress(OSError, ValueError):
                self._loop.add_reader(fd, self._woken)
                fds.append(fd)
        self._fds = tuple(fds)

    def register(self, memories: Sequence[Memory]) -> None:
        """Register local memory."""
        for kind in sorted({m.kind for m in memories}):
            rows = [(m.base, m.length, m.device, "") for m in memories if m.kind == kind]
            try:
                self._registered.append(self._agent.register_memory(rows, MEMORY_KINDS[kind]))
            except Exception as exc:
                raise BackendError(f"NIXL cannot register {len(rows)} ranges of {kind} memory: {exc!r}") from exc

    @property
    def agent_name(self) -> str:
        """Unique per start."""
        return self._name

    def metadata(self) -> bytes:
        """Return NIXL's metadata blob."""
        return bytes(self._agent.get_agent_metadata())

    def close(self) -> None:
        """Let go of everything; memory under a running transfer stays registered. Idempotent."""
        if self._loop is not None:
            for fd in self._fds:
                self._loop.remove_reader(fd)
            self._fds = ()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if self._agent is None:
            return
        agent, self._agent, self._raw = self._agent, None, None
        if not self._running and not self._doubtful:
            for name in list(self._remotes):
                with suppress(Exception):
                    self._drop_remote(agent, name)
            for handle in self._registered:
                with suppress(Exception):
                    agent.deregister_memory(handle)
        # The agent's destructor ends whatever still runs, before the memory goes.
        for left in (self._remotes, self._registered, self._kept, self._running, self._doubtful, self._unreleased):
            left.clear()
        self._is_serving = False
        del agent

    # -- peers -------------------------------------------------------------------------------------

    async def prepare_peer(self, name: str, metadata: bytes) -> None:
        """Load a peer's metadata off the loop."""
        if (known := self._remotes.get(name)) is not None:
            # One process under several addresses, or met again.
            await known.ready.wait()
            if self._remotes.get(name) is not known or known.metadata != metadata:
                raise BackendError(f"peer {name} is loaded with other metadata; every start of a process has a name")
            known.users += 1
            self._kept.pop(name, None)
            return
        remote = self._remotes[name] = _Remote(metadata)
        try:
            await self._load_remote(name, metadata)
        except BaseException:
            if self._remotes.get(name) is remote:
                del self._remotes[name]
            raise
        finally:
            remote.ready.set()

    async def _load_remote(self, name: str, metadata: bytes) -> None:
        agent = self._agent
        try:
            # Opens the endpoint: 4 to 14 ms during which the loop has better things to do.
            loaded = await anyio.to_thread.run_sync(agent.add_remote_agent, metadata)
        except Exception as exc:
            raise BackendError(f"NIXL refuses the metadata of {name}: {exc!r}") from exc
        found = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
        if found != name:
            # Never somebody else's: metadata under a false name may be that of a peer in use.
            if found not in self._remotes:
                with suppress(Exception):
                    agent.remove_remote_agent(found)
            raise BackendError(f"NIXL metadata is of agent {found!r}, but {name!r} was announced")

    def add_table(self, name: str, table: PieceTable, memories: Sequence[Memory], remote: Sequence[Memory]) -> None:
        """Prepare one table's two descriptor lists, one strided row per piece."""
        if table.num_rows == 0:
            return
        if name not in self._remotes:
            raise BackendError(f"peer {name} is not loaded")
        try:
            mine = self._prepare("", table.local, table.length, table.local_blocks, memories)
            theirs = self._prepare(name, table.remote, table.length, table.remote_blocks, remote)
        except BackendError:
            raise
        except Exception as exc:
            raise BackendError(f"NIXL cannot prepare descriptors of {name}: {exc!r}") from exc
        self._remotes[name].tables[table.table_id] = (mine, theirs)

    def remove_table(self, name: str, table_id: int) -> None:
        """Forget one table's descriptor lists."""
        if self._agent is None or name not in self._remotes:
            return
        for handle in self._remotes[name].tables.pop(table_id, ()):
            with suppress(Exception):
                self._agent.release_dlist_handle(handle)

    def remove_peer(self, name: str, *, keep: bool = False) -> None:
        """Forget a peer and its descriptor lists.

        UCX keeps a socket open on both sides for every removal of an agent whose process lives (measured with NIXL
        1.5.1): those that may be met again are kept, the last `MAX_KEPT` of them.
        """
        remote = self._remotes.get(name)
        if remote is None or self._agent is None:
            return
        remote.users -= 1
        if remote.users > 0:
            return
        if keep:
            self._kept[name] = None
            if len(self._kept) <= MAX_KEPT:
                return
            name, _ = self._kept.popitem(last=False)
        with suppress(Exception):  # a connection that broke is gone as it is
            self._drop_remote(self._agent, name)

    def _drop_remote(self, agent: Any, name: str) -> None:
        for pair in self._remotes.pop(name).tables.values():
            for handle in pair:
                agent.release_dlist_handle(handle)
        agent.remove_remote_agent(name)

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

    def post_read(
        self, transfer_id: TransferId, name: str, table_id: int, local: IndexArray, remote: IndexArray
    ) -> Ended | None:
        """Post a read; local transports finish it in here."""
        self._counts["posts"] += 1
        try:
            mine, theirs = self._remotes[name].tables[table_id]
            transfer = self._agent.make_prepped_xfer("READ", mine, local, theirs, remote)
        except Exception as exc:
            # Nothing was posted, so nothing will be written.
            return Ended(transfer_id, Ending.FAILED, repr(exc))
        # The raw handle: the wrapper would release it behind our back when it is collected.
        handle, transfer._released = transfer._handle, True
        try:
            status = int(self._raw.postXferReq(handle, b""))
        except Exception as exc:
            return self._trouble(transfer_id, handle, exc)
        if status == 0:
            self._counts["done_in_post"] += 1
            self._release(handle)
            return Ended(transfer_id, Ending.DONE)
        self._running[transfer_id] = handle
        if not self._is_sweep_due and self._loop is not None:
            # Posting makes progress and may have eaten another transfer's wake-up.
            self._is_sweep_due = True
            self._loop.call_soon(self._sweep_soon)
        self._arm()
        return None

    def poll(self) -> list[Ended]:
        """Sweep until nothing new is found; without transfers, make progress for remote readers."""
        if self._raw is None:
            return []
        news: list[Ended] = []
        while found := self._sweep(self._running):
            news += found
        if self._doubtful:
            news += self._sweep(self._doubtful)
        if not self._running:
            self._progress()
        if self._unreleased:
            waiting, self._unreleased = self._unreleased, []
            for handle in waiting:
                self._release(handle)
        if self._is_timer_poll:
            self._counts["rescued"] += len(news)
        self._polls = 0 if news else self._polls + 1
        return news

    def watch(self, serving: bool) -> None:
        """Progress for remote readers from now on, or not."""
        self._is_serving = serving
        self._arm()

    def _sweep(self, handles: dict[TransferId, int]) -> list[Ended]:
        status = self._raw.getXferStatus
        news = []
        for transfer_id, handle in list(handles.items()):
            try:
                code = int(status(handle))
            except Exception as exc:
                if handles is self._doubtful:
                    if isinstance(exc, self._lost):
                        del handles[transfer_id]
                        news.append(self._trouble(transfer_id, handle, exc))
                    continue
                del handles[transfer_id]
                news.append(self._trouble(transfer_id, handle, exc))
                continue
            if code == 0:
                del handles[transfer_id]
                self._release(handle)
                news.append(Ended(transfer_id, Ending.DONE))
        return news

    def _trouble(self, transfer_id: TransferId, handle: int, exc: Exception) -> Ended:
        if isinstance(exc, self._lost):
            self._release(handle)
            return Ended(transfer_id, Ending.FAILED, f"the remote process is gone ({exc})", peer_lost=True)
        self._doubtful[transfer_id] = handle
        self._arm()
        return Ended(transfer_id, Ending.IN_DOUBT, repr(exc))

    def _release(self, handle: int) -> None:
        try:
            self._raw.releaseXferReq(handle)
        except Exception:
            # Its bytes are settled; only the handle is kept, and tried again.
            self._unreleased.append(handle)

    def _progress(self) -> None:
        # Anybody can send notifications in anybody's name: they are emptied, counted and ignored.
        if arrived := self._raw.getNotifs({}, []):
            self._counts["notifications"] += sum(map(len, arrived.values()))

    # -- waking ------------------------------------------------------------------------------------

    def _woken(self) -> None:
        self._counts["wakeups"] += 1
        self._on_ready()

    def _sweep_soon(self) -> None:
        self._is_sweep_due = False
        if self._raw is not None:
            self._on_ready()

    def _arm(self) -> None:
        if self._timer is None and self._loop is not None and self._raw is not None and (delay := self._delay()) >= 0:
            self._timer = self._loop.call_later(delay, self._timed_out)

    def _delay(self) -> float:
        if self._fds:
            return SAFETY_S if self._running or self._is_serving else DOUBT_S if self._doubtful else -1.0
        if not (self._running or self._doubtful or self._is_serving):
            return -1.0
        over = self._polls - TIGHT_POLLS
        return 0.0 if self._running and over < 0 else min(1e-3, 2e-5 * 2 ** min(max(over, 0) // 8, 6))

    def _timed_out(self) -> None:
        self._timer = None
        self._is_timer_poll = True
        try:
            self._on_ready()
        finally:
            self._is_timer_poll = False
        self._arm()

    # -- questions ---------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Count handles and wake-ups."""
        return {
            **self._counts,
            "running": len(self._running),
            "in_doubt": len(self._doubtful),
            "unreleased": len(self._unreleased),
            "peers": len(self._remotes),
        }

    def describe(self) -> dict[str, str]:
        """Name versions and modes. What UCX negotiates per peer it tells only in its own log."""
        from importlib.metadata import version

        package = self._api.__package__ if self._api is not None else ""
        return {
            "nixl": version("nixl"),
            "nixl_variant": str(package),
            "backend": self._config.backend,
            "ucx_tls": os.environ.get("UCX_TLS", "UCX default"),
            "ucx_net_devices": os.environ.get("UCX_NET_DEVICES", "UCX default"),
            "ucx_error_handling_mode": self._config.params.get("ucx_error_handling_mode", "peer (NIXL default)"),
            "engine_config": (DEFAULTS | self._config.params)["engine_config"],
            "completions": f"{len(self._fds)} epoll descriptors of UCX" if self._fds else "polling",
        }
