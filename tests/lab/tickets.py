"""Engines of several ranks whose requests are followed, behind the router, and kills of ranks and of the router.

Every rank, and the router, is a process. The schedulers are here, each with the real ledger of its side and an HTTP
server, and so are the clients. A hostile allocator overwrites blocks that return. Every byte that a pull publishes is
compared. A prefill engine that computes in chunks lends pieces, and preempts some prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp import web

from asynckv import DecodeLedger, PrefillLedger, PrefillRanks, configure_logging
from asynckv.core.types import Endpoint
from asynckv.embed.ledgers import Fetch
from asynckv.errors import AsyncKVError, LocalProtocolError
from asynckv.scheduler import PieceSizes
from asynckv.tools.proxy.limits import Limits
from asynckv.tools.proxy.router import Router
from asynckv.tools.proxy.server import COMPLETIONS, Refused, errors_as_json, serving
from tests.lab.fleet import Fleet, Lost, Process
from tests.lab.ticket_rank import LEASE, NUM_TOKENS, packed, unpacked

MOST_TOKENS, STEP_S, FORWARD_S = 160, 0.003, 0.03
LIMITS: Any = {"health_s": 0.2, "prefill_s": 8.0, "drain_s": 0.5}
CLIENTS, PAUSE_S, MORE, PATIENCE_S = 4, 0.02, 5, 60.0


class Proxy:
    """The router, as a process."""

    def __init__(self, *, prefill: str, decode: str, **limits: Any) -> None:
        configure_logging("error")
        self._serving = serving(Router([prefill], [decode], Limits(**limits)).app(), "127.0.0.1", 0, 1.0)

    async def __aenter__(self) -> Self:
        self._url = await self._serving.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serving.__aexit__(None, None, None)

    def address(self) -> str:
        return self._url


class Scheduler:
    """One engine: decides for all of its ranks, step by step, and answers the router."""

    ledger: PrefillLedger | DecodeLedger

    def __init__(self, fleet: Fleet, role: str, tp_size: int, seed: int, block_size: int = 16, chunk: int = 0) -> None:
        self.block_size, self.chunk = block_size, chunk
        self.role, self.rng, self.counts = role, random.Random(f"{seed}{role}"), Counter[str]()
        self.ranks: list[Process | None] = [None] * tp_size
        self.free = list(range(NUM_TOKENS // block_size))
        self._fleet, self._numbers, self._joining = fleet, itertools.count(), dict[int, Any]()
        self._works: list[tuple[tuple[str, int, list[int], int, int], asyncio.Future[list[Any]]]] = []
        self._stepped, self._tasks = asyncio.Event(), set[asyncio.Task[None]]()

    async def __aenter__(self) -> Self:
        await asyncio.gather(*map(self._start, range(len(self.ranks))))
        self.begin([self._joining.pop(rank) for rank in range(len(self.ranks))])
        app = web.Application(middlewares=[errors_as_json])
        app.router.add_post(COMPLETIONS[0], self._complete)
        app.router.add_get("/health", self._health)
        self._serving = serving(app, "127.0.0.1", 0, 1.0)
        self.url = await self._serving.__aenter__()
        self._spawn(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serving.__aexit__(None, None, None)
        for task in self._tasks:
            task.cancel()

    # -- steps -------------------------------------------------------------------------------------

    async def _start(self, rank: int) -> None:
        name = f"{self.role}{rank}"
        sizes: Any = {"tp_rank": rank, "tp_size": len(self.ranks), "block_size": self.block_size}
        process = await self._fleet.start(name, "tests.lab.ticket_rank:Rank", name=self.role, **sizes)
        self._joining[rank] = msgspec.convert(await process.ask("endpoint", PATIENCE_S), Endpoint)
        self.ranks[rank] = process

    def _spawn(self, work: Any) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        while True:
            for rank in list(self._joining):
                self.joined(rank, self._joining.pop(rank))
            works, self._works = self._works, []
            orders, told = packed(list(self.ledger.take_orders())), dict[int, list[Any]]()
            alive = {rank: process for rank, process in enumerate(self.ranks) if process is not None}
            asked = [each.ask("step", orders=orders, works=[work for work, _ in works]) for each in alive.values()]
            for rank, answer in zip(alive, await asyncio.gather(*asked, return_exceptions=True), strict=True):
                if isinstance(answer, Lost):
                    self.ranks[rank] = None
                    self.ledger.rank_died(rank)
                    self._spawn(self._start(rank))
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    self.ledger.update(rank, unpacked(answer[0]))
                    told[rank] = answer[1]
            for i, (_, done) in enumerate(works):
                is_whole = len(told) == len(self.ranks)
                done.set_result([each[i] for each in told.values()] if is_whole else [])
            self.act()
            self._stepped.set()
            self._stepped = asyncio.Event()
            await asyncio.sleep(STEP_S)

    async def do(self, what: str, number: int, blocks: list[int], tokens: int, first: int = 0) -> list[Any]:
        """Have all ranks do something in the next step, even if the caller is cancelled.

        Raises:
            Refused: A rank was lost.
        """
        self._works.append(((what, number, blocks, tokens, first), done := asyncio.get_running_loop().create_future()))
        try:
            found: list[Any] = await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])
            raise
        if not found:
            raise Refused(500, "a rank was lost")
        return found

    async def take(self, count: int) -> list[int]:
        while len(self.free) < count:
            await self._stepped.wait()
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give(self, blocks: Sequence[int | None]) -> None:
        """Take blocks back, and have them overwritten before they are used again."""
        self.free += (given := [block for block in blocks if block is not None])
        self._works.append((("poison", 0, given, 0, 0), asyncio.get_running_loop().create_future()))

    async def left(self) -> dict[str, Any]:
        """Return what is not free, or known to the ledger or a rank."""
        found: dict[str, Any] = {"requests": len(self.ledger), "blocks": NUM_TOKENS // self.block_size - len(self.free)}
        for process in self.ranks:
            found |= await process.ask("left") if process is not None else {"lost": 1}
        return {name: count for name, count in found.items() if count}

    # -- what a side does of its own ---------------------------------------------------------------

    def begin(self, endpoints: list[Endpoint]) -> None:
        raise NotImplementedError

    def joined(self, rank: int, endpoint: Endpoint) -> None:
        raise NotImplementedError

    def act(self) -> None:
        raise NotImplementedError

    async def serve(self, request_id: str, number: int, tokens: int, params: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _complete(self, request: web.Request) -> web.Response:
        asked = await request.json()
        prompt, params = asked["prompt"], asked.get("kv_transfer_params") or {}
        if not all(self.ranks):
            raise Refused(503, "a rank is being restarted")
        try:
            told = await self.serve(f"{self.role}-{next(self._numbers)}", prompt[0], len(prompt), params)
        except AsyncKVError as exc:
            raise Refused(500, str(exc)) from exc
        choice = {"index": 0, "text": "", "finish_reason": "length"}
        return web.json_response({"object": "text_completion", "choices": [choice], "kv_transfer_params": told})


class Prefill(Scheduler):
    ledger: PrefillLedger

    def begin(self, endpoints: list[Endpoint]) -> None:
        self.ledger = PrefillLedger(PrefillRanks(self.role, endpoints, lease=LEASE))

    def joined(self, rank: int, endpoint: Endpoint) -> None:
        self.ledger.rank_joined(rank, endpoint)

    def act(self) -> None:
        for loan in self.ledger.take_free():
            self.give(loan.groups[0][1])

    async def serve(self, request_id: str, number: int, tokens: int, params: dict[str, Any]) -> dict[str, Any]:
        if not params.get("do_remote_decode"):  # given back
            self.ledger.withdraw(params["asynckv"]["request_id"])
            return {}
        ticket, blocks, lent = params.get("asynckv_ticket", ""), list[int](), None
        ticket = ticket if ticket and self.ledger.take_ticket(ticket) else ""
        self.counts.update(prefills=1, tickets=bool(ticket))
        try:
            is_done, ends_at = False, self.rng.randint(1, 2 * tokens) if self.rng.random() < 0.4 else tokens
            while not is_done:
                blocks = await self.take(-(-tokens // self.block_size))
                if not (is_done := await self._compute(request_id, number, blocks, tokens, ticket, ends_at)):
                    self.ledger.end_pieces(ticket)
                    self.give(blocks)
                    blocks, ends_at = [], tokens
                    self.counts["preempted"] += 1
            lent = self.ledger.lend(request_id, [(0, blocks)], tokens, ticket=ticket)
        finally:
            if lent is None:
                self.give(blocks)
                if ticket:
                    self.ledger.withdraw_ticket(ticket)
        return {"do_remote_prefill": True, "asynckv": lent, "asynckv_offers": True}

    async def _compute(
        self, request_id: str, number: int, blocks: list[int], tokens: int, ticket: str, ends_at: int
    ) -> bool:
        """Compute a prompt, and lend what is finished meanwhile; return False if it was preempted."""
        if not self.chunk or not ticket:
            await asyncio.sleep(self.rng.uniform(0, FORWARD_S))
            await self.do("fill", number, blocks, tokens)
            return True
        size, sizes = self.block_size, PieceSizes()
        for begin in range(0, tokens, self.chunk):
            end = min(begin + self.chunk, tokens)
            await self.do("fill", number, blocks[begin // size : -(-end // size)], end, begin)
            if end >= ends_at and end < tokens:
                return False
            is_followed = ticket in self.ledger.followed
            if (piece := sizes.take(end // size * size, tokens, is_followed=is_followed)) is not None and end < tokens:
                ids = blocks[piece.start // size : piece.stop // size]
                self.ledger.lend_piece(request_id, ticket, [(piece.start, ids)], piece.stop)
                self.counts["pieces"] += 1
        return True


class Decode(Scheduler):
    ledger: DecodeLedger

    def begin(self, endpoints: list[Endpoint]) -> None:
        self.ledger = DecodeLedger(len(endpoints))
        self._ends: dict[str, asyncio.Future[Fetch]] = {}

    def joined(self, rank: int, endpoint: Endpoint) -> None:
        self.ledger.rank_joined(rank)

    def act(self) -> None:
        outcome = self.ledger.take_outcome()
        for fetch in (*outcome.received, *outcome.failed):
            self._ends.pop(fetch.request_id).set_result(fetch)
        for fetch in outcome.free:
            self.give(fetch.groups[0][1])

    async def serve(self, request_id: str, number: int, tokens: int, params: dict[str, Any]) -> dict[str, Any]:
        follow, ledger, what = params.get("asynckv_follow"), self.ledger, "in_turn"
        if follow is not None:
            what, known = "followed", ledger.follow(request_id, follow, takes_pieces=bool(self.chunk))
        elif params.get("do_remote_prefill"):
            known = ledger.announce(request_id, params["asynckv"])
        else:
            what, known = "computed", None
        if known is None and what != "computed":
            raise Refused(500, "was read before")
        blocks, end = list[int](), asyncio.get_running_loop().create_future()
        count = -(-tokens // self.block_size)
        try:
            while known is not None and ledger.may_pull(request_id) is None:
                if known.piece is not None and not blocks and len(self.free) >= 2 * count:
                    blocks = await self.take(count)
                    ledger.start_early(request_id, [(0, blocks)])
                    self._ends[request_id] = end
                    self.counts["early"] += 1
                await self._stepped.wait()
            blocks = blocks or await self.take(count)
            if known is None:
                await self.do("fill", number, blocks, tokens)
            elif not ledger.may_pull(request_id):
                raise next(iter(known.errors.values()), LocalProtocolError("may not be pulled"))
            else:
                ledger.pull(request_id, [(0, blocks)])
                self._ends[request_id] = end
                await asyncio.wait([end])
                if errors := end.result().errors:
                    raise next(iter(errors.values()))
            found = await self.do("check", number, blocks, tokens)
        except AsyncKVError as exc:
            self.counts[f"{what} {getattr(exc, 'reason', type(exc).__name__)}"] += 1
            raise
        finally:
            is_pulled = self._ends.pop(request_id, None) is not None
            ledger.cancel(request_id)
            if not is_pulled and not (end.done() and end.result().errors):
                self.give(blocks)  # else the ledger tells when nothing can write them any more
        self.counts.update({what: 1, "compared": sum(n for n, _ in found), "wrong": sum(n for _, n in found)})
        return {"asynckv_follows": True} if params.get("asynckv_ask") else {}


class Service:
    """Both engines, the router and its clients."""

    def __init__(self, fleet: Fleet, prefill: Scheduler, decode: Scheduler, seed: int) -> None:
        self.fleet, self.prefill, self.decode, self.rng = fleet, prefill, decode, random.Random(seed)
        self.counts, self._numbers = Counter[str](), itertools.count(1)
        self.router: Process | None = None

    async def start_router(self) -> None:
        urls: Any = {"prefill": self.prefill.url, "decode": self.decode.url}
        self.router = await self.fleet.start("router", "tests.lab.tickets:Proxy", **urls, **LIMITS)
        self._url: str = await self.router.ask("address", PATIENCE_S)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        """Send one request; some clients leave."""
        number = next(self._numbers)
        body = {"prompt": [number] * self.rng.randint(2, MOST_TOKENS), "max_tokens": 1}
        leaves_s = self.rng.uniform(0, 2 * FORWARD_S) if self.rng.random() < 0.2 else PATIENCE_S
        try:
            async with asyncio.timeout(leaves_s), session.post(self._url + COMPLETIONS[0], json=body) as answer:
                await answer.read()
                self.counts[str(answer.status)] += 1
        except TimeoutError:
            self.counts["left" if leaves_s < PATIENCE_S else "unanswered"] += 1
        except aiohttp.ClientError:
            self.counts["router_lost"] += 1
            await asyncio.sleep(5 * PAUSE_S)

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        is_over = False

        async def client() -> None:
            while not is_over:
                await self._ask(session)
                await asyncio.sleep(PAUSE_S)

        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())
            yield
            is_over = True

    async def more(self) -> None:
        """Wait until so many more requests were followed."""
        goal = self.decode.counts["followed"] + MORE
        async with asyncio.timeout(PATIENCE_S):
            while self.decode.counts["followed"] < goal:  # noqa: ASYNC110 - nothing announces a count
                await asyncio.sleep(0.01)

    async def hurt(self, victims: Sequence[str]) -> None:
        """Kill a rank of a side, or the router, at random moments, and wait each time until all serve again."""
        await self.more()
        for victim in victims:
            await asyncio.sleep(self.rng.uniform(0, 0.05))
            side = {"prefill": self.prefill, "decode": self.decode}.get(victim)
            process = self.router if side is None else self.rng.choice(side.ranks)
            assert process is not None
            await process.kill()
            if side is None:
                await self.start_router()
            await self.more()

    async def settle(self) -> dict[str, Any]:
        """Wait until nothing is left, and return what is left after all."""
        left: dict[str, Any] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                sides = self.prefill, self.decode
                while left := {each.role: it for each in sides if (it := await each.left())}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        return left


async def run(
    prefill: int,
    decode: int,
    victims: Sequence[str],
    *,
    seed: int = 0,
    chunk: int = 0,
    sizes: tuple[int, int] = (16, 16),
) -> dict[str, Any]:
    """Serve clients by engines of so many ranks while ranks and the router are killed; return what was found.

    Args:
        chunk: Tokens that the prefill engine computes in a step; 0: whole prompts at once, and no head starts.
        sizes: Tokens per block of both engines.
    """
    async with (
        Fleet() as fleet,
        Prefill(fleet, "prefill", prefill, seed, sizes[0], chunk) as lends,
        Decode(fleet, "decode", decode, seed, sizes[1], chunk) as reads,
    ):
        service = Service(fleet, lends, reads, seed)
        await service.start_router()
        async with service.load():
            await service.hurt(victims)
        left, pieces = await service.settle(), Counter[str]()
        for rank in [*lends.ranks, *reads.ranks] if chunk else ():
            if rank is not None:
                pieces.update(await rank.ask("pieces"))
        counts = {"prefill": lends.counts, "decode": reads.counts, "pieces": pieces}
        return {"left": left, "clients": dict(service.counts), **counts}
