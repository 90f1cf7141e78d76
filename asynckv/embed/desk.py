"""Where orders are carried out: on the engine's loop, one list at a time, in the order given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

from asynckv.embed.orders import Announce, Cancel, Discharge, Failed, Finished, Lend, Order, Pull, Refused, Withdraw
from asynckv.engine import Engine, LentRequest
from asynckv.errors import AsyncKVError, BlocksRetired, PullError

__all__ = ["Desk"]


class Desk:
    """Carries out orders on an engine's loop, and keeps what has ended until somebody takes it.

    `carry_out` belongs to the loop; `take` may be called from any thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished = Finished()
        self._lock = threading.Lock()

    def take(self) -> Finished:
        """Return what has ended since the last call."""
        if not self._finished:
            return Finished()
        with self._lock:
            finished, self._finished = self._finished, Finished()
        return finished

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Carry out orders, the first first; what is refused is told with the rest."""
        for order in orders:
            try:
                self._carry_out(order)
            except AsyncKVError as exc:
                if isinstance(order, Pull):
                    self._tell(failed=Failed(order.request_id, exc))
                else:
                    self._tell(refused=Refused(order, exc))

    def _carry_out(self, order: Order) -> None:
        engine = self.engine
        match order:
            case Announce():
                engine.announce(order.request_id, order.params, wait_s=order.wait_s, cohort_id=order.cohort_id)
            case Pull():
                self._go(self._pull(order))
            case Discharge():
                engine.discharge(order.request_id, order.params, cohort_id=order.cohort_id)
            case Cancel():
                engine.cancel(order.request_id)
            case Lend():
                self._go(self._sent(engine.lend(order.params, readers=order.readers)))
            case Withdraw():
                engine.withdraw(order.params)
            case _:
                raise TypeError(f"{order!r} is no order")

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pull(self, order: Pull) -> None:
        try:
            result = await self.engine.pull(
                order.request_id,
                order.groups,
                order.params,
                timeout_s=order.timeout_s,
                cohort_id=order.cohort_id,
                hashes=order.hashes,
                num_tokens=order.num_tokens,
                is_last=order.is_last,
                priority=order.priority,
                retries=order.retries,
            )
        except AsyncKVError as exc:
            self._tell(failed=Failed(order.request_id, exc))
            if isinstance(exc, PullError) and exc.held:
                try:
                    await exc.returned()
                except BlocksRetired:
                    self._tell(retired=order.request_id)
                else:
                    self._tell(returned=order.request_id)
        else:
            self._tell(received=result)

    async def _sent(self, lent: LentRequest) -> None:
        self._tell(sent=await lent.wait_released())

    def _tell(self, **news: Any) -> None:
        with self._lock:
            for kind, value in news.items():
                getattr(self._finished, kind).append(value)
