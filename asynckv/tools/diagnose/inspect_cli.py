"""`asynckv inspect`: asks running engines, and shows what they say."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from asynckv.tools.diagnose.ask import Answer, Asker

EPILOG = """
[bold]Examples[/bold]

  asynckv inspect 10.0.0.1:5555 10.0.0.2:5555

  asynckv inspect /run/asynckv --watch

  asynckv inspect tcp://10.0.0.1:5555 --request cmpl-17 --follow

  asynckv inspect /run/asynckv --json - | jq '.engines[] | {rank, counts}'

[bold]Exit status[/bold]  0 all answered, 1 one did not or refused, or --request names none or several,
2 bad input, 130 Ctrl-C, 141 nobody reads the output any more
"""

ASK, SHOW = "Asking", "Showing"
MAX_TOP = 4096
WATCH_S = 2.0
MAX_NAMES = 4
"""Ids of a prefill side that one request of a decode side may have had."""

AGAIN_S = 0.5
"""What one side does not know of is asked for again after so long: a message has arrived by then."""

FULL, WATCHED = 256, 64
"""Requests that are asked for at least, once and again and again, so that the sides can be joined."""


def inspect(
    addresses: Annotated[
        list[str],
        typer.Argument(
            help="Engines: host:port (#key behind it, if it has one), a socket, or a directory of sockets.",
            show_default=False,
        ),
    ],
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Ask again every 2 seconds, or as many as are given behind it.", rich_help_panel=SHOW
        ),
    ] = False,
    top: Annotated[int, typer.Option(help="How many of the oldest requests to show.", rich_help_panel=SHOW)] = 20,
    request: Annotated[
        str,
        typer.Option(
            help="All that is known of one request, by either side's id or its beginning.",
            metavar="ID",
            rich_help_panel=SHOW,
        ),
    ] = "",
    json: Annotated[
        str | None,
        typer.Option(
            help="Write JSON there; - for stdout, with --watch one document per line.",
            metavar="FILE",
            rich_help_panel=SHOW,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Ask the engines too that these read from.", rich_help_panel=ASK)
    ] = False,
    keys: Annotated[
        Path | None,
        typer.Option(help="Who asks, for engines with keys: NAME.key_secret.", metavar="FILE", rich_help_panel=ASK),
    ] = None,
    authorized: Annotated[
        Path | None,
        typer.Option(help="Directory with the *.key files of the engines.", metavar="DIR", rich_help_panel=ASK),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="How long an engine may take to answer.", metavar="SECONDS", rich_help_panel=ASK)
    ] = 5.0,
) -> None:
    """Ask running engines who holds which blocks, since when, and waiting for whom. Nothing is changed by it."""
    from asynckv.config import KeysConfig
    from asynckv.tools.diagnose.ask import Asker, targets
    from asynckv.tools.output import check_writable

    if (keys is None) is not (authorized is None):
        raise ConfigError("--keys and --authorized belong together: who asks, and whom it trusts")
    addresses, every_s = _interval(addresses) if watch else (addresses, 0.0)
    if not 1 <= top <= MAX_TOP:
        raise ConfigError(f"--top {top} is outside 1 ... {MAX_TOP}")
    if watch and json not in (None, "-"):
        raise ConfigError("--watch writes one document after the other: give --json -")
    check_writable("--json", json)
    pair = KeysConfig(secret=keys, authorized=authorized) if keys is not None and authorized is not None else None
    session = _Session(targets(addresses), addresses, request, max(top, WATCHED if watch else FULL), follow)
    status = asyncio.run(_run(session, Asker(pair, timeout), every_s, top, json))
    raise typer.Exit(status)


def _interval(given: list[str]) -> tuple[list[str], float]:
    """Take the seconds out that were written behind `--watch`: a number alone is no address."""
    seconds = [text for text in given if re.fullmatch(r"[0-9]+\.?[0-9]*", text)]
    addresses = [text for text in given if text not in seconds]
    if len(seconds) > 1 or not addresses:
        raise ConfigError("--watch takes one number of seconds, beside the addresses")
    every_s = float(seconds[0]) if seconds else WATCH_S
    if not 0.2 <= every_s <= 86_400:
        raise ConfigError(f"--watch {every_s:g} is outside 0.2 ... 86400 seconds")
    return addresses, every_s


def merged(before: Answer, after: Answer) -> Answer:
    """Put what an engine said of a request under one id to what it said under another."""
    if before.error or after.error:
        return before
    was, now = before.account, after.account
    known = {(each.kind, each.request_id, each.pull_id) for each in was.requests}
    requests = [each for each in now.requests if (each.kind, each.request_id, each.pull_id) not in known]
    names = {each.pull_id or each.request_id for each in requests}
    holds = [each for each in now.holds if (each.pull_id or each.request_id) in names]
    both = msgspec.structs.replace(was, requests=(*was.requests, *requests), holds=(*was.holds, *holds))
    return replace(before, account=both)


def _only(answer: Answer, request: str) -> Answer:
    """Leave out what waits for another attempt under other ids: an engine tells of that in any case."""
    facts = answer.account.facts
    mine = tuple(each for each in facts.retrying if each.request_id == request)
    facts = msgspec.structs.replace(facts, retrying=mine)
    return replace(answer, account=msgspec.structs.replace(answer.account, facts=facts))


class _Session:
    """What is asked again and again, and what is remembered from one time to the next."""

    def __init__(self, targets: list[str], given: Sequence[str], request: str, most: int, follow: bool) -> None:
        self.request = request
        self._targets, self.given, self._most, self._follow = targets, given, most, follow
        self.near: list[str] = []
        """Ids that begin with the one that was asked for and that nobody knows, if there are several."""
        self.before: list[Answer] = []
        """What was answered the time before: what one side does not know of has to be unknown to it twice."""
        self._known: dict[str, Answer] = {}
        """The last answer at each address: who it was that answers no more."""

    async def ask(self, asker: Asker) -> list[Answer]:
        """Ask everybody once, and again if one side does not know what the other speaks of."""
        from asynckv.tools.diagnose.inspect_join import has_doubts

        answers = await self._once(asker)
        if not self.before and has_doubts(answers):
            self.before = answers
            await asyncio.sleep(AGAIN_S)
            answers = await self._once(asker)
        return answers

    async def _once(self, asker: Asker) -> list[Answer]:
        self.near = []
        answers = await self._told(asker, self.request)
        if self.request and not any(answer.requests for answer in answers):
            near = await self._beginning_so(asker, [answer.address for answer in answers])
            if len(near) == 1:
                answers = await self._told(asker, near[0])
            else:
                self.near = near
        return [self._remembered(answer) for answer in answers]

    async def _told(self, asker: Asker, request: str) -> list[Answer]:
        answers = await asker.ask_all(self._all_targets(), most=self._most, request_id=request)
        if self._follow:
            asked = {answer.address for answer in answers}
            named = (peer.address for answer in answers for peer in answer.account.peers if peer.state != "gone")
            more = [each for each in dict.fromkeys(named) if each not in asked and each.startswith("tcp://")]
            answers += await asker.ask_all(more, most=self._most, request_id=request)
        if request:
            answers = await self._by_other_names(asker, [_only(answer, request) for answer in answers], request)
        return answers

    async def _beginning_so(self, asker: Asker, addresses: Sequence[str]) -> list[str]:
        """Look for ids that begin with what was asked for: a router's own id often is the beginning of an engine's.

        The two sides' ids of one request count once, by the prefill side's.
        """
        answers = await asker.ask_all(addresses, most=MAX_TOP)
        found = {
            each.prefill_request_id or each.request_id
            for answer in answers
            for each in answer.requests
            if each.request_id.startswith(self.request) or each.prefill_request_id.startswith(self.request)
        }
        return sorted(found)

    async def _by_other_names(self, asker: Asker, answers: list[Answer], request: str) -> list[Answer]:
        """Ask for the request by the prefill side's id too, which the decode side has told."""
        names = {each.prefill_request_id for answer in answers for each in answer.requests} - {request, ""}
        for name in sorted(names)[:MAX_NAMES]:
            again = await asker.ask_all([x.address for x in answers], most=self._most, request_id=name)
            answers = [merged(before, after) for before, after in zip(answers, again, strict=True)]
        return answers

    def _all_targets(self) -> list[str]:
        """Look again what is in the directories: processes come and go."""
        from asynckv.tools.diagnose.ask import targets

        try:
            return targets(self.given)
        except ConfigError:
            return self._targets

    def _remembered(self, answer: Answer) -> Answer:
        if not answer.error:
            self._known[answer.address] = answer
        elif not answer.account.rank and (known := self._known.get(answer.address)) is not None:
            return replace(answer, account=type(answer.account)(rank=known.rank))
        return answer


