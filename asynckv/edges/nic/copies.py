"""The copy plane on NIXL: between a rank's own memory and that of its tiers, within one process.

An agent transfers to itself. With UCX's `self` transport that is one `memcpy` per descriptor, and the post *is* the
copy. So posts are made on posting threads. The loop hands over just enough to keep a thread busy, because a piece that
was handed over cannot be overtaken by a more urgent one.

A move ends when none of its pieces runs any more. After a failure or a cancellation the rest is not posted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.nic.agent import SINK, SOURCE, Agent, closed_on_failure
from asynckv.edges.nic.nixl import load_nixl
from asynckv.edges.nic.posters import Poster, Posters
from asynckv.edges.nic.staging import Bytes
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest
from asynckv.ports import CopyOp

WINDOW_BYTES = 64 << 20  # given to one thread at a time, some 10 ms of copying: two of the largest posts
WINDOW_PIECES = 256  # pieces given to one thread at a time, well below what it takes (`MAX_QUEUED`)
STAGING_SLOTS = 4  # per thread: its loads from another memory order use one at a time, and keep those in doubt
TELL_S = 0.002  # seconds between two wake-ups of the loop while a thread has more to copy
CLOSED = "the copy plane was closed"


@dataclass(slots=True, eq=False)
class _CopyMove:
    move_id: TransferId
    op: CopyOp
    far: str  # the other memory and the direction, as agents name them
    pieces: Iterator[ReadRequest] | None  # None once nothing more is to be posted
    running: set[TransferId] = field(default_factory=set)  # pieces that were handed over, until their end
    doubtful: set[TransferId] = field(default_factory=set)
    ending: Ending = Ending.DONE
    cause: str = ""
    is_told_doubt: bool = False
    is_cancelled: bool = False

    def is_off(self) -> bool:
        return self.is_cancelled or self.ending is not Ending.DONE

    def spoil(self, ending: Ending, cause: str) -> None:
        self.pieces = None
        if self.ending is Ending.DONE:
            self.ending, self.cause = ending, cause


class NixlCopies:
    """A `CopyPlane` on one NIXL agent per thread.

    Args:
        threads: Number of copying threads. One is a little slower than `memcpy`.
        window_bytes: Bytes handed to one thread at a time, unless a single piece is larger.
    """

    def __init__(self, agent_name: str, *, threads: int = 1, window_bytes: int = WINDOW_BYTES) -> None:
        self._name, self._num_threads, self._window = agent_name, threads, window_bytes
        self._starts = 0
        self._posters = Posters(self._told, "a copying thread")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_ready: Callable[[], None] = lambda: None
        self._tls = ""
        self._ids = count(1)
        self._moves: dict[TransferId, _CopyMove] = {}
        self._waiting: dict[CopyOp, deque[_CopyMove]] = {op: deque() for op in CopyOp}
        self._pieces: dict[TransferId, tuple[_CopyMove, Poster, int]] = {}  # their move, thread and size
        self._detached: dict[TransferId, Poster] = {}  # ended pieces; their slots may still be written
        self._given: Counter[Poster] = Counter()  # bytes given to each thread and not yet reported as ended
        self._news: list[TransferEnded] = []
        self._is_due = False
        self._counts = dict.fromkeys(("moves", "pieces", "bytes_read", "bytes_written", "failed"), 0)

    def start(self, near: Sequence[Memory], far: Mapping[str, Sequence[Memory]], on_ready: Callable[[], None]) -> None:
        if self._posters:
            raise BackendError(f"{self._posters[0].name} of the last start is still inside NIXL; `close()` first")
        api = load_nixl()
        self._starts += 1
        self._loop, self._on_ready, self._is_due = asyncio.get_running_loop(), on_ready, False
        kinds = {memory.kind for some in (near, *far.values()) for memory in some}
        self._tls = "self,cuda_copy" if "cuda" in kinds else "self"
        self._areas: list[Bytes] = []  # staging memory of all threads
        with closed_on_failure(self.close):
            for number in range(1, self._num_threads + 1):
                name = f"{self._name}-copies{self._starts}.{number}"
                self._posters.start(name, self._make_agent(api, name, near, far), TELL_S, joins=False)

    def _make_agent(self, api: Any, name: str, near: Sequence[Memory], far: Mapping[str, Sequence[Memory]]) -> Agent:
        params = {"ucx_error_handling_mode": "none", "engine_config": f"TLS={self._tls}"}
        # A `UCX_TLS` for the network (`tcp`, `rc`) would send copies over it, at a fifth of the speed.
        agent = Agent(api, name, "UCX", params, unheeded=("UCX_TLS",))
        with closed_on_failure(agent.close):
            agent.register(near)
            for each, memories in far.items():
                agent.register_own(each, memories)
            if all(memory.kind == "cpu" for memory in near):
                agent.add_stage(STAGING_SLOTS, self._areas)
        return agent

    async def quiesce(self, timeout_s: float | None = None) -> None:
        await self._posters.quiesce(timeout_s)

    def close(self) -> None:
        """Stop the threads and destroy the agents; moves that had not ended end as `FAILED`. Idempotent."""
        causes = self._posters.join()
        self._take_inbox()  # ends reported before
        self._given = Counter({poster: self._given[poster] for poster in self._posters})
        if causes:
            raise BackendError(
                f"{'; '.join(causes)}: memory that is copied to may still be written; keep it, and call close() again"
            )
        for move in list(self._moves.values()):
            # Nothing reads or writes any more, because every agent is gone.
            move.running.clear()
            move.spoil(Ending.FAILED, CLOSED)
            self._end(move)
        for queue in self._waiting.values():
            queue.clear()
        self._pieces.clear()
        self._detached.clear()

    def post(self, move_id: TransferId, op: CopyOp, far: str, pieces: Iterable[ReadRequest]) -> None:
        assert move_id not in self._moves, f"move {move_id} has not ended"
        place = far + (SOURCE if op is CopyOp.READ else SINK)
        move = self._moves[move_id] = _CopyMove(move_id, op, place, iter(pieces))
        self._counts["moves"] += 1
        self._waiting[op].append(move)
        self._pump()

    def cancel(self, move_id: TransferId) -> None:
        if (move := self._moves.get(move_id)) is not None:
            move.is_cancelled = True
            if move.pieces is not None:  # else all pieces were handed over, and may be copied already
                move.spoil(Ending.FAILED, "cancelled")
                self._settle(move)

    def poll(self) -> list[TransferEnded]:
        self._take_inbox()
        self._pump()
        news, self._news = self._news, []
        return news

    def _pump(self) -> None:
        """Hand over pieces while threads have room: moves that read go first, then the oldest."""
        for queue in (self._waiting[CopyOp.READ], self._waiting[CopyOp.WRITE]):
            while queue:
                move = queue[0]
                if move.pieces is None:
                    queue.popleft()
                    continue
                poster = min(self._posters, key=lambda each: (not each.is_alive, self._given[each]), default=None)
                if poster is not None and not self._has_room(poster):
                    return
                try:
                    piece = next(move.pieces, None)
                except Exception as exc:  # pieces are made when they are taken, by the caller's code
                    move.spoil(Ending.FAILED, f"the pieces cannot be made: {exc!r}")
                    self._settle(move)
                    continue
                if piece is None:
                    move.pieces = None
                    self._settle(move)
                else:
                    self._hand_over(move, piece, poster)

    def _has_room(self, poster: Poster) -> bool:
        return self._given[poster] < self._window and len(self._pieces) < WINDOW_PIECES * len(self._posters)

    def _hand_over(self, move: _CopyMove, piece: ReadRequest, poster: Poster | None) -> None:
        number = TransferId(next(self._ids))
        if poster is None or not poster.post(number, move.far, piece, move.is_off):
            name = poster.name if poster is not None else "the copy plane"
            move.spoil(Ending.FAILED, f"{name} takes no copies, because it has ended")
            self._settle(move)
            return
        self._counts["pieces"] += 1
        self._pieces[number] = (move, poster, piece.num_bytes)
        self._given[poster] += piece.num_bytes
        move.running.add(number)

    def _settle(self, move: _CopyMove) -> None:
        if move.pieces is None and not move.running and move.move_id in self._moves:
            self._end(move)

    def _end(self, move: _CopyMove) -> None:
        del self._moves[move.move_id]
        self._counts["failed"] += move.ending is not Ending.DONE
        self._tell(TransferEnded(move.move_id, move.ending, move.cause))

    def _told(self) -> None:
        self._is_due = True
        self._take_inbox()
        self._pump()
        self._ready()

    def _take_inbox(self) -> None:
        while self._posters.inbox:
            number, ending, cause, *_ = self._posters.inbox.popleft()
            if (found := self._pieces.get(number)) is None:
                if ending is not Ending.IN_DOUBT and (owner := self._detached.pop(number, None)) is not None:
                    owner.forget(number)
                continue
            move, poster, num_bytes = found
            if number not in move.doubtful:
                self._given[poster] -= num_bytes
            if ending is Ending.DONE:
                self._counts["bytes_written" if move.op is CopyOp.WRITE else "bytes_read"] += num_bytes
            else:
                # A move with a piece in doubt ends as `FAILED` at best, because the doubt was already reported.
                move.spoil(Ending.REFUSED if ending is Ending.REFUSED else Ending.FAILED, cause)
            if ending is Ending.IN_DOUBT:
                move.doubtful.add(number)
                if not move.is_told_doubt:
                    move.is_told_doubt = True
                    self._tell(TransferEnded(move.move_id, Ending.IN_DOUBT, cause))
                continue
            del self._pieces[number]
            if ending is Ending.DETACHED:
                self._detached[number] = poster
            else:
                poster.forget(number)
            move.running.discard(number)
            move.doubtful.discard(number)
            self._settle(move)

    def _tell(self, ended: TransferEnded) -> None:
        self._news.append(ended)
        if not self._is_due and self._loop is not None and not self._loop.is_closed():
            self._is_due = True
            self._loop.call_soon(self._ready)

    def _ready(self) -> None:
        self._is_due = False
        if self._news:
            self._on_ready()

    def statistics(self) -> dict[str, int]:
        return {
            **self._counts,
            "running": len(self._moves),
            "waiting": sum(move.pieces is not None for move in self._moves.values()),
            "in_doubt": sum(bool(move.doubtful) for move in self._moves.values()) + len(self._detached),
            "backlog_bytes": sum(self._given.values()),
            "threads": sum(poster.is_alive for poster in self._posters),
            "threads_broken": self._posters.num_broken,
        }

    def describe(self) -> dict[str, str]:
        return {"backend": "UCX", "transports": self._tls or "not started", "threads": str(self._num_threads)}
