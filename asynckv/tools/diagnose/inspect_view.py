"""Shows on one screen what engines said: who holds these blocks, since when, waiting for whom.

Every text comes from a stranger: it is escaped and cut before it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from asynckv.arguments import without_control
from asynckv.core.account import Account
from asynckv.core.inspect import RequestStatus
from asynckv.tools.console import size
from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.inspect_join import Joined, Other, join, unrepeated

MOST_PEERS = 12
MOST_LETTERS = 200
MOST_IDS = 64
MOST_OTHERS = 8
MOST_REFUSALS = 4
MOST_NEAR = 20
NOT_STORED = "offload.not_stored."

AGE, IS, NAME = 7, 11, 15
"""Widths of columns."""

BAD, FAINT, STRONG = "bold red", "dim", "bold"
UNUSUAL = {"retired", "quarantined", "lapsed", "ending", "draining", "unclaimed", "suspect", "gone", "notifying"}


def span(seconds: float | None) -> str:
    """Write a duration for people."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if abs(seconds) < 0.0995:
        return f"{1e3 * seconds:.1f} ms" if abs(seconds) < 0.00995 else f"{1e3 * seconds:.0f} ms"
    if abs(seconds) < 9.95:
        return f"{seconds:.1f} s"
    if abs(seconds) < 120:
        return f"{seconds:.0f} s"
    if abs(seconds) < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if abs(seconds) < 172_800 else f"{seconds / 86_400:.0f} d"


def text(value: str, style: str = "") -> Text:
    """Make a stranger's text safe to show."""
    shown = without_control(value[: MOST_LETTERS + 1])
    return Text(shown if len(shown) <= MOST_LETTERS else shown[: MOST_LETTERS - 4] + " ...", style=style)


def overview(answers: Sequence[Answer], top: int, before: Sequence[Answer] = ()) -> RenderableType:
    """Show all engines, and the oldest requests of them all; `before` is what the engines said a moment earlier."""
    joined = join(answers, before)
    parts: list[RenderableType] = [line for answer in answers for line in _engine(answer)]
    if joined:
        shown = unrepeated(joined)[:top]
        parts += [Text(), *_requests(shown)]
        left = sum(count.number for answer in answers for count in answer.account.counts) - len(shown)
        left -= len({id(other.found) for each in shown for other in each.others if other.found is not None})
        if left > 0:
            parts.append(Text(f"... and {left:,} more: --top N shows more of them, --request ID a certain one", FAINT))
    elif any(not answer.error for answer in answers):
        is_silent = any(answer.error and not answer.is_left_behind for answer in answers)
        only = " by the engines that answered; what the others hold is unknown" if is_silent else ""
        parts.append(Text(f"nothing is lent, announced or pulled{only}"))
    return _group(parts)


def one_request(
    answers: Sequence[Answer], request_id: str, near: Sequence[str] = (), before: Sequence[Answer] = ()
) -> RenderableType:
    """Show all that is known of one request; `near` are the ids that begin so, if there are several."""
    parts: list[RenderableType] = [line for answer in answers if answer.error for line in _engine(answer)]
    joined = join(answers, before)
    name = without_control(request_id[:MOST_LETTERS])
    for each in joined:
        parts += [*_details(each), Text()]
    if not joined:
        asked = sum(not answer.error for answer in answers)
        if near:
            parts.append(Text(f"{len(near):,} requests begin with '{name}':"))
            parts += [Text.assemble("  ", text(each)) for each in near[:MOST_NEAR]]
            parts += [Text(f"  ... and {len(near) - MOST_NEAR:,} more", FAINT)] if len(near) > MOST_NEAR else []
            return _group(parts)
        parts += [
            Text(f"none of the {asked} that answered knows of '{name}': it has ended, or was never here"),
            Text("what became of it is in the logs of both sides:"),
            Text(f"  asynckv timeline LOGS --request {name}"),
            Text(f"  asynckv leaks LOGS --request {name}"),
        ]
    return _group(parts)


def _group(parts: Sequence[RenderableType]) -> RenderableType:
    return Group(*(_Hung(each) if isinstance(each, Text) and each.plain else each for each in parts))


