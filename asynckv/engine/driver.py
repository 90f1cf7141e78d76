"""Drives the core on an event loop.

Everything that happens (a packet, the end of a transfer, a timer) is handed to the core with the time, read after it
was observed. What the core leaves in its outbox is done once per turn of the loop: messages first, so that a claim
leaves before its read is posted, then commands, then as many posts as fit into a short slice. A bug that one event or
command meets is counted (`internal_errors`) and logged, and does not take the others with it.

The one timer is set to the earliest moment that the core names, or to the driver's own beat, by which it notices that
the loop was away.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVarTuple, assert_never

import anyio

from asynckv import told
from asynckv.account.inspect import HeldBlocks
from asynckv.account.survey import Survey
from asynckv.account.watch import Watch
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.following import Following
from asynckv.core.lifecycle import Lifecycle, LifeState
from asynckv.core.outbox import (
    DetachRead,
    FollowReached,
    LeaseOver,
    LoadPeer,
    Milestone,
    PackBlocks,
    PeerReached,
    PullReached,
    RemovePeer,
    RequestReached,
    Traced,
)
from asynckv.core.peer import Peer
from asynckv.core.pull import Kind, Pull
from asynckv.core.rank import RankCore
from asynckv.core.types import Address, How, PullId, Reason, ReplyTo, members
from asynckv.core.wire import Status, StatusRequest
from asynckv.edges.transports import is_loopback
from asynckv.engine.home import Home
from asynckv.engine.lag import NOTED_S, LoopLag
from asynckv.errors import BackendError, BlocksRetired, EngineClosed, LocalProtocolError, PullError
from asynckv.observe.log import SAME_S, Recorder
from asynckv.observe.observer import Observers
from asynckv.ports import AgentInfo, AgentLost, AgentReplaced, Clock, ControlPlane, CopyMade, DataPlane, TimerHandle
from asynckv.told import Told, short

TURNED_AWAY = (
    "it seems to turn our connection away: with keys, this engine's .key file has to be in its directory of "
    "authorized keys"
)
HOW, R = frozenset(How), members(Reason)
PIECE, SILENT = Kind.PIECE, (Kind.PIECE, Kind.DISCHARGE)  # pulls that are part of another, or have no caller
EXPECTED: Mapping[Reason, told.Level] = {R.CANCELLED: "debug", R.WITHDRAWN: "info", R.ENGINE_CLOSED: "info"}
POST_SLICE_S = 0.0005  # a turn plans and posts for so long, and then for as much CPU: no holder of the GIL ends both
BEAT_S = 0.25  # while anything is under way the timer runs at least this often, to notice that the loop was away
IDLE_BEAT_S = 2.5  # the beat of an idle engine, which has no deadlines; a new peer waits for `handshake_s`
MAX_WAITED = 8

M = members(Milestone)
Ts = TypeVarTuple("Ts")


async def wait_until(clock: Clock, news: asyncio.Event, is_over: Callable[[], bool], until: float) -> None:
    """Wait, looking at every event, until something is over or the time has come."""
    handle = clock.call_at(until, news.set)
    try:
        while not is_over() and clock.now() < until:
            news.clear()
            await news.wait()
    finally:
        handle.cancel()


async def kept(task: asyncio.Task[tuple[HeldBlocks, ...]]) -> tuple[HeldBlocks, ...]:
    """Wait for a task to its end, though the caller be cancelled meanwhile."""
    left: tuple[HeldBlocks, ...] = ()
    with anyio.CancelScope(shield=True):
        left = await asyncio.shield(task)
    return left


class EngineGuest(Protocol):
    """A part that uses the engine's memory too, and ends before the engine: an offload, called `owner` by its user.

    Its counters, gauges and description are reported with the engine's own. `let_go` stops its use of the memory and
    returns the requests that were cut short, or raises `BackendError` if the memory may still be written; `take_again`
    gives it the memory back, which has been registered anew.
    """

    @property
    def owner(self) -> object: ...

    def counters(self) -> dict[str, int]: ...

    def gauges(self) -> dict[str, int]: ...

    def describe(self) -> dict[str, str]: ...

    async def let_go(self, timeout_s: float | None) -> tuple[HeldBlocks, ...]: ...

    def take_again(self) -> None: ...


class Driver:
    """One rank's core on an event loop: one once the engine has started, and another after it was resumed.

    Attributes:
        turned: Event that every turn sets, for tasks that wait for an end.
        release_s: Seconds that the last releases took in the background.
        data_down: Reason for which the data plane does not serve now; empty while it does.
        on_followed: Called with a ticket when a follower waits for a piece of its request.
        control_down: Reason for which the control plane has ended by itself; empty while it serves.
    """

    core: RankCore

    def __init__(self, data: DataPlane, control: ControlPlane, clock: Clock, recorder: Recorder, lag: LoopLag) -> None:
        self.home, self.life, self.recorder = Home(), Lifecycle(), recorder
        self.data, self.control, self.clock = data, control, clock
        self.turned = asyncio.Event()
        self.release_s: deque[float] = deque(maxlen=4096)
        self.lag = lag
        self.began_at = math.inf
        self.observers = Observers(recorder)
        self.guests: list[EngineGuest] = []
        self.on_followed: Callable[[str], None] = lambda _: None
        self.data_down = self.control_down = ""
        self._returning: dict[PullId, asyncio.Event] = {}  # pulls with blocks that a caller waits for
        self._loading: set[asyncio.Task[None]] = set()
        self._due: asyncio.Handle | None = None  # the next turn, if one was asked for
        self._has_waited = False  # True if queued messages were already held back one turn, to share a packet
        self._is_serving = False  # the data plane was told that remote ranks may read
        self._polled_at = -math.inf
        self._timer: TimerHandle | None = None
        self._timer_at = self._due_at = math.inf
        self._beat_at = math.inf  # when the timer runs even if the core wants nothing
        self._beats_fast = False
        self._sign_at = math.inf

    # -- for the engine ------------------------------------------------------------------------------

    def soon(self) -> None:
        self._due = self._due or asyncio.get_running_loop().call_soon(self._turn)

    def at_once(self) -> None:
        """Do all that the core wants, outside of a turn."""
        self._send()
        self._obey()

    def begin(self, core: RankCore, survey: Survey) -> None:
        """Drive a core: the engine's first, or that of its memory registered anew."""
        self.core, self._is_serving, now = core, False, self.clock.now()
        self.survey, self.inspect, self.watch = survey, survey.inspect, Watch()
        core.on_question, core.on_overdue = survey.hear, self.watch.add
        core.prefill.offers.on_followed = lambda ticket: self.safely(self.on_followed, ticket)
        self.began_at, self.data_down = min(self.began_at, now), ""
        self._beat_at = now + IDLE_BEAT_S
        self._sign_at = now + core.config.lease.lease_s / 2
        core.outbox.trace = self.recorder.is_tracing

    def attach(self, guest: EngineGuest) -> None:
        """Let a guest use the memory until the engine ends; one guest at a time."""
        if self.life.state is not LifeState.RUNNING:
            raise EngineClosed(f"the engine is {self.life.state.value}, and takes no offload")
        if self.guests:
            raise LocalProtocolError("the engine has an offload already; close that first")
        self.guests.append(guest)

    def counters(self) -> dict[str, int]:
        core = self.core
        counters = dict(core.outbox.counters)
        counters |= {f"control.{k}": v for k, v in self.control.statistics().items()}
        counters |= {f"data.{k}": v for k, v in self.data.statistics().items()}
        counters["loop.was_away"] = self.lag.num_away
        counters["keys.given_up"] = core.prefill.spent.num_given_up
        counters["keys.forgotten"] = core.prefill.spent.num_forgotten
        counters["log.failed"] = self.recorder.num_failed
        counters["log.dropped"] = self.recorder.num_dropped
        if (seen := self.recorder.prompts) is not None:
            counters |= {"prompts.with_params": seen.with_params, "prompts.without_params": seen.without_params}
            counters |= {f"computed_locally.{cause}": count for cause, count in seen.computed_locally.items()}
        for guest in self.guests:
            counters |= guest.counters()
        return counters

    def guest_gauges(self) -> dict[str, int]:
        gauges = {name: value for guest in self.guests for name, value in guest.gauges().items()}
        if (seen := self.recorder.prompts) is not None:
            gauges |= {"prompts_in_a_row": seen.in_a_row, "prompts_in_a_row_s": int(seen.in_a_row_s)}
        return gauges

    def tell(self, calls: Sequence[Callable[[*Ts], None]], *args: *Ts) -> None:
        """Tell the log and all other observers something, by one of the lists of `Observers`."""
        for call in calls:
            try:
                call(*args)
            except Exception as exc:  # no request is to suffer for it
                if not hasattr(self, "core"):  # it could not be started
                    continue
                self.core.outbox.counters["observers.failed"] += 1
                failed = self.core.outbox.counters["observers.failed"]
                if failed & (failed - 1) == 0:  # the first, the second, the fourth ...
                    self.recorder.internal_error(exc, self.clock.now())

    async def wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        await wait_until(self.clock, self.turned, is_over, self.clock.now() + seconds)

    async def end_loading(self, timeout_s: float) -> None:
        # A peer is loaded in a thread, which holds the agent: cancelling its task would not end it.
        if self._loading:
            await asyncio.wait(self._loading, timeout=timeout_s)
        for task in list(self._loading):
            task.cancel()
        await asyncio.gather(*self._loading, return_exceptions=True)

    def destroyed(self) -> None:
        """Note that the agent is gone: our memory is neither read nor written any more, and no caller has to wait."""
        self.core.destroyed(self.clock.now())
        self._obey()
        now = self.clock.now()
        for event in self._returning.values():
            event.set()
        self._returning.clear()
        for lease in self.core.prefill.leases.values():
            if lease.on_end is not None:  # else told before, because a suspended engine that is closed ends twice
                self.safely(lease.on_end)
                self.core.outbox.counters["leases.closed"] += 1
                self.tell(self.observers.lease_ended, lease, now)
        self.recorder.tell_groups(now)

    async def until_returned(self, pull: Pull) -> None:
        """Wait until nothing can write a pull's blocks any more; raise `BlocksRetired` if they are given up."""
        self.home.here(PullError.returned)
        if not (pull.is_returned or pull.is_retired or self.life.state is LifeState.CLOSED):
            await self._returning.setdefault(pull.pull_id, asyncio.Event()).wait()
        if pull.is_retired and not pull.is_returned:
            raise BlocksRetired("a transfer that does not end may still write these blocks; never use them again")

    def _tell_returned(self, pull: Pull) -> None:
        if (event := self._returning.pop(pull.pull_id, None)) is not None:
            event.set()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- events --------------------------------------------------------------------------------------

    def on_packet(self, origin: Address | ReplyTo, data: bytes, principal: str) -> bool:
        try:
            return self.core.receive(origin, data, self.clock.now(), principal)
        except Exception as exc:
            self._internal_error(exc)
            return False
        finally:
            self._due = self._due or asyncio.get_running_loop().call_soon(self._turn)  # as `soon` does

    def on_question(self, asker: object, asked: StatusRequest, answer: Callable[[Status], None]) -> None:
        """Take a question that came by another way than the control plane's."""
        self.safely(self.survey.ask, asker, asked, answer, self.clock.now())
        self.soon()

    def on_refused(self, cause: str, peer: str) -> None:
        """Note that the control plane refused a peer, may not contact one, or has ended."""
        if cause == "ended":
            self.control_down = peer
            self._internal_error(BackendError(peer))
            self.core.shut(f"cut off ({peer})")
            self.core.decode.leave(self.clock.now(), peer)
            return self.soon()
        self.recorder.log(told.Refused(cause, short(peer)), self.clock.now())
        if cause in HOW:
            hint = TURNED_AWAY if cause == How.TURNED_AWAY else ""
            self.safely(self.core.decode.hint, Address(peer), How(cause), hint)

    def on_data(self) -> None:
        before = self._polled_at
        found = self.data.poll()
        now = self._polled_at = self.clock.now()
        for news in found:
            match news:
                case TransferEnded():
                    self.safely(self.core.decode.ended, news, now - before, now)
                case CopyMade(slot, cause):
                    self.safely(self.core.prefill.copies.made, slot, cause)
                case AgentLost():
                    self.data_down = news.cause or "its process died"
                    self.safely(self.core.agent_lost)
                    if news.pause_s:
                        self.recorder.log(told.DataPlaneBroken(news.cause, news.pause_s))
                case AgentReplaced():
                    self.data_down = ""
                    self.core.outbox.counters["agents_replaced"] += 1
                    self.safely(self.core.agent_replaced, news.agent.name, news.agent.metadata)
                    seconds = round(news.seconds, 6)
                    self.recorder.log(told.DataPlaneRestarted(news.cause, news.agent.name, seconds, 0))
                case _:
                    assert_never(news)
        if found:
            self.soon()

    def _on_timer(self) -> None:
        due, self._timer, self._timer_at = self._due_at, None, math.inf
        self.safely(self._tick, due)
        if self._timer is None:
            self.soon()  # which arms it, as everybody's deadlines hang on it

    def _tick(self, due: float) -> None:
        now, core = self.clock.now(), self.core
        self.tell(self.observers.loop_came, now - due, now)
        if self.lag.take(now - due):
            self.recorder.loop_was_away(now - due, self.inspect.gauges() | self.lag.note(now), now)
        elif now >= self.lag.noted_at + NOTED_S:
            self.lag.note(now)
        if now >= self._sign_at:
            self._sign_at = now + max(core.config.lease.lease_s / 2, IDLE_BEAT_S)
            waits_for = {x.name for pull in core.decode.pulls.values() for x in pull.sources if x.is_waited_for}
            waits_for |= {each.rank.name for each in core.decode.follows.by_id.values()}
            self.recorder.alive(self.inspect, sorted(waits_for)[:MAX_WAITED], now)
        self.recorder.tell_groups(now, SAME_S)
        self._beats_fast = not core.is_idle or core.prefill.parking.num_parked > 0
        self._beat_at = math.inf if self.life.is_shut else now + (BEAT_S if self._beats_fast else IDLE_BEAT_S)
        if self._next_at <= now:
            self.safely(self._tell_held, now)
            self.survey.tick(now)
            core.tick(now)
            self.soon()
        self._arm(min(self._next_at, self._beat_at))

    def _tell_held(self, now: float) -> None:
        for alike in self.watch.tick(now):
            self.recorder.held_for_long(alike, [self.inspect.status(held, now) for held in alike.oldest])

    @property
    def _next_at(self) -> float:
        return min(self.core.next_at, self.watch.next_at, self.survey.next_at)

    def _arm(self, when: float) -> None:
        if when >= self._timer_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when < math.inf:
            self._timer = self.clock.call_at(when, self._on_timer)
        self._timer_at = when
        # Overdue work (pinging a peer that was idle until now) is due now, and does not count as late.
        self._due_at = max(when, self.clock.now())

    def safely(self, take: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call a function, and count and log what it raises."""
        try:
            take(*args)
        except Exception as exc:
            self._internal_error(exc)

    def _internal_error(self, exc: Exception) -> None:
        self.core.outbox.counters["internal_errors"] += 1
        self.recorder.internal_error(exc, self.clock.now())

    # -- a turn --------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._due = None
        if self.life.is_shut:
            return self._turn_when_shut()
        core = self.core
        outbox, decode = core.outbox, core.decode
        try:
            # Messages that peers wait for go first, so that a claim leaves before its read is posted.
            has_waited, self._has_waited = self._has_waited, False
            if outbox.is_urgent:
                self._send()
            if outbox.commands or outbox.unlinked:
                self._obey()
            if decode.posting.turns or decode.entered or decode.admission.turns or decode.answered:
                self._read()
                if outbox.commands or outbox.unlinked:
                    self._obey()
            if outbox.messages:
                # A release is not urgent. A caller with a new outcome often asks for more, and both share one packet.
                if has_waited or outbox.is_urgent:
                    self._send()
                else:
                    self._has_waited = True
                    self.soon()
            is_serving = bool(core.prefill.leases or core.prefill.offers.unread)  # else nothing of ours is read
            if is_serving is not self._is_serving:
                self.data.watch(is_serving)
                self._is_serving = is_serving
            if not self._beats_fast and (is_serving or core.decode.pulls):
                # Something has begun.
                self._beats_fast, self._beat_at = True, min(self._beat_at, self.clock.now() + BEAT_S)
        except Exception as exc:
            self._internal_error(exc)
        self.turned.set()
        # Whatever happened: without its timer the engine would keep no deadline.
        others = core.prefill.parking.next_at, self.watch.next_at, self.survey.next_at, core.read_on_at
        when = min(core.timers.earliest, *others, self._beat_at)
        if when < self._timer_at or self._timer is None:
            self._arm(when)

    def _turn_when_shut(self) -> None:
        """Tell outcomes, and give up blocks in time, until the agent is destroyed. Nothing is sent or read any more."""
        if self.life.state in (LifeState.SHUT, LifeState.STUCK):
            self.core.outbox.take_packets()
            self._obey()
            self._arm(self._next_at)
            self.turned.set()

    def _read(self) -> None:
        clock, decode = self.clock, self.core.decode
        started = began = clock.now()
        until_cpu = math.inf  # not read before there is need, because it takes a system call
        while True:
            if (decode.posting.turns or decode.answered) and (post := decode.next_read(began)) is not None:
                try:
                    ended = self.data.post_read(post.transfer_id, post.agent_name, post.read)
                except Exception as exc:  # a bug of the plane's, which may have posted it
                    self._internal_error(exc)
                    ended = TransferEnded(post.transfer_id, Ending.IN_DOUBT, f"posting it failed: {exc!r}")
                now = clock.now()
                post.pull.measures.post_s += now - began
                if ended is not None:
                    decode.ended(ended, 0.0, now)
            elif decode.entered or decode.admission.turns:
                try:
                    pull = decode.admit(began)
                except Exception as exc:
                    self._internal_error(exc)
                    continue
                if pull is None:
                    break
                now = pull.measures.planned_at = clock.now()
            else:
                break
            began = now
            if now - started > POST_SLICE_S:
                if (cpu := clock.cpu()) > until_cpu:
                    self.soon()
                    break
                until_cpu = min(until_cpu, cpu + POST_SLICE_S)

    def _send(self) -> None:
        core, control = self.core, self.control
        for to, packet in core.outbox.take_packets():
            try:
                if not control.send(to, packet):
                    core.outbox.counters["dropped.not_sent"] += 1
                    if why := control.refusal(to):
                        if isinstance(to, str):
                            core.decode.refused(to, why, self.clock.now())
                            self.soon()
                        else:
                            core.prefill.unreachable(to)
            except Exception as exc:
                self._internal_error(exc)

    def _obey(self) -> None:
        outbox, recorder = self.core.outbox, self.recorder
        commands, outbox.commands, now = outbox.commands, [], self.clock.now()
        for command in commands:
            try:
                match command:
                    case PullReached(pull, M.ENDED):
                        if not pull.is_returned:
                            pull.was_held = pull.kind is not PIECE
                            outbox.counters["blocks.kept"] += 1
                        elif self._returning:
                            self._tell_returned(pull)
                        if pull.kind not in SILENT:
                            self.tell(self.observers.pull_ended, pull, now)
                    case RequestReached(request, M.ENDED):
                        if request.waiter is not None:
                            request.waiter.ended(request)
                    case PullReached(pull, M.OVER) if pull.kind is not PIECE:
                        self.release_s.append(pull.measures.released_at - pull.published_at)
                        self.tell(self.observers.pull_over, pull, now)
                    case PullReached(pull, M.RETURNED):
                        self._tell_returned(pull)
                        if pull.was_held:
                            recorder.blocks_returned(pull, now)
                    case PullReached(pull, M.RETIRED):
                        self._tell_returned(pull)
                        self.tell(self.observers.blocks_retired, pull, now)
                    case RequestReached(request, M.RETURNED | M.RETIRED):
                        if request.waiter is not None:
                            request.waiter.returned(request, not request.is_free)
                    case RequestReached(request):  # M.PAUSES
                        assert request.pull is not None
                        recorder.pull_tried_again(request.pull, request.next_at - now)
                        self.tell(self.observers.pull_retried, request.pull, now)
                    case FollowReached(following, is_late, None):
                        self._tell_follow(following, is_late, now)
                    case FollowReached(following, _, piece):
                        if piece is not None and following.waiter is not None and following.is_open:
                            following.waiter.offered(following, piece)
                    case LeaseOver(lease):
                        if lease.on_end is not None:
                            lease.on_end()
                        self.tell(self.observers.lease_ended, lease, now)
                    case LoadPeer(peer, metadata):
                        task = asyncio.get_running_loop().create_task(self._load(peer, metadata))
                        self._loading.add(task)
                        task.add_done_callback(self._loading.discard)
                    case RemovePeer(peer, keep):
                        self.data.remove_remote_agent(peer.agent_name, keep=keep)
                    case DetachRead(transfer_id, is_posted, is_look):
                        if not is_posted or is_look or self.data.detach(transfer_id):
                            ending = Ending.DETACHED if is_posted else Ending.FAILED
                            ended = TransferEnded(transfer_id, ending, "its request has ended")
                            self.core.decode.ended(ended, 0.0, now)
                    case PackBlocks(slot, gathered):
                        self.data.pack(slot, gathered)
                    case PeerReached(peer, before, after):
                        self.tell(self.observers.peer_changed, peer, before, after, now)
                    case Traced(subject, entries):
                        recorder.traced(subject, entries)
                    case PullReached():
                        pass  # a piece is told as part of its request
                    case Told():
                        recorder.log(command, now)
                    case _:
                        assert_never(command)
            except Exception as exc:
                self._internal_error(exc)
        if outbox.commands:  # of what was just done
            self._obey()
        elif outbox.unlinked:
            self._send()  # a later message would open another link, which is never closed
            unlinked, outbox.unlinked = outbox.unlinked, {}
            for address in unlinked:
                self.safely(self.control.disconnect, address)

    def _tell_follow(self, following: Following, is_late: bool, now: float) -> None:
        if following.reason is not None and not is_late:
            names = short(following.request_id), following.follow_id, following.target.engine_id
            why = following.reason.value, short(following.detail)
            failed = told.FollowFailed(*names, *why, round(now - following.since, 6), [following.rank.name])
            self.recorder.log(failed, now, EXPECTED.get(following.reason, "warning"))
        if (waiter := following.waiter) is not None:
            if is_late:
                waiter.returned(following, False)
            else:
                waiter.ended(following)

    async def _load(self, peer: Peer, metadata: bytes) -> None:
        core = self.core
        assert peer.layout is not None
        failure = ""
        try:
            is_trusted = "#" in peer.address or is_loopback(peer.address)  # an address with a key has proved it
            agent = AgentInfo(peer.agent_name, metadata, is_trusted, self.control.host(peer.address), peer.packing)
            await self.data.add_remote_agent(agent, peer.layout.memories)
        except Exception as exc:  # pulls that wait for this peer must hear of any error
            failure = (str(exc) if isinstance(exc, BackendError) else "") or repr(exc)
        self.safely(core.decode.load_ended, peer, failure, self.clock.now())
        self.soon()
