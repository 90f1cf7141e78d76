"""Carry out orders on the engine's loop, in the sequence in which they were submitted.

`submit` and `take_finished` use queues without a lock, so a signal handler may call them. The loop carries orders out
in slices of a millisecond, because its thread shares the GIL with the engine's busy thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict

from asynckv.account.inspect import HeldBlocks
from asynckv.arguments import shown, text
from asynckv.core.types import KVTransferParams
from asynckv.embed.orders import (
    Announce,
    Cancel,
    CountPrompts,
    EndPieces,
    Failed,
    Finished,
    Follow,
    Lend,
    LendPiece,
    Load,
    Lookup,
    Offer,
    Order,
    Pull,
    Reclaim,
    Refused,
    StartEarly,
    Store,
    Withdraw,
    WithdrawTicket,
)
from asynckv.engine import Engine, LentRequest
from asynckv.errors import AsyncKVError, EngineClosed, LocalProtocolError, PullCancelled
from asynckv.results import LeaseEnd
from asynckv.tiers import Offload

SLICE_S = 0.001  # of CPU: another thread that holds the GIL must not end the slice
Flown = Follow | StartEarly | Pull | Load | Store
PULLED = "finished_recving"
AWAITED: Mapping[type, str] = {Follow: "offered", StartEarly: PULLED, Pull: PULLED, Load: "loaded", Store: "stored"}
"""List of `Finished` that reports success, for each order that takes time: until it ends, or its blocks return."""

ENDING = (*AWAITED, Lend, Lookup)  # orders that are always reported
FINISH_S = 0.25
MAX_FOLLOWED = 4096  # tickets that wait to be taken as followed


class Recall:
    """A recall that a thread waits for (`EngineThread.recall`). `done` has the other holders of the blocks, or None if
    the engine has ended.
    """

    def __init__(self, requests: list[KVTransferParams]) -> None:
        self.requests = requests
        self.done: concurrent.futures.Future[tuple[HeldBlocks, ...] | None] = concurrent.futures.Future()


class EngineDesk:
    """Carry out orders on an engine's loop, and keep the results until the caller takes them.

    Call `submit` on the loop. To call it from other threads, give a `wake` that makes `carry_out` run on the loop
    afterwards. `take_finished` may be called from any thread.

    Args:
        engine: The engine. The caller starts and closes it.
        wake: Makes `carry_out` run on the engine's loop, soon. If left out, the running loop schedules it.
        on_news: Called on the loop when a result is added.
    """

    def __init__(
        self, engine: Engine, wake: Callable[[], None] | None = None, on_news: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = engine
        self._wake, self._on_news = wake, on_news
        self._handed: deque[Order | Recall] = deque()
        self._due: asyncio.Handle | None = None  # the next slice, if one was asked for
        self._flights: dict[tuple[type, str], list[_Flight]] = {}
        """Follows, pulls, loads and stores that have not ended, or still hold blocks."""
        self._lent: dict[str, LentRequest] = {}
        """Lent requests by id, each of one request only, because `finished_sending` reports an id."""
        self._news: deque[tuple[str, Any, float]] = deque()  # each with the time since which it waits
        engine._untaken = lambda: self.untaken
        engine._driver.on_followed = self._followed_by
        self._followed = set[str]()  # tickets in news that were not taken yet, because followers repeat themselves
        self._is_shut = self._is_over = False
        self.num_handovers = self.num_orders = 0

    def submit(self, orders: Iterable[Order]) -> None:
        """Submit orders. The engine carries them out soon, in the sequence given.

        Raises:
            EngineClosed: The desk takes no more orders, and will carry out none of these.
            LocalProtocolError: `orders` is not a list.
            WrongThread: The caller is not on the engine's loop, and there is no `wake`.
        """
        if self._wake is None:
            self.engine._home.here(self.submit, is_first=True)
        if not isinstance(orders, Iterable):
            raise LocalProtocolError(f"orders is {shown(orders)}; give a list of orders")
        handed = tuple(orders)
        if self._is_shut:
            raise EngineClosed("the engine was closed; none of these orders is carried out")
        if handed:
            self.num_handovers += 1
            self._hand(handed)

    def _hand(self, orders: Sequence[Order | Recall]) -> None:
        self._handed.extend(orders)
        if self._wake is None:
            self._soon()
        else:
            self._wake()
        if self._is_over:  # it ended just now, so the loop no longer looks at the queue
            self._refuse_all()

    def take_finished(self) -> Finished:
        """Return the results since the last call."""
        finished, news, self._followed = Finished(), self._news, set()
        while news:
            try:
                kind, value, _ = news.popleft()
            except IndexError:  # another thread took it
                break
            getattr(finished, kind).append(value)
        return finished

    @property
    def has_news(self) -> bool:
        """True if there are results to take."""
        return bool(self._news)

    @property
    def untaken(self) -> list[float]:
        """Times since which results wait, except of orders with ends that are not awaited, or not any more."""
        news = [each for each in tuple(self._news) if each[2] < math.inf]
        return [at for kind, value, at in news if kind != "refused" or type(value.order) in ENDING]

    # -- ending ------------------------------------------------------------------------------------

    def _shut(self) -> None:
        """Take no more orders. Those that were submitted before may still be carried out."""
        self._is_shut = True

    def _refuse_all(self) -> None:
        """Carry out nothing more, and refuse every order that still waits (`Finished.refused`, or `failed`)."""
        self._is_shut = self._is_over = True
        while self._handed:
            with suppress(IndexError):  # another thread took it
                self._refuse(self._handed.popleft(), EngineClosed("the engine was closed before this was carried out"))

    def _forget(self) -> None:
        """Forget everything, in a forked process: all of it belongs to the parent."""
        self._is_shut = self._is_over = True
        self._handed.clear()
        self._news.clear()

    async def finish(self, timeout_s: float = FINISH_S) -> None:
        """Take no more orders, and carry out waiting ones for up to `timeout_s`, because other ranks may need them."""
        self._shut()
        until = time.monotonic() + timeout_s
        while self._handed and time.monotonic() < until:
            self.carry_out()
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Refuse the orders that still wait, and report those in flight, of which the closed engine told no end."""
        self._abandon(EngineClosed("the engine was closed"))

    def _abandon(self, cause: BaseException) -> None:
        """Report every order that has not ended as failed, because the engine tells no more ends."""
        self._refuse_all()
        flights, self._flights = self._flights, {}  # later reports of these are dropped, because this one is final
        for flight in itertools.chain.from_iterable(flights.values()):
            order = flight.order
            if not flight.is_held:
                self._tell(_of(order, "failed"), Failed(order.request_id, _held(order, flight.bug or cause)))
            if not isinstance(order, Follow):
                self._tell(_of(order, "retired"), order.request_id)
        lent, self._lent = self._lent, {}
        for request_id in lent:
            self._tell("finished_sending", LeaseEnd(request_id, "closed", {}, ("*",), 0.0))

    # -- on the loop -------------------------------------------------------------------------------

    def _soon(self) -> None:
        self._due = self._due or asyncio.get_running_loop().call_soon(self.carry_out)

    def carry_out(self) -> None:
        """Carry out orders for a slice of the loop's time, and schedule the rest."""
        self._due = None
        if self._is_over:
            return
        left, until = self._handed, time.thread_time() + SLICE_S
        while left and time.thread_time() <= until:
            order = left.popleft()
            self.num_orders += 1
            try:
                if isinstance(order, Recall):
                    order.done.set_result(self.engine.recall(order.requests))
                else:
                    self._carry_out(order)
            except Exception as exc:  # whatever the error is, the other orders are carried out
                self._refuse(order, exc)
            except BaseException as exc:
                self._refuse(order, EngineClosed(f"{exc!r} ended the engine's loop while this was carried out"))
                raise
        if left:
            self._soon()  # behind a turn of the engine's, so that its peers and deadlines need not wait for all orders

    def _carry_out(self, order: Order) -> None:
        engine, given = self.engine, asdict(order) if isinstance(order, Order) else {}
        match order:
            case Announce():
                engine.announce(**given)
            case Follow():
                self._begin(order, engine._begin_follow, lambda x: Offer(order.request_id, engine._offer_of(x)), given)
            case StartEarly():
                self._begin(order, engine._begin_pull, engine._result_of, given | {"is_early": True})
            case Pull():
                flights = self._flights.get((Pull, str(order.request_id)), ())
                early = next((x for x in flights if isinstance(x.order, StartEarly) and not x.is_held), None)
                if given.pop("goes_on") is True or early is not None:
                    self._go_on(order, early, given)
                else:
                    self._begin(order, engine._begin_pull, engine._result_of, given)
            case Load():
                offload = self._offload()
                self._begin(order, offload._begin_load, offload._loaded, given)
            case Store():
                offload = self._offload()
                self._begin(order, offload._begin_store, offload._stored, given)
            case Lookup():
                request_id = text("request_id", order.request_id)
                self._tell("found", (request_id, self._offload().lookup(order.hashes, order.num_tokens)))
            case Cancel():
                for flight in self._flights.get((Follow, str(order.request_id)), ()):
                    flight.is_awaited = False
                engine.cancel(**given)
                if engine._driver.guests and not order.follows_on:  # else its request goes on too
                    self._offload().cancel(order.request_id)
            case Lend(params):
                name = params.get("request_id") if isinstance(params, Mapping) else getattr(params, "request_id", None)
                if isinstance(name, str) and name in self._lent:
                    if order.ticket:
                        engine.end_pieces(order.ticket)  # the caller takes their blocks for free
                    raise LocalProtocolError(
                        f"request {name[:200]!r} is lent already, and its end is reported by that id: lend this one "
                        f"by another id, or wait for the end"
                    )
                lent = engine.lend(**given)
                self._lent[lent.request_id] = lent
                lent._when_released(self._sent)
            case LendPiece():
                with suppress(EngineClosed):  # the request itself will be refused
                    engine.lend_piece(**given)
            case EndPieces():
                engine.end_pieces(**given)
            case Withdraw():
                engine.withdraw(**given)
            case WithdrawTicket():
                engine.withdraw_ticket(**given)
            case Reclaim():
                engine.reclaim(**given)
            case CountPrompts(counted):
                engine._recorder.prompts_counted(counted)
            case _:
                raise LocalProtocolError(
                    f"{shown(order)} is not an order; give Follow, StartEarly, Announce, Pull, Cancel, Lend, "
                    f"LendPiece, EndPieces, Withdraw, WithdrawTicket, Reclaim, Lookup, Store or Load"
                )

    def _offload(self) -> Offload:
        for guest in self.engine._driver.guests:
            if isinstance(guest.owner, Offload):
                return guest.owner
        raise LocalProtocolError("this engine has no offload; start an Offload(config, engine) on its loop first")

    def _refuse(self, order: Order | Recall, error: Exception) -> None:
        if isinstance(order, Recall) and self._is_over:
            order.done.set_result(None)
        elif isinstance(order, Recall):
            order.done.set_exception(error)  # its caller raises it
        elif isinstance(order, Pull) and order.goes_on:
            pass  # its head start is reported, and names what is held
        elif isinstance(order, Flown):
            self._tell(_of(order, "failed"), Failed(order.request_id, error))
        else:
            self._tell("refused", Refused(order, error))

    def _begin(
        self, order: Flown, begin: Callable[..., object], result_of: Callable[[Any], object], given: Mapping[str, Any]
    ) -> None:
        flight = _Flight(self, order, result_of)
        self._flights.setdefault(flight.key, []).append(flight)
        try:
            begin(flight, **given)
        except BaseException as exc:
            flight.leave()
            if isinstance(exc, LocalProtocolError) and not all(each.is_held for each in flight.others):
                # `failed` names only an id, so the scheduler would take this for the end of the earlier order.
                self._tell("refused", Refused(order, exc))
                return
            raise

    def _go_on(self, order: Pull, flight: _Flight | None, given: dict[str, Any]) -> None:
        """Go on from pieces to the whole request, or release it if they have failed and were reported."""
        if flight is None and any(not each.is_held for each in self._flights.get((Pull, str(order.request_id)), ())):
            error = LocalProtocolError(f"request {order.request_id[:200]!r} is being pulled already; cancel it first")
            self._tell("refused", Refused(order, error))
            return
        if flight is not None:
            flight.order = order
            try:
                self.engine._begin_pull(flight, **given)
                return
            except AsyncKVError:
                pass  # the cancellation is its end
            except Exception as exc:
                self.engine._recorder.internal_error(exc, self.engine._clock.now())
        self.engine.cancel(order.request_id, order.params, cohort_id=order.cohort_id)

    def _followed_by(self, ticket: str) -> None:
        if ticket not in self._followed and len(self._followed) < MAX_FOLLOWED:  # followers repeat themselves
            self._followed.add(ticket)
            self._tell("followed", ticket, is_awaited=False)

    def _sent(self, end: LeaseEnd) -> None:
        if self._lent.pop(end.request_id, None) is not None:
            self._tell("finished_sending", end)

    def _tell(self, kind: str, value: object, is_awaited: bool = True) -> None:
        self._news.append((kind, value, self.engine._clock.now() if is_awaited else math.inf))
        self.engine._driver.tell((self._on_news,))  # which counts exceptions, because no request is to suffer for them