async def _run(session: _Session, asker: Asker, every_s: float, top: int, json: str | None) -> int:
    loop = asyncio.get_running_loop()
    async with asker:
        if not every_s:
            answers = await session.ask(asker)
            if json is not None:
                _write(answers, session.before, json, is_line=False)
            if json != "-":
                _print(_shown(session, answers, top))
            is_unknown = bool(session.request) and not any(answer.requests for answer in answers)
            return int(is_unknown or any(x.error and not _is_leftover(session, x) for x in answers))
        from rich.console import Console, Group
        from rich.live import Live
        from rich.rule import Rule

        console = Console()
        live = Live(console=console, auto_refresh=False, screen=False, vertical_overflow="crop")
        is_live = console.is_terminal and not json
        if is_live:
            live.start()
        try:
            while True:
                began = loop.time()
                answers = await session.ask(asker)
                if json is not None:
                    _write(answers, session.before, json, is_line=True)
                elif is_live:
                    tiers = sum("offload.jobs" in answer.gauges for answer in answers)
                    room = max((console.height - 6 * len(answers) - 3 * tiers - 3) // 3, 3)
                    live.update(_shown(session, answers, min(top, room)), refresh=True)
                else:
                    at = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
                    _print(Group(Rule(at, style="dim", characters="-"), _shown(session, answers, top)))
                session.before = answers
                await asyncio.sleep(max(began + every_s - loop.time(), 0.0))
        finally:
            live.stop()


def _is_leftover(session: _Session, answer: Answer) -> bool:
    """A socket that was found in a directory, of a process that has ended: nobody asked for that one."""
    return answer.is_left_behind and answer.address not in session.given


def _shown(session: _Session, answers: Sequence[Answer], top: int) -> RenderableType:
    from asynckv.tools.diagnose.inspect_view import one_request, overview

    if session.request:
        return one_request(answers, session.request, session.near, session.before)
    return overview(answers, top, session.before)


def _print(shown: RenderableType) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(shown)
    console.file.flush()


def _write(answers: Sequence[Answer], before: Sequence[Answer], target: str, *, is_line: bool) -> None:
    from asynckv.tools.diagnose.inspect_join import as_json
    from asynckv.tools.output import write, write_json

    document = as_json(answers, before)
    if is_line:
        write("--json", target, msgspec.json.encode(document).decode() + "\n")
    else:
        write_json(target, document)
