"""A tiny but complete engine for `asynckv proxy`: `python -m docs.examples.service.tiny_engine`.

It is a real transformer with random weights (`scripts.disagg_generate`) and a KV cache in paged memory. asynckv runs on
the same event loop as the HTTP server, and the model in a thread. To the router it behaves as vLLM does: the
`kv_transfer_params` of a request decide what it does, not the engine's role.

- `do_remote_decode`: compute the prompt without its last token, lend the KV cache, and answer with a token and params.
- `do_remote_prefill`: fetch the KV cache that the params describe, and generate from the last token of the prompt.
  Params without it are given back to their owner at once.
- Neither: do both here. The tokens are the same, bit by bit, because the steps are the same.

A KV cache belongs to one prompt, so a request with several is computed here. Answers have the form of vLLM's.

The essential part is how long blocks are held. On the prefill side a request holds them until its lease has ended, long
after its answer. On the decode side it holds them until it has generated or its client has disconnected; after an
interrupted pull, until nothing can write them any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, Self, TypeVar

import prometheus_client as prometheus
import torch
import typer
from aiohttp import web

from asynckv import (
    Engine,
    EngineConfig,
    InspectConfig,
    KeysConfig,
    LeaseConfig,
    LogConfig,
    Metrics,
    PrefillRanks,
    PullConfig,
    Tracing,
    configure_logging,
    trace_context,
)
from asynckv.errors import AsyncKVError, BlocksRetired, PullError
from asynckv.tools.proxy.server import COMPLETIONS, Refused, errors_as_json, serving, told_to_stop
from docs.examples.service import tiny_request
from scripts import command
from scripts.disagg_generate import Pages, Subject, gather, load, store

CHUNK = 64
"""Tokens of a prompt that one step computes."""

T = TypeVar("T")
Role = Literal["prefill", "decode"]
LAYOUTS: dict[Role, dict[str, Any]] = {
    "prefill": {"block_size": 12, "order": "cross-hnd"},
    "decode": {"block_size": 8, "order": "nhd"},
}
"""Layouts of the two sides, which differ as those of real engines do."""


def decode(tokens: list[int]) -> str:
    """Return tokens as text."""
    return bytes(tokens).decode("ascii")


class Blocks:
    """Free blocks; a request waits until there are enough."""

    def __init__(self, count: int) -> None:
        self.count, self._free, self._freed = count, list(range(count)), asyncio.Event()

    @property
    def num_held(self) -> int:
        return self.count - len(self._free)

    async def take(self, count: int) -> list[int]:
        if count > self.count:
            raise Refused(400, f"the prompt needs {count} blocks, but there are {self.count}")
        while len(self._free) < count:
            self._freed.clear()
            await self._freed.wait()
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, blocks: list[int]) -> None:
        self._free += blocks
        self._freed.set()


class TinyEngine:
    """An engine, from its HTTP server down to its memory.

    Args:
        role: Role of the engine, which sets its name and its memory layout.
        step_ms: Wait before every step, to imitate a larger model.
        lease_s: Seconds for which a request stays lent until a decode engine asks for it.
        directory: Directory for its log and for questions of `asynckv why`; none if empty.
        advertise: Address at which other hosts read from it; if empty, only this host can.
        keys: Its `NAME.key_secret`, in a directory with the `.key` files of all engines that it talks to.
    """

    def __init__(
        self,
        *,
        role: Role,
        host: str = "127.0.0.1",
        port: int = 0,
        blocks: int = 1024,
        step_ms: float = 0,
        lease_s: float = 30,
        seed: int = 0,
        directory: str = "",
        advertise: str = "",
        keys: str = "",
    ) -> None:
        torch.set_num_threads(1)
        configure_logging("error")
        self.name = f"{role}-{secrets.token_hex(4)}"
        self._subject = Subject("llama", seed)
        self._pages = Pages(self._subject, num_blocks=blocks, **LAYOUTS[role])
        self._block_size = LAYOUTS[role]["block_size"]
        self._blocks = Blocks(blocks)
        # A router can ask another engine within seconds, so do not wait long for a lost one.
        pull = PullConfig(timeout_s=20, handshake_s=2, gone_s=4)
        self._lease = LeaseConfig(lease_s=lease_s)
        told: dict[str, Any] = {}
        if directory:
            log = LogConfig(file=os.path.join(directory, "{engine_id}.jsonl"))
            told = {"log": log, "inspect": InspectConfig(directory=directory)}
        if keys:
            told["keys"] = KeysConfig(secret=keys, authorized=os.path.dirname(keys))
        if advertise:
            told |= {"bind": "tcp://0.0.0.0:0", "advertise": advertise}
        self._engine = Engine(
            EngineConfig(engine_id=self.name, lease=self._lease, pull=pull, **told), self._pages.registration
        )
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(Metrics(self._engine))
        with contextlib.suppress(ImportError):  # OpenTelemetry is an extra
            Tracing(self._engine)
        self._model = ThreadPoolExecutor(1, "model")
        self._step_s = step_ms / 1000
        self._state = {"waiting": 0, "running": 0}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        app = web.Application(middlewares=[errors_as_json], client_max_size=2**24)
        app.router.add_routes([web.post(path, self._complete) for path in COMPLETIONS])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self._serving = serving(app, host, port, drain_s=5)

    async def __aenter__(self) -> Self:
        await self._engine.start()
        await self._on_model(self._subject.step, torch.tensor([[0]]))  # the first step takes seconds
        self._group = PrefillRanks(self.name, [self._engine.endpoint], lease=self._lease)
        # Objects of torch and transformers live as long as the process. Collecting them again when the interpreter
        # ends took seconds.
        gc.freeze()
        self.url = await self._serving.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serving.__aexit__(None, None, None)
        await self._engine.aclose()
        self._model.shutdown()

    async def address(self) -> str:
        """Return the URL of the engine."""
        return self.url

    # -- requests ----------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked, prompts = tiny_request.read(await request.read(), request.path)
        params = asked.kv_transfer_params or {}
        lent, is_one = params.get("asynckv"), len(prompts) == 1
        request_id = f"{request.headers.get('X-Request-Id', 'request')}-{next(self._numbers)}"
        answer = Answer(request, request_id, asked, [len(prompt) for prompt in prompts])
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._counted("running"))
            # Nothing is computed of the last token in advance, so one token alone leaves nothing to lend.
            if params.get("do_remote_decode") and is_one and len(prompts[0]) > 1:
                first, lent = await self._prefill(request_id, prompts[0], request.headers)
                return answer.whole([first], {"do_remote_prefill": True, "asynckv": lent})
            if isinstance(lent, dict) and not params.get("do_remote_prefill"):
                with contextlib.suppress(AsyncKVError):  # params that are no good give nothing back
                    self._engine.cancel(request_id, lent)
                lent = None
            if isinstance(lent, dict):
                if not is_one:
                    raise Refused(400, f"kv_transfer_params belong to one prompt, but there are {len(prompts)}")
                lent = lent | trace_context(request.headers)  # the trace of the router's request
            caches = [await stack.enter_async_context(self._cache(request_id, prompt, lent)) for prompt in prompts]
            tokens = [
                self._generate(cache, prompt[-1], len(prompt) - 1, asked.count)
                for prompt, cache in zip(prompts, caches, strict=True)
            ]
            if asked.stream:
                return await answer.stream(tokens)
            return answer.whole([[token async for token in each] for each in tokens])

    async def _prefill(
        self, request_id: str, prompt: list[int], headers: Mapping[str, str]
    ) -> tuple[list[int], dict[str, Any]]:
        """Compute a prompt and lend its KV cache; return a token, and the params for the decode engine."""
        tokens = len(prompt) - 1
        blocks = await self._take(tokens)
        try:
            cache = await self._compute_prompt(prompt)
            await self._on_model(self._store, cache, blocks, tokens)
            first = [token async for token in self._generate(cache, prompt[-1], tokens, 1)]
            params = self._group.make_params(request_id, [(0, blocks)], tokens, written=True, trace=headers)
            lent = self._engine.lend(params)
        except BaseException:
            self._blocks.give(blocks)
            raise
        # From here on the lease decides how long the blocks are held, even if the client disconnects.
        self._spawn(self._give_when(lent.wait_released(), blocks))
        return first, params

    @contextlib.asynccontextmanager
    async def _cache(self, request_id: str, prompt: list[int], lent: dict[str, Any] | None) -> AsyncIterator[Any]:
        """Fetch or compute the KV cache of a prompt without its last token, and hold its blocks while it is used."""
        tokens = len(prompt) - 1
        if lent is None:
            yield await self._compute_prompt(prompt)
            return
        try:
            self._engine.announce(request_id, lent)  # keeps the request lent while it waits for blocks
            try:
                blocks = await self._take(tokens)
            except BaseException:
                self._engine.cancel(request_id)
                raise
            try:
                await self._engine.pull(request_id, [(0, blocks)], lent, retries=1)
                yield await self._on_model(self._gather, blocks, tokens)
            finally:
                # An interrupted pull may still write.
                self._spawn(self._give_when(self._engine.returned(request_id), blocks))
        except PullError as exc:
            raise Refused(503, f"{type(exc).__name__} ({exc.reason}): {exc}", "kv_transfer_error") from exc
        except AsyncKVError as exc:
            raise Refused(400, f"kv_transfer_params: {exc}") from exc

    async def _take(self, tokens: int) -> list[int]:
        with self._counted("waiting"):
            return await self._blocks.take(-(-tokens // self._block_size))

    async def _give_when(self, over: Coroutine[Any, Any, Any], blocks: list[int]) -> None:
        with contextlib.suppress(BlocksRetired):  # never reuse these, because a transfer may still write them
            await over
            self._blocks.give(blocks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.contextmanager
    def _counted(self, state: str) -> Any:
        self._state[state] += 1
        try:
            yield
        finally:
            self._state[state] -= 1

    # -- the model ---------------------------------------------------------------------------------

    async def _on_model(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function in the model's thread; wait for its end even if cancelled, because it may write blocks."""
        running = asyncio.get_running_loop().run_in_executor(self._model, work, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    async def _step(self, tokens: list[int], cache: Any, position: int) -> tuple[torch.Tensor, Any]:
        await asyncio.sleep(self._step_s)
        return await self._on_model(self._subject.step, torch.tensor([tokens]), cache, position)

    async def _compute_prompt(self, prompt: list[int]) -> Any:
        cache = None
        for position in range(0, len(prompt) - 1, CHUNK):
            _, cache = await self._step(prompt[position : min(position + CHUNK, len(prompt) - 1)], cache, position)
        return cache

    async def _generate(self, cache: Any, token: int, position: int, count: int) -> AsyncIterator[int]:
        for at in range(position, position + count):
            logits, cache = await self._step([token], cache, at)
            token = int(logits.argmax())
            yield token

    def _store(self, cache: Any, blocks: list[int], tokens: int) -> None:
        store(self._pages, self._subject.take_apart(cache, tokens), [(0, blocks)], tokens)

    def _gather(self, blocks: list[int], tokens: int) -> Any:
        return self._subject.put_together(gather([self._pages], self._subject, [(0, blocks)], tokens), tokens)

    # -- what is served ----------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        held = {"blocks_held": self._blocks.num_held, "blocks": self._blocks.count}
        return web.json_response({"status": "ok", "name": self.name, **self._state, **held})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = prometheus.generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": tiny_request.MODEL, "object": "model", "created": int(time.time()), "owned_by": "asynckv"}
        return web.json_response({"object": "list", "data": [model]})


class Answer:
    """Write tokens as OpenAI's API does.

    Args:
        sizes: Number of tokens of each prompt.
    """

    def __init__(self, request: web.Request, request_id: str, asked: tiny_request.Asked, sizes: list[int]) -> None:
        self.request, self.asked, self.sizes = request, asked, sizes
        self.is_chat = request.path == COMPLETIONS[1]
        prefix, kind = ("chatcmpl", "chat.completion") if self.is_chat else ("cmpl", "text_completion")
        self._head = {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time())}
        self._head |= {"model": tiny_request.MODEL}

    def _choice(self, name: str, index: int, tokens: list[int], is_end: bool, **role: str) -> dict[str, Any]:
        text, reason = decode(tokens), "length" if is_end else None
        said: dict[str, Any] = {name: {**role, "content": text}} if self.is_chat else {"text": text}
        return {"index": index, **said, "logprobs": None, "finish_reason": reason, "stop_reason": None}

    def whole(self, tokens: list[list[int]], params: dict[str, Any] | None = None) -> web.Response:
        """Answer with the tokens of each prompt."""
        choices = [self._choice("message", index, each, True, role="assistant") for index, each in enumerate(tokens)]
        used = usage(sum(self.sizes), sum(map(len, tokens)))
        return web.json_response({**self._head, "choices": choices, "usage": used, "kv_transfer_params": params})

    async def stream(self, tokens: list[AsyncIterator[int]]) -> web.StreamResponse:
        """Answer with an event for each token, of one prompt after the other."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(self.request)
        options, count = self.asked.stream_options or tiny_request.StreamOptions(), self.asked.count
        head = self._head | ({"object": "chat.completion.chunk"} if self.is_chat else {})

        async def event(*choices: dict[str, Any], size: int, done: int) -> None:
            is_told = options.include_usage and (options.continuous_usage_stats or not choices)
            used = {"usage": usage(size, done)} if is_told else {}
            await response.write(f"data: {json.dumps({**head, 'choices': choices, **used})}\n\n".encode())

        for index, (each, size) in enumerate(zip(tokens, self.sizes, strict=True)):
            done = 0
            async for token in each:
                if self.is_chat and not done:
                    await event(self._choice("delta", index, [], False, role="assistant"), size=size, done=0)
                done += 1
                await event(self._choice("delta", index, [token], done == count), size=size, done=done)
        if options.include_usage:
            await event(size=sum(self.sizes), done=len(tokens) * count)
        await response.write(b"data: [DONE]\n\n")
        return response


def usage(size: int, done: int) -> dict[str, int]:
    return {"prompt_tokens": size, "completion_tokens": done, "total_tokens": size + done}


async def _run(**setup: Any) -> None:
    async with TinyEngine(**setup) as engine:
        print(json.dumps({"name": engine.name, "url": engine.url, "pid": os.getpid()}), flush=True)
        await told_to_stop().wait()


def engine(
    role: Annotated[Role, typer.Option(help="Role of the engine, which sets its name and its memory layout.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for a free one. The first line of stdout names it.")] = 0,
    blocks: Annotated[int, typer.Option(help="Blocks of the KV cache.")] = 1024,
    step_ms: Annotated[float, typer.Option(help="Wait before every step, to imitate a larger model.")] = 0,
    lease_s: Annotated[
        float, typer.Option(help="Seconds for which a request stays lent until a decode engine asks for it.")
    ] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the weights; use the same for all engines.")] = 0,
    dir: Annotated[str, typer.Option(help="For its log and a socket: asynckv why DIR.", metavar="DIR")] = "",
    advertise: Annotated[
        str, typer.Option(help="Address at which other hosts read, such as tcp://NAME:0; needs --keys.")
    ] = "",
    keys: Annotated[
        str, typer.Option(help="NAME.key_secret of asynckv keygen, next to every engine's .key.", metavar="FILE")
    ] = "",
) -> int:
    """Serve a tiny transformer with random weights through OpenAI's API, as prefill or decode engine."""
    command.check(0 <= port < 65536, f"--port {port} is outside 0 ... 65535")
    command.check(1 <= blocks <= 100_000, f"--blocks {blocks} is outside 1 ... 100000")
    command.check(0 <= step_ms <= 60_000, f"--step-ms {step_ms} is outside 0 ... 60000")
    command.check(1 <= lease_s <= 3600, f"--lease-s {lease_s:g} is outside 1 ... 3600")
    load()
    at = {"role": role, "host": host, "port": port}
    told = {"directory": dir, "advertise": advertise, "keys": keys}
    asyncio.run(_run(**at, blocks=blocks, step_ms=step_ms, lease_s=lease_s, seed=seed, **told))
    return 0


EPILOG = """
[bold]Examples[/bold]

  python -m docs.examples.service.tiny_engine --role prefill --port 8100

  python -m docs.examples.service.pd_service   # two of these for prefill, one for decode, and the router

[bold]Exit status[/bold]  0 stopped in order, 2 bad input
"""
main = command.script(engine, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
