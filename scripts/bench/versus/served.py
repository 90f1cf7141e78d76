"""An engine of `tests/vllm` behind vLLM's API server, in a process that tells when its steps began and ended."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Self

from fastapi import FastAPI
from tokenizers import Tokenizer, models, pre_tokenizers
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.generate.api_router import register_generate_api_routers
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.launcher import serve_http
from vllm.entrypoints.launchers.utils.server_utils import lifespan
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.instrumentator.health import router as health
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM

from tests.vllm.core import make_config
from tests.vllm.models import VOCABULARY, Attention, Model
from tests.vllm.rank import Rank
from tests.vllm.setups import Setup

MODEL = Model((Attention(), Attention()))


class TimedRank(Rank):
    """A rank whose forward costs only `model_time`, and whose steps are written down."""

    def init_device(self) -> None:
        super().init_device()
        self.steps: list[Any] = []
        self.schedule_s: list[float] = []
        honest = Scheduler.schedule

        def schedule(it: Scheduler, *args: Any, **more: Any) -> Any:
            began = time.perf_counter()
            found = honest(it, *args, **more)
            self.schedule_s.append(time.perf_counter() - began)
            return found

        Scheduler.schedule = schedule

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: Any) -> Any:
        self.began, self.scheduled = time.monotonic(), list[Any]()
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        self.steps.append([self.began, time.monotonic(), self.scheduled])
        return output

    def _forward(self, name: str, scheduled: int, drafts: Any) -> list[int]:
        sequence = self._sequences[name]
        begin, end = sequence.computed, sequence.computed + scheduled
        self.scheduled.append([name, begin, end, sequence.prompt])
        sequence.computed = end
        if end < len(sequence.tokens):
            return []
        sequence.tokens.append(7)
        return [7]

    def take_steps(self) -> dict[str, Any]:
        """Return what happened since the last question."""
        steps, self.steps = self.steps, []
        schedule_s, self.schedule_s = self.schedule_s, []
        return {"steps": steps, "schedule_s": schedule_s, "cpu_s": time.process_time(), "at": time.monotonic()}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the words w3, w4 ..."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    for name, text in (("tokenizer.json", made.to_str()), ("tokenizer_config.json", json.dumps(said))):
        (whole := folder / f"{name}.{os.getpid()}").write_text(text)
        whole.replace(folder / name)


class Served:
    """The process."""

    def __init__(self, *, name: str, folder: str, tokens: int, num_blocks: int, overlaps: bool) -> None:
        setup = Setup(
            name,
            MODEL,
            num_blocks=num_blocks,
            max_model_len=2 * tokens,  # so that vLLM takes so many characters
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            async_scheduling=overlaps,
        )
        self._config = config = make_config(setup, Path(folder))
        config.parallel_config.worker_cls = f"{TimedRank.__module__}.{TimedRank.__qualname__}"
        write_tokenizer(Path(config.model_config.model))
        config.model_config.skip_tokenizer_init = False
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # on CPUs vLLM imports itself once more instead

    async def __aenter__(self) -> Self:
        self._engine = AsyncLLM.from_vllm_config(self._config)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=4096)
        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args(["--model", self._config.model_config.model, "--served-model-name", "m"])
        # What vLLM's `build_app` makes, without the routes of other services, whose packages are not installed.
        app = FastAPI(lifespan=lifespan)
        app.state.args, tasks = args, await self._engine.get_supported_tasks()
        register_generate_api_routers(app)
        app.include_router(health)
        init_exception_handler(app)
        init_entrypoints_middleware(args, app, tasks)
        await init_app_state(self._engine, app.state, args, tasks)
        serving = serve_http(app, self._socket, port=0, log_level="error", access_log=False)
        self._serving = asyncio.create_task(serving)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.shutdown()
        self._serving.cancel()
        await asyncio.wait([self._serving])

    def address(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    async def model_time(self, python_s: float, outside_s: float) -> None:
        await self._engine.collective_rpc("model_time", args=(python_s, outside_s))

    async def take_steps(self) -> dict[str, Any]:
        """Return the steps of the engine since the last question."""
        return dict((await self._engine.collective_rpc("take_steps"))[0])