@dataclass(frozen=True)
class _Hung:
    """A line whose continuation, on a narrow screen, is indented by more than its beginning."""

    line: Text
    hang: int = 4

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = len(self.line.plain) - len(self.line.plain.lstrip(" "))
        rest = min(indent + self.hang, options.max_width // 2)
        indent = min(indent, rest)
        left = self.line[len(self.line.plain) - len(self.line.plain.lstrip(" ")) :]
        first = next(iter(left.wrap(console, options.max_width - indent, overflow="fold")), Text())
        first.rstrip()
        yield Text.assemble(" " * indent, first)
        left = left[len(first.plain) :]
        left = left[len(left.plain) - len(left.plain.lstrip(" ")) :]
        for part in left.wrap(console, options.max_width - rest, overflow="fold") if left else ():
            part.rstrip()
            yield Text.assemble(" " * rest, part)


# -- an engine ---------------------------------------------------------------------------------------


def _engine(answer: Answer) -> Iterator[Text]:
    if answer.error:
        yield Text.assemble(text(answer.rank, BAD), "  ", text(answer.address) if answer.account.rank else "")
        yield Text.assemble("  ", Text(without_control(answer.error[:2000]), BAD))
        return
    gauges, account = answer.gauges, answer.account
    facts = account.facts
    life = facts.life or "?"
    where = f"pid {facts.pid} on {facts.host}" if facts.pid else ""
    closed = f"takes nothing new: {account.closed_as}" if account.closed_as else ""
    listens = f"listens on {facts.address}" if facts.address and facts.address != answer.address else ""
    versions = f"asynckv {facts.version}" + (f", NIXL {facts.planes['nixl']}" if "nixl" in facts.planes else "")
    yield Text.assemble(
        text(answer.rank, STRONG),
        "  ",
        text(life, "green" if life == "running" else BAD),
        f" for {span(facts.uptime_s)}  ",
        text(answer.address),
    )
    yield Text.assemble("  ", text(", ".join(filter(None, (where, listens, versions, closed))), FAINT))
    yield Text.assemble("  ", *_join([*_budgets(account, gauges), _lag(account)]))
    yield from _tiers(account, gauges)
    phases: dict[str, list[Text]] = {}
    for count in account.counts:
        style = "yellow" if count.phase in UNUSUAL else ""
        oldest = f" (oldest {span(count.oldest_s)})"
        phases.setdefault(count.kind, []).append(
            Text.assemble(text(count.phase, style), f" {count.number:,}", Text(oldest, FAINT))
        )
    for kind, words in phases.items():
        yield Text.assemble("  ", text(kind, STRONG), ": ", *_join(words))
    yield from _peers(account)


def _budgets(account: Account, gauges: Mapping[str, int]) -> Iterator[Text]:
    used, most = account.budgets.get("blocks_held", (0, 0))
    yield Text(f"blocks held {used:,} of {most:,}")
    for name, word in (("blocks_quarantined", "quarantined"), ("transfers_in_doubt", "transfers in doubt")):
        if gauges.get(name):
            yield Text(f"{gauges[name]:,} {word}", BAD)
    for name, word in (("pulls_reading", "reading"), ("pulls_queued", "queued"), ("parked", "parked")):
        used, most = account.budgets.get(name, (0, 0))
        if used:
            yield Text(f"{word} {used:,} of {most:,}", "yellow" if used >= most else "")
    used, most = account.budgets.get("bytes_in_flight", (0, 0))
    if used:
        yield Text(f"in flight {size(used)} of {size(most)}")
    if account.num_readers:
        yield Text(f"readers met {account.num_readers:,}")


def _tiers(account: Account, gauges: Mapping[str, int]) -> Iterator[Text]:
    """Show what is kept outside of the accelerator, where, how full it is, and what is amiss with it."""
    if "offload.limit_bytes.host" not in gauges:
        return
    count, planes = account.facts.counters.get, account.facts.planes
    looked_up, found = count("offload.tokens.looked_up", 0), count("offload.tokens.found", 0)
    words = [Text(f"stores and loads under way: {jobs:,}")] if (jobs := gauges.get("offload.jobs")) else []
    words.append(
        Text(f"found {found:,} of {looked_up:,} tokens" + (f" ({found / looked_up:.0%})" if looked_up else ""))
    )
    if missed := count("offload.tokens.missed", 0):
        words.append(Text(f"{missed:,} of them missed by loads", "yellow"))
    if left_out := sum(number for name, number in account.facts.counters.items() if name.startswith(NOT_STORED)):
        words.append(Text(f"{left_out:,} blocks not stored", "yellow"))
    yield Text.assemble("  ", Text("offload", STRONG), ": ", *_join(words))
    if off := planes.get("offload.off"):
        yield Text.assemble("    ", text(f"nothing is stored or loaded: {off}", BAD))
    for tier in ("host", "file", "others"):
        blocks = gauges.get(f"offload.kept.{tier}")
        if blocks is None:
            continue
        used, most = gauges.get(f"offload.kept_bytes.{tier}", 0), gauges.get(f"offload.limit_bytes.{tier}")
        of = f" of {size(most)} ({used / most:.0%})" if most else ""
        words = [Text(f"{blocks:,} blocks, {size(used)}{of}")]
        if tier == "host" and (waiting := gauges.get("offload.to_write_back")):
            words.append(Text(f"{waiting:,} to be written back"))
        if evicted := count(f"offload.evicted.{tier}", 0):
            words.append(Text(f"{evicted:,} evicted"))
        if tier == "file":
            words.append(text(planes.get("offload.folder", "")))
        if tier == "others":
            words.append(Text("stored by ranks of another geometry, only read"))
        yield Text.assemble("    ", Text(f"{tier:<6}", FAINT), " ", *_join(words))
        if tier == "file" and not off and not gauges.get("offload.writes.file"):
            what = "takes no more blocks" if gauges.get("offload.reads.file") else "is off"
            cause = planes.get("offload.files_off", "")
            yield Text.assemble(" " * 11, text(what + (f": {cause}" if cause else ""), BAD))


def _lag(account: Account) -> Text:
    lag = account.facts.lag
    away = f", away {lag.was_away:,} time{'s' if lag.was_away > 1 else ''}" if lag.was_away else ""
    return Text(f"loop late {span(lag.last_s)}, at most {span(lag.most_s)}{away}", "yellow" if away else "")


def _peers(account: Account) -> Iterator[Text]:
    """Name the ranks that are read from; only those that are not simply ready have a line."""
    if not account.num_peers:
        return
    words = [
        text(f"{state} {number:,}", "yellow" if state in UNUSUAL else "") for state, number in account.num_peers.items()
    ]
    yield Text.assemble("  ", Text("peers", STRONG), ": ", *_join(words))
    notable = [peer for peer in account.peers if peer.state not in ("ready", "new") or peer.cause or peer.is_draining]
    for peer in notable[:MOST_PEERS]:
        heard = f", heard {span(peer.heard_s)} ago" if peer.heard_s is not None else ", never heard"
        draining = ", draining" if peer.is_draining else ""
        cause = f": {peer.cause}" if peer.cause else ""
        yield Text.assemble(
            "    ",
            text(peer.rank),
            " ",
            text(peer.state, "yellow"),
            text(f"{heard}{draining}, {peer.pulls:,} requests{cause}"),
        )
    if len(notable) > MOST_PEERS:
        yield Text(f"    ... and {len(notable) - MOST_PEERS} more", FAINT)


def _join(words: Sequence[Text]) -> list[Text]:
    return [part for n, word in enumerate(words) for part in ((Text(" · ", FAINT), word) if n else (word,))]


# -- requests ----------------------------------------------------------------------------------------


def _requests(joined: Sequence[Joined]) -> Iterator[RenderableType]:
    """Show each request in a line, and in what follows whom it waits for and what that one says."""
    yield _Hung(Text(f"{'oldest':>{AGE}}  {'left':>{AGE}}  {'blocks':>6}  {'is':<{IS}}  request, held by", STRONG))
    for each in joined:
        request = each.request
        figures = Text.assemble(
            f"{span(request.age_s):>{AGE}}  {span(request.left_s):>{AGE}}  {request.blocks:>6,}  ",
            text(f"{request.state:<{IS}}", "yellow" if request.state in UNUSUAL else ""),
        )
        yield _Row(figures, text(request.request_id, STRONG), text(each.rank))
        lines = [Text(without_control(request.waits[: 2 * MOST_LETTERS]))] if request.waits else []
        lines += _refusals(request)
        lines += filter(None, (_other(other) for other in each.others[:MOST_OTHERS]))
        for line in lines:
            yield _below(line)


def _below(line: Text) -> RenderableType:
    """Put a line below the request that it belongs to."""
    return _Hung(Text.assemble(" " * (2 * AGE + 4), line), hang=2)


@dataclass(frozen=True)
class _Row:
    """A request in one line if there is room for it, and in two or three if there is not."""

    figures: Text
    request: Text
    rank: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text.assemble(self.figures, "  ", self.request)
        whole = Text.assemble(line, "  ", self.rank)
        if whole.cell_len <= options.max_width:
            yield whole
            return
        if line.cell_len <= options.max_width:
            yield line
        else:
            figures = self.figures.copy()
            figures.rstrip()
            yield _Hung(figures)
            # Nearer to the edge rather than broken: an id is to be copied.
            indent = max(min(2 * AGE + 4, options.max_width - self.request.cell_len), 0)
            yield _Hung(Text.assemble(" " * indent, self.request), hang=2)
        yield _below(Text.assemble("held by ", self.rank))


def _refusals(request: RequestStatus) -> Iterator[Text]:
    """Say which messages about it were turned down."""
    for ago, what, reason, who, detail in request.refused[:MOST_REFUSALS]:
        words = f"! a {what} of {who} was refused {span(ago)} ago: {reason}" + (f", {detail}" if detail else "")
        yield text(words, BAD)


def _other(other: Other) -> Text | None:
    """Say in a line what the other side says, if that adds anything."""
    parts = [text(other.verdict, BAD if other.is_amiss else "")] if other.verdict and other.is_known else []
    if (found := other.found) is not None:
        kind = "" if found.kind in (found.state, "pull") else f"{found.kind} "
        parts.append(text(f"{kind}{found.request_id} is {found.state} there for {span(found.state_s)}"))
    if not parts:
        return None
    return Text.assemble(
        "! " if other.is_amiss else "", text("" if other.rank == "*" else f"{other.rank}: "), *_join(parts)
    )


def _details(each: Joined) -> Iterator[RenderableType]:
    """Show one request of one rank with all that is known of it."""
    request, hold = each.request, each.hold
    yield _Hung(Text.assemble(text(each.rank, STRONG), "  ", text(f"{request.kind} {request.request_id}", STRONG)))
    left = f", {span(request.left_s)} left at most" if request.left_s is not None else ""
    rows = [
        ("state", f"{request.state} for {span(request.state_s)}, {span(request.age_s)} old{left}"),
        ("waits", request.waits),
        ("prefill request", f"{request.prefill_request_id or '-'}, sequence {request.sequence}"),
        ("pull", f"{request.pull_id}, attempt {request.attempt}" if request.pull_id else ""),
    ]
    if hold is not None:
        rows.append(("blocks", f"{request.blocks:,} held as {hold.reason} for {span(hold.held_s)}"))
        for group, ids in hold.blocks.items():
            more = f" ... ({len(ids):,} told)" if len(ids) > MOST_IDS else ""
            rows.append((f"  group {group}", ", ".join(map(str, ids[:MOST_IDS])) + more))
    for name, value in rows:
        if value:
            shown = Text(without_control(value[:4000]))
            yield _Hung(Text.assemble(Text(f"  {name:<{NAME}}", FAINT), "  ", shown), hang=NAME + 2)
    for line in _refusals(request):
        yield _Hung(Text.assemble("  ", line))
    for other in each.others:
        said = other.said
        words = []
        if said is not None:
            words.append(text(said.state, "yellow" if said.state in UNUSUAL else ""))
            if said.granted_s is not None:
                words.append(Text(f"grant runs for {span(said.granted_s)} more"))
            words.append(Text(f"heard {span(said.heard_s)} ago" if said.heard_s is not None else "never heard"))
            if said.bytes_planned:
                words.append(Text(f"{size(said.bytes_read)} of {size(said.bytes_planned)} read"))
            if said.transfers:
                words.append(Text(f"{said.transfers} transfers"))
            words += [text(value) for value in (said.pull_id, said.address) if value]
        yield _Hung(Text.assemble("  ", text(other.rank, STRONG), "  ", *_join(words)))
        if (words_of := _other(other)) is not None:
            yield _Hung(Text.assemble("    ", words_of))
    for at, event in request.history:
        yield _Hung(Text.assemble(f"    {span(at):>{AGE}}  ", text(event)), hang=AGE + 2)
