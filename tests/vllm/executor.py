"""vLLM's executor over ranks in processes of their own: forked, asked over pipes, their outputs merged by vLLM.

`MultiprocExecutor` does the same over shared memory that is polled without a pause, which on a small machine takes the
cores away from what is to be tested. As there, a rank runs what it is asked in order, and a step's answer is waited for
only when somebody needs it, so that stages of a pipeline overlap.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.tracing import maybe_init_worker_tracer
from vllm.v1.executor import Executor
from vllm.v1.serial_utils import run_method

from tests.vllm.rank import Rank
from tests.vllm.setups import die_with_parent

ANSWER_S = 120.0


class RankFailed(Exception):
    """A rank raised an exception, or is gone."""


def serve(connection: Connection, fields: dict[str, Any]) -> None:
    """A rank's process."""
    die_with_parent()
    maybe_init_worker_tracer("vllm.worker", "worker", f"Worker_{fields['rank']}")
    rank = Rank(**fields)
    while True:
        try:
            question = connection.recv()
        except EOFError:
            return
        if question is None:
            return
        method, args, kwargs = question
        try:
            with set_current_vllm_config(rank.vllm_config):
                answer = True, run_method(rank, method, args, kwargs)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)


class Later(Future[Any]):
    """An answer that is fetched when it is asked for; earlier ones are fetched first."""

    def __init__(self, executor: RankExecutor, merge: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.executor, self.merge = executor, merge

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self.executor.fetch()
        return super().result()


class RankExecutor(Executor):
    """All ranks of an engine."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self._asked: deque[Later] = deque()
        self._ranks: list[tuple[Any, Connection]] = []
        context = multiprocessing.get_context("fork")
        rendezvous = f"file://{Path(tempfile.mkdtemp()) / 'rendezvous'}"
        for rank in range(self.parallel_config.world_size):
            mine, theirs = context.Pipe()
            fields = {
                "vllm_config": self.vllm_config,
                "local_rank": rank,
                "rank": rank,
                "distributed_init_method": rendezvous,
                "is_driver_worker": rank == 0,
            }
            process = context.Process(target=serve, args=(theirs, fields), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, mine))
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        merge: Callable[[list[Any]], Any] = list,
    ) -> Any:
        for _, connection in self._ranks:
            connection.send((method, args, kwargs or {}))
        later = Later(self, merge)
        self._asked.append(later)
        return later if non_block else later.result()

    def fetch(self) -> None:
        """Receive the answers to the oldest question."""
        later = self._asked.popleft()
        try:
            later.set_result(later.merge([self._receive(rank) for rank in range(len(self._ranks))]))
        except Exception as error:
            later.set_exception(error)

    def _receive(self, rank: int) -> Any:
        _, connection = self._ranks[rank]
        if not connection.poll(ANSWER_S):
            raise RankFailed(f"rank {rank} did not answer within {ANSWER_S:.0f} s")
        try:
            is_good, value = connection.recv()
        except (EOFError, ConnectionError) as error:
            raise RankFailed(f"rank {rank} is gone") from error
        if not is_good:
            raise RankFailed(f"rank {rank}: {value}")
        return value

    def _merge(self, outputs: list[Any]) -> Any:
        last = len(outputs) - self.parallel_config.tensor_parallel_size
        if self.kv_output_aggregator is None:
            return outputs[last]
        return self.kv_output_aggregator.aggregate(outputs, output_rank=last)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        return self.collective_rpc("execute_model", args=(scheduler_output,), non_block=non_block, merge=self._merge)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self.collective_rpc("sample_tokens", args=(grammar_output,), non_block=non_block, merge=self._merge)

    def kill(self, rank: int) -> None:
        """End a rank at once."""
        self._ranks[rank][0].kill()

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.collective_rpc("shutdown")
        for _, connection in self._ranks:
            connection.send(None)  # each rank has the other ends as well, so that none of them sees this one close
        for process, connection in self._ranks:
            process.join(10)
            connection.close()
