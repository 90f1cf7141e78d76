"""The worker's half: an engine on its own thread, which gets the orders of each step and is asked for results.

vLLM calls this from the thread that computes. So only the start, sleep, wake-up and the end wait, each for a bounded
time. vLLM's scheduler frees blocks and counts ranks by these reports, and ends if it hears of a request twice:

- Every ordered pull is reported once in `finished_recving`, when its bytes are in place or nothing can write its blocks
  any more. A failed pull is in `failed_recving` as well.
- Every ordered lend is reported once in `finished_sending`, even if the engine refused it.
- If blocks may still be written after `pull.held_s`, the worker ends with an error that names the requests, because
  vLLM cannot set blocks aside.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from asynckv.edges.torch import Event, shared_zeros, stream_event
from asynckv.embed import Cancel, EngineThread, Failed, Finished, Follow, Lend, Order, Pull, Withdraw, WithdrawTicket
from asynckv.embed.orders import CountPrompts, EndPieces, LendPiece, StartEarly
from asynckv.errors import BlocksRetired, EngineClosed, LocalProtocolError
from asynckv.geometry.check import Registration
from asynckv.integrations.vllm.compat import KVConnectorTransferResults, current_platform
from asynckv.integrations.vllm.handover import FollowReports, StepOrders, WorkerAddress
from asynckv.integrations.vllm.memory import ModelFacts, Tails, check_supported, place_of, register
from asynckv.integrations.vllm.stats import AsyncKVStats, Tally

if TYPE_CHECKING:
    from asynckv.edges.torch import Tensor
    from asynckv.integrations.vllm.options import Options

START_S = 120.0  # for the engine to listen: registering much memory takes long
DRAIN_S = 2.0  # for running transfers before a sleep; short, because vLLM sleeps only when it is idle
LET_GO_S = 30.0  # for the release of the memory, after the drain and the readers' grants (`lease.grant_s`)
RECALL_S = 1.0  # seconds between two warnings of a step that waits
OF_PIECES = (LendPiece, EndPieces)
CLOSE_S = 3.5  # for the end: vLLM kills a worker 5 s after it asked it to end
log = logging.getLogger("vllm.asynckv")


class WorkerHalf:
    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any) -> None:
        check_supported(vllm_config, kv_cache_config)
        use_vllm_logging()
        place, replica = place_of(vllm_config), getattr(vllm_config.parallel_config, "data_parallel_index", 0)
        number = ((replica * place.pp_size + place.pp_stage) * place.pcp_size + place.pcp_rank) * place.tp_size
        number += place.tp_rank
        self._is_first, self._is_replica = place.pp_stage == place.rank == 0, place.is_replica
        self._config = options.engine_config(str(vllm_config.kv_transfer_config.engine_id), number)
        self._metrics, self._number = options.metrics, number
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._thread: EngineThread | None = None
        self._registration: Registration | None = None
        self._tails = Tails()
        self._is_suspended = False
        self._pulling: dict[str, Pull | StartEarly] = {}
        self._lent: set[str] = set()
        self._unread: set[str] = set()  # lends of a replica, which readers do not meet
        self._failing: set[str] = set()  # loads that were given up before they were ordered
        self._tally = Tally()
        self._begun: StepOrders | None = None
        self._reports = FollowReports([], [])
        self._line: ThreadPoolExecutor | None = None
        """With a drafter on a GPU: hands orders over behind the work that the stream has at the time, in their order.
        vLLM ends a step before its drafter has written the last blocks."""

    def allocation(self) -> contextlib.AbstractContextManager[Any] | None:
        """Return a context in which vLLM allocates host memory that NIXL's own process can map; None for a device."""
        is_cpu = current_platform is not None and current_platform.is_cpu()
        return shared_zeros() if is_cpu and self._config.nixl.process != "never" else None

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Declare the memory and start the engine; returns when it listens. A replica has none."""
        if self._is_replica:
            return
        facts, place = ModelFacts.of(self._vllm_config), place_of(self._vllm_config)
        registration = register(self._kv_cache_config, kv_caches, place, facts)
        self._tails = Tails.of(self._kv_cache_config, kv_caches, facts)
        self.unregister_kv_caches()  # vLLM may have allocated the memory anew, as after an elastic change of size
        self._registration = registration
        if self._thread is not None:
            self.restore_kv_caches()
            return
        if self._vllm_config.speculative_config is not None and registration.layout.memories[0].kind == "cuda":
            self._line = ThreadPoolExecutor(1, "asynckv-behind")
        with unpinned():
            thread = EngineThread(self._config, registration)
            self._show(thread)  # the endpoint ends with the engine
            self._trace(thread)
            self._thread = thread.start(START_S)

    def _show(self, thread: EngineThread) -> None:
        if self._metrics is not None:
            from asynckv.observe.endpoint import MetricsEndpoint
            from asynckv.observe.metrics import Metrics

            host, allow_remote = self._metrics.host, self._metrics.allow_remote
            port = self._metrics.port + self._number
            MetricsEndpoint(Metrics(thread), host=host, port=port, allow_remote=allow_remote).start()

    def _trace(self, thread: EngineThread) -> None:
        """Trace if vLLM traces. By now its workers have set up OpenTelemetry."""
        if getattr(self._vllm_config.observability_config, "otlp_traces_endpoint", None) is not None:
            from asynckv.observe.tracing import Tracing

            Tracing(thread)

    def unregister_kv_caches(self) -> None:
        """Suspend the engine before vLLM releases the memory, so that nothing touches it any more. Idempotent."""
        if self._thread is not None and not self._is_suspended:
            timeout_s = DRAIN_S + self._config.lease.grant_s + LET_GO_S
            self._thread.call(self._thread.engine.suspend(timeout_s=DRAIN_S), timeout_s)
            self._is_suspended = True

    def restore_kv_caches(self) -> None:
        """Resume the engine on the same addresses; requests that were lent before are refused. Idempotent."""
        if self._thread is not None and self._is_suspended:
            assert self._registration is not None
            with unpinned():
                self._thread.call(self._thread.engine.resume(self._registration), START_S)
            self._is_suspended = False

    def address(self) -> WorkerAddress | None:
        """Return this worker's address, which changes with every sleep; None while it does not listen."""
        if self._thread is None or self._is_suspended:
            return None
        engine = self._thread.engine
        return WorkerAddress(msgspec.to_builtins(engine.endpoint), engine.memory_epoch)

    def start_load(self, step: StepOrders) -> None:
        """Begin the orders of a step, once, although vLLM hands them over before and after the forward pass."""
        if step is self._begun:
            return
        self._begun = step
        self._failing.update(step.failing)
        if step.prompts is not None and self._is_first and self._thread is not None:
            self._thread.submit([CountPrompts(step.prompts)])
        if not step.orders:
            return
        if self._is_replica:
            self._unread.update(_request_id(order) for order in step.orders if isinstance(order, Lend))
            return
        if self._thread is None:
            raise LocalProtocolError("orders came, but no KV caches are registered (register_kv_caches)")
        for order in step.orders:
            # What goes on may have failed and been reported since.
            if isinstance(order, Pull | StartEarly) and (
                not getattr(order, "goes_on", False) or order.request_id in self._pulling
            ):
                self._pulling[order.request_id] = order
            elif isinstance(order, Lend):
                self._lent.add(_request_id(order))
        orders = step.orders
        if self._line is not None:
            # Pieces are of groups without drafts, and must be taken back in turn, before the step.
            self._thread.submit([order for order in orders if isinstance(order, OF_PIECES)])
            orders = [order for order in orders if not isinstance(order, OF_PIECES)]
            self._line.submit(_submit_behind, stream_event(), self._thread, orders)
        else:
            self._thread.submit(orders)
        if any(isinstance(order, EndPieces) for order in step.orders):
            self._await_end_of_pieces(self._thread)

    def _await_end_of_pieces(self, thread: EngineThread) -> None:
        """Wait until pieces are taken back, because the forward pass may write their blocks."""
        until = time.monotonic() + self._config.lease.grant_s
        while True:
            try:
                thread.recall([], RECALL_S)  # it comes behind all orders that were submitted
                return
            except TimeoutError as exc:
                log.warning("a step waits until pieces of preempted or aborted requests are taken back: %s", exc)
                if time.monotonic() >= until:
                    raise

    def take_results(self) -> Any:
        """Return the requests that ended since the last call, each once; raise `BlocksRetired` to end this process."""
        results = KVConnectorTransferResults(
            finished_sending=self._unread, finished_recving=self._failing, failed_recving=set(self._failing)
        )
        self._failing, self._unread = set(), set()
        if self._thread is not None and (finished := self._thread.take_finished()):
            self._tell(finished, results)
        return results

    def _tell(self, finished: Finished, results: Any) -> None:
        if finished.retired:
            raise BlocksRetired(
                f"requests {', '.join(finished.retired[:8])}: blocks may still be written {self._config.pull.held_s:g} "
                f"s (pull.held_s) after their reads failed, and vLLM cannot set blocks aside; this worker has to be "
                f"started again"
            )
        more: list[Order] = []
        self._reports = self._reports.aggregate(finished)  # which has the same lists
        for end in finished.finished_sending:
            self._tally.lease(end.cause)
            self._sent(end.request_id, results)
        for refused in finished.refused:
            log.warning("%s was refused: %s", type(refused.order).__name__, refused.error)
            if isinstance(refused.order, Lend):
                self._tally.lease("refused")
                self._sent(_request_id(refused.order), results)
                more.append(Withdraw(refused.order.params))  # otherwise its reader would wait until its deadline
                if refused.order.ticket:
                    more.append(WithdrawTicket(refused.order.ticket))
            elif isinstance(refused.order, Follow):
                self._reports.not_offered.append(Failed(refused.order.request_id, refused.error))
        for result in finished.finished_recving:
            self._tails.clear(result.padding)
            self._tally.received(result)
            self._received(result.request_id, results)
        for failed in finished.failed:
            self._tally.failed(failed.error)
            order = self._pulling.get(failed.request_id)
            if order is not None and failed.is_unbegun:
                # Its announcement is still valid, and would be renewed for up to `announce_s`.
                more.append(Cancel(order.request_id, order.params if isinstance(order, Pull) else None))
            if not failed.is_held:  # held ones follow in `returned` or `retired`
                self._received(failed.request_id, results, is_failed=True)
        for request_id in finished.returned:
            self._received(request_id, results, is_failed=True)
        if more and self._thread is not None:
            with contextlib.suppress(EngineClosed):
                self._thread.submit(more)

    def _received(self, request_id: str, results: Any, is_failed: bool = False) -> None:
        if self._pulling.pop(request_id, None) is not None:
            results.finished_recving.add(request_id)
            if is_failed:
                results.failed_recving.add(request_id)

    def _sent(self, request_id: str, results: Any) -> None:
        if request_id in self._lent:
            self._lent.discard(request_id)
            results.finished_sending.add(request_id)

    def take_reports(self) -> FollowReports | None:
        """Return what was offered, not offered and followed since the last call; `take_results` comes before it."""
        reports, self._reports = self._reports, FollowReports([], [])
        return reports if reports.offered or reports.not_offered or reports.followed else None

    def statistics(self) -> AsyncKVStats | None:
        """Return the counts since the last call, at most once a second while requests are in flight."""
        return self._tally.take(at_once=not (self._pulling or self._lent))

    def shutdown(self) -> None:
        """End the engine within a few seconds, even with transfers in flight. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            # Longer grants are cut short, and their readers are told. This is safe, because a worker that ends
            # writes nothing.
            thread.close(CLOSE_S)
        except Exception as exc:
            # The process ends now, and the engine with it.
            log.warning("the engine did not end in order within %g s: %s", CLOSE_S, exc)


def _submit_behind(event: Event, thread: EngineThread, orders: Sequence[Order]) -> None:
    event.synchronize()
    with contextlib.suppress(EngineClosed):  # `take_results` raises the cause
        thread.submit(orders)


def _request_id(order: Lend) -> str:
    return str(order.params["request_id"])


@contextlib.contextmanager
def unpinned() -> Iterator[None]:
    """Let threads that are started in this context run on all cores, though vLLM pins this thread to one."""
    mine = os.sched_getaffinity(0)
    with contextlib.ExitStack() as undo:
        if len(mine) == 1:
            with contextlib.suppress(OSError):  # a container may forbid it; the engine's thread then shares the core
                os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()) | mine)
                undo.callback(os.sched_setaffinity, 0, mine)
        yield


def use_vllm_logging() -> None:
    """Send asynckv's events to vLLM's log, unless the application has configured them itself."""
    ours, theirs = logging.getLogger("asynckv"), logging.getLogger("vllm")
    if not ours.handlers and ours.level == logging.NOTSET and ours.parent is logging.getLogger():
        ours.parent = theirs
        ours.setLevel(logging.NOTSET)  # clears the cache of enabled levels
