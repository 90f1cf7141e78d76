"""Carry out orders on the engine's loop, in the sequence in which they were submitted.

`submit` and `take_finished` use queues without a lock, so a signal handler may call them. The loop carries orders out
in slices of a millisecond, because its thread shares the GIL with the engine's busy thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import asdict

from asynckv.arguments import shown, text
from asynckv.core.types import decode_params
from asynckv.embed.orders import (
    Announce,
    Cancel,
    CountPrompts,
    Failed,
    Finished,
    Lend,
    Load,
    Lookup,
    Order,
    Pull,
    Reclaim,
    Refused,
    Store,
    Withdraw,
)
from asynckv.engine import Engine, LentRequest, Offload
from asynckv.errors import AsyncKVError, BlocksRetired, EngineClosed, LocalProtocolError, PullCancelled, PullError
from asynckv.results import LeaseEnd

SLICE_S = 0.001  # of CPU: another thread that holds the GIL must not end the slice
AWAITED: Mapping[type, str] = {Pull: "finished_recving", Load: "loaded", Store: "stored"}
"""List of `Finished` that reports success, for each order that runs in its own task and holds blocks until it ends or
longer."""

ENDING = (*AWAITED, Lend, Lookup)  # orders that are always reported
FINISH_S = 0.25


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
        self._handed: deque[Order] = deque()
        self._due: asyncio.Handle | None = None  # the next slice, if one was asked for
        self._tasks: dict[asyncio.Task[None], Order] = {}  # orders in flight, by the task that waits for their end
        self._unbegun: set[asyncio.Task[None]] = set()  # pulls, loads and stores with a task that has not run yet
        self._failed: set[asyncio.Task[None]] = set()
        """Pulls, loads and stores that were reported in `failed`, and still hold blocks."""
        self._lent: set[str] = set()
        """Ids of lent requests, each of one request only, because `finished_sending` reports an id."""
        self._news: deque[tuple[str, Any, float]] = deque()  # each with the time since which it waits
        engine._driver.untaken = self._untaken
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
            self._handed.extend(handed)
            if self._wake is None:
                self._soon()
            else:
                self._wake()
            if self._is_over:  # it ended just now, so the loop no longer looks at the queue
                self._refuse_all()

    def take_finished(self) -> Finished:
        """Return the results since the last call."""
        finished, news = Finished(), self._news
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

    def _untaken(self) -> list[float]:
        """Return the times since which results wait, except refusals of orders with ends that are not awaited."""
        return [at for kind, value, at in tuple(self._news) if kind != "refused" or type(value.order) in ENDING]

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
        while (self._handed or self._unbegun) and time.monotonic() < until:
            self.carry_out()
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Refuse the orders that still wait, and wait for those in flight to end, after the engine was closed."""
        self._refuse_all()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _abandon(self, cause: BaseException) -> None:
        """Report every order that has not ended as failed, because the loop no longer runs."""
        self._refuse_all()
        tasks, self._tasks = self._tasks, {}  # later reports of these tasks are dropped, because this one is final
        for task, order in tasks.items():
            if task in self._unbegun:
                self._refuse(order, EngineClosed("the engine was closed before this was carried out"))
            elif isinstance(order, Pull | Load | Store):
                if task not in self._failed:
                    self._tell(_of(order, "failed"), Failed(order.request_id, _held(order, cause)))
                self._tell(_of(order, "retired"), order.request_id)
            elif isinstance(order, Lend):
                request_id = decode_params(order.params).request_id
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
        # A pull begins in the loop's next turn, so orders that follow it, such as its cancellation, come later.
        while left and (not self._unbegun or type(left[0]) in AWAITED) and time.thread_time() <= until:
            order = left.popleft()
            self.num_orders += 1
            try:
                self._carry_out(order)
            except Exception as exc:  # whatever the error is, the other orders are carried out
                self._refuse(order, exc)
            except BaseException as exc:
                self._refuse(order, EngineClosed(f"{exc!r} ended the engine's loop while this was carried out"))
                raise
        if self._unbegun:
            self.engine._driver.soon_after()  # so that their claims leave in the turn in which they begin
        if left:
            self._soon()  # behind that turn, which the next slice would else put off, and so for as long as orders wait

    def _carry_out(self, order: Order) -> None:
        engine, given = self.engine, asdict(order) if isinstance(order, Order) else {}
        match order:
            case Announce():
                engine.announce(**given)
            case Pull() | Load() | Store():
                owner = engine if isinstance(order, Pull) else self._offload()
                self._unbegun.add(self._go(self._outcome(order, owner), order))
            case Lookup():
                request_id = text("request_id", order.request_id)
                self._tell("found", (request_id, self._offload().lookup(order.hashes, order.num_tokens)))
            case Cancel():
                engine.cancel(**given)
                if engine._driver.guests:
                    self._offload().cancel(order.request_id)
            case Lend(params):
                name = params.get("request_id") if isinstance(params, Mapping) else getattr(params, "request_id", None)
                if isinstance(name, str) and name in self._lent:
                    raise LocalProtocolError(
                        f"request {name[:200]!r} is lent already, and its end is reported by that id: lend this one "
                        f"by another id, or wait for the end"
                    )
                lent = engine.lend(**given)
                self._lent.add(lent.request_id)
                self._go(self._sent(lent), order)
            case Withdraw():
                engine.withdraw(**given)
            case Reclaim():
                engine.reclaim(**given)
            case CountPrompts(counted):
                engine._driver.recorder.prompts_counted(counted)
            case _:
                raise LocalProtocolError(
                    f"{shown(order)} is not an order; give Announce, Pull, Cancel, Lend, Withdraw, Reclaim, "
                    f"Lookup, Store or Load"
                )

    def _offload(self) -> Offload:
        for guest in self.engine._driver.guests:
            if isinstance(guest.owner, Offload):
                return guest.owner
        raise LocalProtocolError("this engine has no offload; start an Offload(config, engine) on its loop first")

    def _refuse(self, order: Order, error: Exception) -> None:
        if isinstance(order, Pull | Load | Store):
            self._tell(_of(order, "failed"), Failed(order.request_id, error))
        else:
            self._tell("refused", Refused(order, error))

    def _go(self, work: Coroutine[Any, Any, None], order: Order) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = order
        task.add_done_callback(self._has_ended)
        return task

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        order = self._tasks.pop(task, None)
        self._failed.discard(task)
        if task in self._unbegun:  # the application cancelled every task of the loop
            self._unbegun.discard(task)
            if order is not None:
                self._refuse(order, EngineClosed("the engine's loop was ended before this was carried out"))

    async def _outcome(self, order: Pull | Load | Store, owner: Engine | Offload) -> None:
        """Call `pull`, `load` or `store`, wait for blocks to be filled or stored, and report the result."""
        task = asyncio.current_task()
        assert task is not None
        self._unbegun.discard(task)
        try:
            result = await getattr(owner, type(order).__name__.lower())(**asdict(order))
        except AsyncKVError as exc:
            if isinstance(exc, LocalProtocolError) and self._is_under_way(order, task):
                # `failed` names only an id, so the scheduler would take this for the end of the earlier order.
                self._report("refused", Refused(order, exc))
                return
            self._report(_of(order, "failed"), Failed(order.request_id, exc))
            if isinstance(exc, PullError) and exc.held:
                self._failed.add(task)
                try:
                    await exc.returned()
                except BlocksRetired:
                    self._report(_of(order, "retired"), order.request_id)
                else:
                    self._failed.discard(task)
                    if not self._is_held(order):
                        self._report(_of(order, "returned"), order.request_id)
        except GeneratorExit:  # the loop is gone, so nothing can be reported
            raise
        except BaseException as exc:  # a bug, or the application cancels every task of the loop
            await self._tell_when_returned(order, exc, owner)
            if not isinstance(exc, Exception):
                raise
        else:
            self._report(AWAITED[type(order)], result)

    def _is_under_way(self, order: Pull | Load | Store, task: asyncio.Task[None]) -> bool:
        """Return True if the end of another order of this kind and id is still to be reported."""
        others = (each for it, each in self._tasks.items() if it is not task and it not in self._failed)
        name = order.request_id
        return isinstance(name, str) and any(
            type(each) is type(order) and isinstance(each.request_id, str) and each.request_id == name
            for each in others
        )

    def _is_held(self, order: Pull | Load | Store) -> bool:
        """Return True if another attempt of this id holds blocks. `returned` names an id, so it waits for the last."""
        others = (self._tasks.get(each) for each in self._failed)
        return any(type(each) is type(order) and each.request_id == order.request_id for each in others)

    async def _tell_when_returned(
        self, order: Pull | Load | Store, exc: BaseException, owner: Engine | Offload
    ) -> None:
        """Report an order with an error that says nothing of its blocks, once it is known what became of them."""
        try:
            await owner.returned(order.request_id)
        except BaseException as other:
            self._report(_of(order, "failed"), Failed(order.request_id, _held(order, exc)))
            self._report(_of(order, "retired"), order.request_id)
            if not isinstance(other, BlocksRetired):
                raise
        else:
            error = exc if isinstance(exc, Exception) else PullCancelled(f"request {order.request_id!r}: {exc!r}")
            self._report(_of(order, "failed"), Failed(order.request_id, error))

    async def _sent(self, lent: LentRequest) -> None:
        try:
            self._report("finished_sending", await lent.wait_released())
        except asyncio.CancelledError:
            self._report("finished_sending", LeaseEnd(lent.request_id, "closed", {}, lent.owed(), 0.0))
            raise
        finally:
            self._lent.discard(lent.request_id)

    def _report(self, kind: str, value: object) -> None:
        """Report the result of an order, unless a final one was reported already (`_abandon`)."""
        if asyncio.current_task() in self._tasks:
            self._tell(kind, value)

    def _tell(self, kind: str, value: object) -> None:
        self._news.append((kind, value, self.engine._clock.now()))
        self._on_news()


def _of(order: Pull | Load | Store, what: str) -> str:
    """Return the name of the list for such an order, because pulls have other lists than loads and stores."""
    return what if isinstance(order, Pull) else f"offload_{what}"


def _held(order: Pull | Load | Store, cause: BaseException) -> PullCancelled:
    """Return the error of an order with blocks that may still be in use."""
    held: dict[int, tuple[int, ...]] = {}
    with suppress(TypeError, ValueError):  # nothing was ever pulled into malformed groups
        held = {i: tuple(b for b in ids if b is not None) for i, (_, ids) in enumerate(order.groups)}
    error = PullCancelled(
        f"request {order.request_id!r}: no task waits for it any more ({cause!r})",
        request_id=order.request_id,
        reason="cancelled",
        held=held,
    )
    error.__cause__ = cause
    return error
