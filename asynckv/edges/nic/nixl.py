"""The data plane on NIXL: the only file that imports it.

NIXL's progress thread stays off because it would spin on a core, so the event loop makes progress: when one of UCX's
epoll descriptors fires, once after every post, and every 5 ms while transfers run or remote readers may need progress.
Without descriptors it polls, tightly at first and then up to once a millisecond.

A post can be a copy. So the loop posts small reads itself, and hands bulk to posting threads (`posters.py`), each with
an agent of its own. Remote readers reach the loop's agent. A remote agent is added to all agents and dropped from all.
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
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import anyio.to_thread

from asynckv.config import NixlConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.pace import Pace
from asynckv.core.types import TransferId
from asynckv.edges.nic.agent import Agent, closed_on_failure
from asynckv.edges.nic.packer import Packer
from asynckv.edges.nic.places import Places
from asynckv.edges.nic.posters import Poster, Posters
from asynckv.edges.nic.read_costs import measure_costs
from asynckv.edges.nic.staging import Bytes
from asynckv.errors import BackendError
from asynckv.geometry.gather import PACK_BYTES, Gathered
from asynckv.geometry.layout import Memory
from asynckv.geometry.look import Look
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.staging import SLOT_BYTES, ReadCosts
from asynckv.ports import AgentInfo, CopyMade

SAFETY_S = 0.005  # interval of a timer that finds completions with missed wake-ups
DOUBT_S = 0.25  # seconds between two checks of a transfer in doubt when nothing else runs
TIGHT_POLLS = 200
DEFAULTS = {"engine_config": "TCP_TX_SEG_SIZE=64k,TCP_RX_SEG_SIZE=64k"}
BESIDE = 0.25  # part of `bulk_bytes` from which a read that is not alone is bulk, where a post is a copy
OF_POSTERS = ("posts", "joined", "batches", "wakeups", "rescued")  # counts of each posting thread
MAX_KEPT = 64  # remote agents that stay connected without a reader


def _variant() -> str:
    """Return the NIXL package that `import nixl` would choose, because two variants in one process abort it."""
    for name in ("nixl_cu13", "nixl_cu12"):
        if f"{name}._bindings" in sys.modules:
            return name
    wanted = f"nixl_cu{torch_versions()[1].partition('.')[0]}"
    for name in sorted(["nixl_cu13", "nixl_cu12"], key=lambda name: name != wanted):
        if importlib.util.find_spec(name) is not None:
            return name
    raise BackendError("NIXL is not installed; `pip install nixl` brings it")


def torch_versions() -> tuple[str, str]:
    """Return torch's version and that of its CUDA, from its files, because importing it takes seconds; else empty."""
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            text = (Path(spec.origin).parent / "version.py").read_text()
            name = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
            cuda = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", text, re.MULTILINE)
            return name[1] if name else "", cuda[1] if cuda else ""
    return "", ""


def load_nixl() -> Any:
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
    """Return False if stderr is a file: UCX truncates its log file when it opens it, and would erase that file."""
    with suppress(OSError):
        return not stat.S_ISREG(os.fstat(fd).st_mode)
    return False


# A posting thread may copy this much slower than the loop, because the loop has other work. After every post a thread
# waits for Python's lock, up to 5 ms if an event loop never sleeps, and in that case the loop copies faster.
PACE = 1.5


class PeerTrials(Protocol):
    """A trial of peers in another process before they are loaded here (`survivor/taster.py`)."""

    num_refused: int

    async def try_out(self, remote: AgentInfo, memories: Sequence[Memory]) -> None: ...

    async def quiesce(self) -> None: ...


class _Remote:
    def __init__(self, metadata: bytes, memories: tuple[Memory, ...]) -> None:
        self.metadata, self.memories = metadata, memories
        self.ready = asyncio.Event()
        self.users = 1