class _Flight:
    """A follow, pull, load or store in flight. It is told its end, and then what becomes of blocks that are held."""

    def __init__(self, desk: EngineDesk, order: Flown, result_of: Callable[[Any], object]) -> None:
        self._desk, self.order, self._result_of = desk, order, result_of
        self.key = (
            Pull if isinstance(order, StartEarly) else type(order),
            order.request_id if isinstance(order.request_id, str) else str(id(self)),
        )
        self.is_held = False  # True once it was reported in `failed`, and still holds blocks
        self.is_awaited = True  # False of a follow that was cancelled, because no step may come any more
        self.bug: Exception | None = None  # an error that says nothing of blocks, which are held

    @property
    def others(self) -> Sequence[_Flight]:
        """Return those of this kind and id, once this one has left; those that have failed hold blocks."""
        return self._desk._flights.get(self.key, ())

    def leave(self) -> bool:
        """Take no more reports; return False if the final one was made before."""
        if self not in self.others:
            return False
        (mine := self._desk._flights[self.key]).remove(self)
        if not mine:
            del self._desk._flights[self.key]
        return True

    def offered(self, following: Any, piece: KVTransferParams) -> None:
        offer = Offer(self.order.request_id, to_builtins(piece), is_piece=True)
        self._desk._tell("offered", offer, is_awaited=False)

    def ended(self, job: Any) -> None:
        desk, order = self._desk, self.order
        if self not in self.others:
            return
        try:
            kind, report = AWAITED[type(order)], self._result_of(job)
        except Exception as exc:
            failed = Failed(order.request_id, exc)
            kind, report, self.is_held = _of(order, "failed"), failed, failed.is_held
            if not isinstance(exc, AsyncKVError):
                self.bug = exc
                if not isinstance(order, Follow) and not job.is_free:
                    return  # it is told once it is known what becomes of the blocks
        if not self.is_held:
            self.leave()
        desk._tell(kind, report, self.is_awaited)

    def returned(self, job: Any, is_retired: bool) -> None:
        desk, order = self._desk, self.order
        if isinstance(order, Follow):
            desk._tell("offered", Offer(order.request_id, to_builtins(job.params), is_late=True), is_awaited=False)
        if not self.leave():
            return  # it held no blocks
        if self.bug is not None:
            error = _held(order, self.bug) if is_retired else self.bug
            desk._tell(_of(order, "failed"), Failed(order.request_id, error))
        if is_retired:
            desk._tell(_of(order, "retired"), order.request_id)
        elif self.bug is None and not any(each.is_held for each in self.others):
            # `returned` names an id, so it waits for the last attempt under this id that holds blocks.
            desk._tell(_of(order, "returned"), order.request_id)


def _of(order: Flown, what: str) -> str:
    """Return the name of the list for such an order, because each kind has its own."""
    if isinstance(order, Follow):
        return "not_offered"
    return what if isinstance(order, StartEarly | Pull) else f"offload_{what}"


def _held(order: Flown, cause: BaseException) -> PullCancelled:
    """Return the error of an order that told no end, with its blocks, which may still be in use."""
    held: dict[int, tuple[int, ...]] = {}
    with suppress(TypeError, ValueError):  # nothing was ever pulled into malformed groups
        held = {i: tuple(b for b in ids if b is not None) for i, (_, ids) in enumerate(getattr(order, "groups", ()))}
    said = f"request {order.request_id!r}: its end is not known ({cause!r})"
    error = PullCancelled(said, request_id=order.request_id, reason="cancelled", held=held)
    error.__cause__ = cause
    return error
