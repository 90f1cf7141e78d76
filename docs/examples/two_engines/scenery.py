"""A minimal version of the parts that your engine has already: KV cache, workers, a loop of steps, JSON over HTTP.

There is nothing to copy here. `worker.py`, `prefill.py` and `decode.py` use asynckv.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import queue
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from asynckv import Finished, Order, Registration, register_tensors, shard, shared_tensor

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM = 2, 64, 16, 8, 128

Prompts = Sequence[tuple[list[int], list[int]]]
"""For each prompt: its tokens, and the blocks of its KV."""


def blocks_of(prompt: list[int]) -> int:
    """Return the number of blocks for the KV of a prompt."""
    return -(-len(prompt) // BLOCK_SIZE)


class KVCache:
    """One rank's KV cache, and a model: its KV depends on every token of the prompt, and on nothing else."""

    def __init__(self, tp_rank: int, tp_size: int) -> None:
        import torch  # here, because schedulers do not need torch

        self._rank, self._heads = (tp_rank, tp_size), shard(NUM_HEADS, tp_rank, tp_size)
        shape = (2, NUM_BLOCKS, BLOCK_SIZE, self._heads[1] - self._heads[0], HEAD_DIM)
        self.tensors = {f"layers.{i}": shared_tensor(shape, torch.bfloat16) for i in range(NUM_LAYERS)}

    def register(self) -> Registration:
        """Describe the tensors to asynckv. Both engines must use the same layer names; their sharding may differ."""
        return register_tensors(
            self.tensors,
            order=("kv", "block", "token", "head", "dim"),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            heads=self._heads,
            num_heads=NUM_HEADS,
            tp_rank=self._rank[0],
            tp_size=self._rank[1],
            model="example",  # engines with different names refuse each other
        )

    def _forward(self, prompt: list[int], layer: int) -> Any:
        import torch

        seed = sum(place * token for place, token in enumerate(prompt, 1)) * NUM_LAYERS + layer
        kv = torch.randn(2, len(prompt), NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
        return kv[:, :, slice(*self._heads)].bfloat16()

    def compute(self, prompt: list[int], blocks: list[int]) -> None:
        """Compute the KV of a prompt."""
        for layer, tensor in enumerate(self.tensors.values()):
            for each, kv in enumerate(self._forward(prompt, layer).split(BLOCK_SIZE, dim=1)):
                tensor[:, blocks[each], : kv.shape[1]] = kv

    def is_right(self, prompt: list[int], blocks: list[int]) -> bool:
        """Return True if the blocks hold exactly the bytes that this rank would compute."""
        return all(
            bool((tensor[:, blocks].flatten(1, 2)[:, : len(prompt)] == self._forward(prompt, layer)).all())
            for layer, tensor in enumerate(self.tensors.values())
        )


class Step(NamedTuple):
    """Message of a scheduler to each of its workers, once per step."""

    orders: Sequence[Order]
    compute: Prompts
    check: Prompts


def _process(work: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(EOFError, ConnectionError):  # the scheduler has died, so its worker ends
        work(*args)


class Ranks:
    """All workers of one engine, as its scheduler sees them: processes with pipes."""

    def __init__(self, work: Callable[..., None], engine_id: str, tp_size: int, directory: str) -> None:
        self._started_with = (work, engine_id, tp_size, directory)
        started = [self._start(tp_rank) for tp_rank in range(tp_size)]
        self._processes, self._pipes = [process for process, _ in started], [pipe for _, pipe in started]
        self.endpoints = [pipe.recv() for pipe in self._pipes]
        self._starting: set[int] = set()

    def _start(self, tp_rank: int) -> tuple[BaseProcess, Connection]:
        work, engine_id, tp_size, directory = self._started_with
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_process, args=(work, engine_id, tp_rank, tp_size, directory, theirs))
        process.start()
        theirs.close()
        return process, ours

    @property
    def is_whole(self) -> bool:
        """True if no rank is being restarted, so that the model can compute."""
        return not self._starting

    def restart(self, tp_rank: int) -> None:
        """Begin to replace a worker that has died, without waiting: a start takes seconds, and a model's takes minutes.

        The new one has an empty KV cache, and another endpoint.
        """
        self._processes[tp_rank].kill()
        self._processes[tp_rank].join()
        self._processes[tp_rank], self._pipes[tp_rank] = self._start(tp_rank)
        self._starting.add(tp_rank)

    def started(self) -> list[int]:
        """Return the restarted ranks that are ready since the last call."""
        ready = []
        for tp_rank in sorted(self._starting):
            try:
                if self._pipes[tp_rank].poll():
                    self.endpoints[tp_rank] = self._pipes[tp_rank].recv()
                    self._starting.discard(tp_rank)
                    ready.append(tp_rank)
            except (EOFError, OSError):  # it died while it started
                self.restart(tp_rank)
        return ready

    def step(
        self, orders: Sequence[Order], compute: Prompts = (), check: Prompts = ()
    ) -> dict[int, tuple[Finished, list[bool]] | None]:
        """Let every rank but those that are being restarted run a step. Return each one's report; None if it died."""
        asked = {tp_rank: pipe for tp_rank, pipe in enumerate(self._pipes) if tp_rank not in self._starting}
        for pipe in asked.values():
            with contextlib.suppress(OSError):
                pipe.send(Step(orders, compute, check))
        return {tp_rank: self._receive(pipe) for tp_rank, pipe in asked.items()}

    def _receive(self, pipe: Connection) -> tuple[Finished, list[bool]] | None:
        try:
            told: tuple[Finished, list[bool]] = pipe.recv()
        except (EOFError, OSError):
            return None
        return told

    def end(self) -> None:
        """End all workers in order, and kill those that do not end."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the worker has ended by itself
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=10.0)
            process.kill()
            process.join()


@dataclass
class Call:
    """A request that came by HTTP, with a future for its answer."""

    path: str
    body: dict[str, Any]
    answer: Future[dict[str, Any]] = field(default_factory=Future)


def ask(url: str, **body: Any) -> dict[str, Any]:
    """Send JSON, and return the JSON answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def check(path: str, body: dict[str, Any]) -> None:
    """Raise unless a scheduler can take this call, because input from outside must not end an engine."""
    if path in ("/prefill", "/decode"):
        prompt = body["prompt"]
        if not isinstance(prompt, list) or not all(type(token) is int and 0 <= token < 2**31 for token in prompt):
            raise ValueError("prompt is not a list of tokens")
        if not 0 < blocks_of(prompt) <= NUM_BLOCKS:
            raise ValueError(f"a prompt has 1 ... {NUM_BLOCKS * BLOCK_SIZE} tokens, not {len(prompt)}")
    if path == "/decode" and not isinstance(body["params"], dict):
        raise ValueError("params is not an object")
    if path != "/status" and not isinstance(body["request_id"], str):
        raise ValueError("request_id is not a string")


def listen(port: int, calls: queue.SimpleQueue[Call]) -> str:
    """Put calls that come by HTTP into a queue, and return the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                check(self.path, body)
            except (KeyError, TypeError, ValueError) as error:
                self.send_error(400, str(error))
                return
            call = Call(self.path, body)
            calls.put(call)
            answer = json.dumps(call.answer.result()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def run_engine(engine_id: str, make_scheduler: Callable[[Ranks], Any], work: Callable[..., None], tp_size: int) -> None:
    """Start an engine's workers, scheduler and HTTP server, and run steps until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=tp_size, choices=(1, 2, 4, 8), help="tensor-parallel ranks")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; by default a free one")
    parser.add_argument("--dir", default="", help="directory for the workers' logs and sockets; by default none")
    options = parser.parse_args()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda *_: sys.exit())
    calls = queue.SimpleQueue[Call]()
    ranks = Ranks(work, engine_id, options.tp, options.dir)
    scheduler = make_scheduler(ranks)
    try:
        print(f"{engine_id} engine, tensor parallel {options.tp}: {listen(options.port, calls)}", flush=True)
        while True:
            with contextlib.suppress(queue.Empty):
                scheduler.take(calls.get(timeout=0.005))
            scheduler.step()
    finally:
        ranks.end()