class NixlPlane:
    """One NIXL agent on the running event loop, and one per posting thread."""

    _loop: asyncio.AbstractEventLoop  # of the last start

    def __init__(
        self, config: NixlConfig, agent_name: str, taster: PeerTrials | None = None, *, looks: bool = False
    ) -> None:
        self._config, self._taster, self._looks = config, taster, looks
        self._name = self._base_name = agent_name
        self._starts = 0
        self._api: Any = None
        self._agent: Agent | None = None
        self._posters = Posters(self._told, "a posting thread")
        self._ending: Agent | None = None  # the loop's agent once it was closed, until it is known to be gone
        self._packer: Packer | None = None
        self._pace = Pace(PACE * config.num_posters)
        self.costs: ReadCosts | None = None
        self._remotes: dict[str, _Remote] = {}
        self._kept: OrderedDict[str, None] = OrderedDict()  # remote agents without a user now, the oldest first
        self._handed: set[TransferId] = set()  # reads that a posting thread took over, until their end is polled
        self._staged: dict[TransferId, Poster] = {}  # those of staged tables
        self._handed_doubtful: set[TransferId] = set()
        self._fds: tuple[int, ...] = ()
        self._on_ready: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._is_sweep_due = self._has_posted = self._posts_copy = False
        self._is_serving = False
        self._polls = 0
        self._counts = dict.fromkeys(("posts", "posts_handed", "posts_staged", "wakeups", "rescued"), 0)
        self._is_timer_poll = False

    # -- life --------------------------------------------------------------------------------------

    async def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        return self.begin(memories, on_ready)

    def begin(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        if self._posters or self._ending is not None or self._packer is not None:
            names = [*(p.name for p in self._posters), *(each.name for each in (self._ending, self._packer) if each)]
            left = ", ".join(names)
            raise BackendError(f"{left} of the last start is still inside NIXL; `close()` first")
        self._api = load_nixl()
        self._starts += 1
        if self._starts > 1:
            self._name = f"{self._base_name}-{self._starts}"
        self._loop, self._on_ready = asyncio.get_running_loop(), on_ready
        self._is_sweep_due = self._has_posted = False
        with closed_on_failure(self.close):
            self._agent = self._make_agent(self._name, memories)
            self._listen(self._agent)
            is_on_host = all(memory.kind == "cpu" for memory in memories)
            if is_on_host and self._config.packing_bytes:
                num_copies = max(self._config.packing_bytes // PACK_BYTES, 1)
                self._packer = Packer(memories, num_copies, self._loop, on_ready)
                self._agent.register_besides(self._packer.packing.memory)
            # Agents are made here, because their threads would wait for Python's lock some hundred times, up to 5 ms
            # each where another thread never sleeps, and a handshake has a deadline.
            self.costs, threads, staging = None, self._config.num_posters, self._config.staging_bytes
            num_slots = max(staging // SLOT_BYTES // threads, 1) if staging and threads else 0
            stages, areas = num_slots > 0 and is_on_host, list[Bytes]()
            places = Places(memories) if self._looks else None
            for number in range(1, threads + 1):
                agent = self._make_agent(f"{self._name}-poster{number}", memories)
                with closed_on_failure(agent.close):
                    if stages:
                        agent.add_stage(num_slots, areas)
                    if places is not None:
                        agent.add_places(places)
                    if stages and number == 1:
                        self.costs = measure_costs(agent, self._agent)
                        stages = self.costs is not None
                    self._posters.start(agent.name, agent)
            packing, info = self._packer.packing if self._packer is not None else None, self._agent.info()
            if places is not None:
                self._agent.add_places(places)
            return info._replace(packing=packing)

    def _listen(self, agent: Agent) -> None:
        fds = []
        for fd in agent.fds:
            # asyncio refuses descriptors that it cannot watch; the plane polls in that case.
            with suppress(OSError, ValueError):
                self._loop.add_reader(fd, self._woken)
                fds.append(fd)
        self._fds = tuple(fds)

    def _make_agent(self, name: str, memories: Sequence[Memory]) -> Agent:
        agent = Agent(self._api, name, self._config.backend, DEFAULTS | self._config.params)
        with closed_on_failure(agent.close):
            agent.register(memories)
        return agent

    async def quiesce(self) -> None:
        """Stop posting threads and wait for them off the loop, at most `CLOSE_S`, so that `close` need not wait."""
        self._posters.stop()
        if self._taster is not None:
            await self._taster.quiesce()
        await self._posters.quiesce()
        if self._packer is not None:
            await self._packer.quiesce()

    def close(self) -> None:
        """Release everything, or raise `BackendError` if something may still write. Idempotent."""
        self._posters.stop()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._fds = ()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_serving = False
        if self._agent is not None:
            self._agent, self._ending = None, self._agent
        causes = []
        for each in (self._packer, self._ending):
            try:
                if each is not None:
                    each.close()
            except BackendError as exc:
                causes.append(str(exc))
        if self._ending is not None and self._ending.is_closed:
            self._ending = None
        if self._ending is None and self._packer is not None and self._packer.wait(0.0):
            self._packer = None  # only now, because remote readers may have read its memory until here
        causes += self._posters.join()
        if causes:
            raise BackendError(
                f"{'; '.join(causes)}: memory that is read into may still be written; keep it, and call close() again"
            )
        # Nothing writes any more, because every agent is gone.
        for kept in (self._remotes, self._kept, self._handed, self._staged, self._handed_doubtful, self._posters.inbox):
            kept.clear()

    # -- remote agents -----------------------------------------------------------------------------

    async def add_remote_agent(self, agent: AgentInfo, memories: Sequence[Memory]) -> None:
        name, memories = agent.name, tuple(memories)
        if (remote := self._remotes.get(name)) is None:
            remote = self._remotes[name] = _Remote(agent.metadata, memories)
        else:
            # A process may be met again, or under several addresses.
            await remote.ready.wait()
            is_same = (remote.metadata, remote.memories) == (agent.metadata, memories)
            if self._remotes.get(name) is not remote or not is_same:
                raise BackendError(
                    f"peer {name} is loaded with other metadata; give every start of a process an agent name of its own"
                )
            remote.users += 1
            self._kept.pop(name, None)
            agents = (self._agent, *(poster.agent for poster in self._posters if poster.is_alive))
            if all(each is None or each.is_connected(name) for each in agents):
                return
            # The connection broke. A transfer in doubt still keeps the peer, so new reads need another connection.
            remote.ready.clear()
        try:
            await self._load_remote(agent, memories)
        except BaseException:
            if self._remotes.get(name) is remote:
                self.remove_remote_agent(name)
            raise
        finally:
            remote.ready.set()

    async def _load_remote(self, remote: AgentInfo, memories: Sequence[Memory]) -> None:
        if self._taster is not None and not (remote.is_trusted and self._config.try_metadata == "auto"):
            await self._taster.try_out(remote, memories)
        if self._agent is None:
            raise BackendError("the data plane was closed")
        if not self._agent.is_connected(remote.name):
            self._agent.forget_broken(remote.name)
            # Opening the endpoint takes 4 to 14 ms, which would hold up the loop.
            await anyio.to_thread.run_sync(self._agent.load, remote, memories)
        # Posting threads load only metadata that NIXL has already accepted once.
        loads = [poster.load(remote, memories) for poster in self._posters if poster.is_alive]
        outcomes = await asyncio.gather(*map(asyncio.wrap_future, loads), return_exceptions=True)
        refused = [str(outcome) or repr(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
        outcomes.clear()
        if refused:
            raise BackendError(refused[0])

    def remove_remote_agent(self, name: str, *, keep: bool = False) -> None:
        """Forget a remote agent and its descriptor lists; `keep` one of the last `MAX_KEPT` that may be met again.

        UCX keeps a socket open on both sides for every agent that is removed while its process lives (NIXL 1.5.1).
        """
        remote = self._remotes.get(name)
        if remote is None or self._agent is None:
            return
        remote.users -= 1
        if remote.users > 0:
            return
        if keep:
            self._kept[name] = None
            self._agent.drop_lists(name)
            for poster in self._posters:
                poster.drop(name, keep=True)
            if len(self._kept) <= MAX_KEPT:
                return
            name, _ = self._kept.popitem(last=False)
        del self._remotes[name]
        self._agent.drop(name)
        for poster in self._posters:
            poster.drop(name)

    # -- transfers ---------------------------------------------------------------------------------

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest | Look) -> TransferEnded | None:
        assert self._agent is not None
        self._counts["posts"] += 1
        if read.table is not None and read.table.boxes and read.is_staged:
            self._counts["posts_staged"] += 1
            # Only posting threads have staging memory. If they are gone or full, the loop reads piece by piece.
            if self._hand_over(transfer_id, name, read):
                return None
        is_middling = read.num_bytes >= self._config.bulk_bytes * BESIDE
        is_bulk = bool(self._posters) and self._is_bulk(read, is_middling)
        if is_bulk and self._hand_over(transfer_id, name, read):
            return None
        began = time.monotonic() if is_bulk else 0.0
        ended = self._agent.post(transfer_id, name, read)
        is_done = ended is not None and ended.ending is Ending.DONE
        if is_middling:
            self._posts_copy = is_done
        if is_bulk and is_done:
            self._pace.note(is_first=False, num_bytes=read.num_bytes, seconds=time.monotonic() - began)
        if ended is None and not self._is_sweep_due:
            # A post makes progress, and may have consumed the wake-up of another transfer.
            self._is_sweep_due = True
            self._loop.call_soon(self._sweep_soon)
        if ended is None or ended.ending is Ending.IN_DOUBT:
            self._arm()
        return ended

    def _is_bulk(self, read: ReadRequest | Look, is_middling: bool) -> bool:
        # Descriptors are counted before NIXL merges them, because the post itself has to go through all of them.
        is_large = read.num_bytes >= self._config.bulk_bytes or len(read.local) >= self._config.bulk_descriptors
        return is_large or (is_middling and self._posts_copy and self._is_beside_others())

    def _is_beside_others(self) -> bool:
        """Return True if a posting thread has reads, or if this is not the first such read in this turn of the loop.

        For a read that is alone the hand-over costs more than it saves.
        """
        if self._handed or self._has_posted:
            return True
        self._has_posted = True
        self._loop.call_soon(self._turned)
        return False

    def _turned(self) -> None:
        self._has_posted = False

    def _hand_over(self, transfer_id: TransferId, name: str, read: ReadRequest | Look) -> bool:
        is_free = self._config.posting_threads == "auto" and not read.is_staged
        if is_free and not self._pace.choose(time.monotonic()):
            return False
        # `num_taken` gives equally loaded threads a turn each.
        poster = min(self._posters, key=lambda each: (not each.is_alive, each.backlog, each.num_taken))
        if not poster.post(transfer_id, name, read):
            return False
        self._counts["posts_handed"] += 1
        self._handed.add(transfer_id)
        if read.is_staged:
            self._staged[transfer_id] = poster
        return True

    def detach(self, transfer_id: TransferId) -> bool:
        poster = self._staged.get(transfer_id)
        return poster is not None and poster.detach(transfer_id)

    def pack(self, slot: int, gathered: Gathered) -> None:
        assert self._packer is not None
        self._packer.pack(slot, gathered)

    def poll(self) -> list[TransferEnded | CopyMade]:
        if self._agent is None:
            return []
        news: list[TransferEnded | CopyMade] = [*self._agent.sweep()]
        if self._packer is not None:
            while self._packer.made:
                news.append(self._packer.made.popleft())
        if self._is_timer_poll:
            self._counts["rescued"] += len(news)
        self._polls = 0 if news else self._polls + 1
        for poster in self._posters:
            num_copied, seconds = poster.take_pace()
            if num_copied:
                self._pace.note(is_first=True, num_bytes=num_copied, seconds=seconds)
        while self._posters.inbox:
            ended = self._posters.inbox.popleft()
            if ended.ending in (Ending.IN_DOUBT, Ending.DETACHED):
                self._handed_doubtful.add(ended.transfer_id)
            else:
                self._handed_doubtful.discard(ended.transfer_id)
                self._handed.discard(ended.transfer_id)
                if self._staged and (poster_of := self._staged.pop(ended.transfer_id, None)) is not None:
                    poster_of.forget(ended.transfer_id)
            news.append(ended)
        return news

    def watch(self, serving: bool) -> None:
        self._is_serving = serving
        self._arm()

    # -- waking ------------------------------------------------------------------------------------

    def _told(self) -> None:
        if self._agent is not None:
            self._on_ready()

    def _woken(self) -> None:
        self._counts["wakeups"] += 1
        self._on_ready()

    def _sweep_soon(self) -> None:
        self._is_sweep_due = False
        if self._agent is not None:
            self._on_ready()

    def _arm(self) -> None:
        if self._timer is None and (delay := self._delay()) >= 0:
            self._timer = self._loop.call_later(delay, self._timed_out)

    def _delay(self) -> float:
        """Return the seconds until transfers are checked without a wake-up; negative for never."""
        if (agent := self._agent) is None:
            return -1.0
        if self._fds:
            return SAFETY_S if agent.running or self._is_serving else DOUBT_S if agent.doubtful else -1.0
        if not (agent.running or agent.doubtful or self._is_serving):
            return -1.0
        over = self._polls - TIGHT_POLLS
        return 0.0 if agent.running and over < 0 else min(1e-3, 2e-5 * 2 ** min(max(over, 0) // 8, 6))

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
        agents = [agent for agent in (self._agent, *(p.agent for p in self._posters)) if agent is not None]
        stages = [agent.stage for agent in agents if agent.stage is not None]
        of_posters: dict[str, int] = {}
        for number, poster in enumerate(self._posters, 1):
            of_posters |= {f"poster{number}.{what}": getattr(poster, what) for what in OF_POSTERS}
            of_posters[f"poster{number}.backlog_bytes"] = poster.backlog
        mine = self._agent
        return {
            **self._counts,
            "done_in_post": sum(a.done_in_post for a in agents),
            "notifications": sum(a.notifications for a in agents),
            "running": (len(mine.running) if mine else 0) + len(self._handed) - len(self._handed_doubtful),
            "in_doubt": (len(mine.doubtful) if mine else 0) + len(self._handed_doubtful),
            "unreleased": sum(len(a.unreleased) for a in agents),
            "peers": len(self._remotes),
            "metadata_refused": self._taster.num_refused if self._taster is not None else 0,
            "posters_broken": self._posters.num_broken,
            "staging_slots": sum(stage.slots.number for stage in stages),
            "staging_slots_in_use": sum(stage.slots.num_in_use for stage in stages),
            "posting_threads": sum(p.is_alive for p in self._posters),
            **of_posters,
        }

    def _describe_staging(self) -> str:
        if (costs := self.costs) is None:
            return "none: staging_bytes or posting_threads is 0, memory is on a GPU, or a trial read took too long"
        return (
            f"in slots of {costs.slot_bytes} bytes, where that is faster: {costs.descriptor_s * 1e6:.2f} us per "
            f"descriptor, {1e-9 / costs.read_s:.2f} GB/s read, {1e-9 / costs.place_s:.2f} GB/s placed (measured)"
        )

    def describe(self) -> dict[str, str]:
        """Return versions and modes. UCX reports the outcome of its negotiation with a peer only in its own log."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            installed = version("nixl")
        except PackageNotFoundError:
            installed = "unknown"  # a variant may be installed without the package `nixl`
        package = self._api.__package__ if self._api is not None else ""
        config = self._config
        return {
            "nixl": installed,
            "nixl_variant": str(package),
            "backend": config.backend,
            "ucx_tls": os.environ.get("UCX_TLS", "UCX default"),
            "ucx_net_devices": os.environ.get("UCX_NET_DEVICES", "UCX default"),
            "ucx_error_handling_mode": config.params.get("ucx_error_handling_mode", "peer (NIXL default)"),
            "engine_config": (DEFAULTS | config.params)["engine_config"],
            "completions": f"{len(self._fds)} epoll descriptors of UCX" if self._fds else "polling",
            "posting_threads": (
                f"{config.num_posters}, each with an agent of its own, for reads from {config.bulk_bytes} bytes "
                f"or {config.bulk_descriptors} descriptors"
                if config.num_posters
                else "0: all reads are posted on the loop"
            ),
            "staged_reads": self._describe_staging(),
            "sync_mode": "strict",
        }
