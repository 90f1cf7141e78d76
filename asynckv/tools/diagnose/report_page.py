"""A report as one HTML page: what an operator reads first, then pictures, then tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from asynckv.tools import frame
from asynckv.tools.diagnose import report_bench as benches
from asynckv.tools.diagnose import report_plots as plots
from asynckv.tools.diagnose.colours import PHASES, WITHIN
from asynckv.tools.diagnose.presence import DEFAULT_LEASE_S
from asynckv.tools.diagnose.report_text import (
    EARLY_S,
    GAP,
    Card,
    bytes_text,
    count_text,
    duration,
    ended_early,
    number,
    safe,
    share,
    time_text,
    unseen_text,
    verdict,
)
from asynckv.tools.diagnose.summary_model import Engine, Offload, Pair, Summary

__all__ = ["make"]

MOST_ROWS = 100
"""Of one table; the report as JSON has all."""

MOST_BENCHES = 3
"""Runs of the benchmark that are told one by one at the top."""

MOST_LATE = 10
"""Requests with late blocks that are told one by one."""

MOST_UNSEEN, MOST_NAMED = 4, 8
"""Processes with missing logs that are told one by one, and that are named."""

UNKNOWN = "–"
WORDS = {"lease": "lent", "pull": "pulled"}


def make(summary: Summary, title: str) -> str:
    """Make the page."""
    sections = list(_sections(summary))
    links = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text, _ in sections)
    body = _first(summary) + f"<nav aria-label=Sections>{links}</nav>\n"
    body += "".join(
        f'<section id="{name}"><h2>{escape(text)}</h2>\n{content}</section>\n' for name, text, content in sections
    )
    return frame.make(title, _hint(summary), body)


def _hint(summary: Summary) -> str:
    if not summary.engines and summary.bench:
        return f"{number(len(summary.bench), 'report', 'reports').capitalize()} of asynckv bench."
    read = summary.read
    events, processes = number(read.events, "event", "events"), number(len(summary.engines), "process", "processes")
    hint = f"{events.capitalize()} of {processes} in {number(read.files, 'log', 'logs')}"
    if summary.engines:
        hint += f", {time_text(summary.first, with_day=True)} to {time_text(summary.last, with_day=True)} UTC"
    return f"{hint}."


def _first(summary: Summary) -> str:
    """What fits on the first screen."""
    said, is_good = verdict(summary) if summary.engines or not summary.bench else ([], True)
    # A run with faults explains most, wherever it stands.
    said += [benches.verdict(x) for x in sorted(summary.bench, key=lambda x: x.is_good)[:MOST_BENCHES]]
    if (more := len(summary.bench) - MOST_BENCHES) > 0:
        said.append(f"And {number(more, 'more run', 'more runs')} of the benchmark, below.")
    is_good = is_good and all(x.is_good for x in summary.bench)
    notes = "".join(f'<p class="note" role="note">{escape(text)}</p>' for text in _notes(summary))
    cards = _cards(summary) if summary.engines else []
    if len(summary.bench) == 1:
        cards += benches.cards(summary.bench[0], "benchmark " if cards else "")
    shown = "".join(
        f'<div class="card{" bad" if x.is_bad else ""}"><small>{escape(x.name)}</small><b>{escape(x.value)}</b>'
        f"<small>{escape(x.of)}</small></div>"
        for x in cards
    )
    has_news = summary.bench or summary.pulls.ended or summary.leases.lent or summary.unseen
    kind = is_good if has_news or not is_good else None
    return f'{frame.verdict(said, is_good=kind)}{notes}<div class="cards">{shown}</div>\n'


def _cards(summary: Summary) -> list[Card]:
    pulls, leases = summary.pulls, summary.leases
    asked, away = pulls.ended - pulls.retried, max((x.seconds for x in summary.away), default=0.0)
    cards = [Card("loop away", duration(away) if away else "never", "the longest" if away else "for long", away > 0)]
    if early := [x for x in ended_early(summary) if summary.last - x.last > DEFAULT_LEASE_S / 2]:
        # A loop that is away says so when it is back.
        since = f"since {time_text(early[0].last)[:8]}: {'a log ends' if len(early) == 1 else f'{len(early)} logs end'}"
        cards = [Card("loop away", f"≥{GAP}{duration(away)}" if away else "unknown", since, True)]
    if leases.lent:
        bad, lent = leases.ended_badly, count_text(leases.lent)
        cards = [Card("not released", f"{bad:,}", f"of {lent} leases", bad > 0), *cards]
    if pulls.ended:
        seconds = max(summary.last - summary.first, 1e-9)
        cards = [
            Card("ended", count_text(asked), f"pulls in {duration(summary.last - summary.first)}"),
            Card("failed", f"{pulls.failed:,}", share(pulls.failed, asked), pulls.failed > 0),
            Card("moved", bytes_text(pulls.num_bytes), f"{bytes_text(pulls.num_bytes / seconds)}/s over all"),
            *(
                Card(f"latency {name}", duration(value), "of pulls that completed")
                for kind in [pulls.latency_s]
                if kind is not None
                for name, value in (("p50", kind.p50), ("p99", kind.p99))
            ),
            *cards,
        ]
    return cards


def _notes(summary: Summary) -> Iterable[str]:
    """What limits the report."""
    read = summary.read
    if summary.late.requests:
        yield (
            "Failed pulls and late blocks are counted apart. A pull fails for its reader, blocks come back late for "
            "their owner; one can happen without the other."
        )
    if summary.engines and not any(x.events > x.warnings + x.errors for x in summary.engines):
        yield (
            "These logs hold warnings and errors only: of what went well nothing is known, so throughput, latency and "
            "blocks held are those of failures. Log at level info to see them."
        )
    if read.skipped:
        lines = sum(x["lines"] for x in read.skipped)
        yield f"{number(lines, 'line', 'lines').capitalize()} could not be read; the last section has the reasons."
    if plots.bands(summary):
        yield (
            "A red band through a plot: an event loop was away. A grey one: a log had ended, without a goodbye. "
            "Event loops and Peers say whose."
        )
    yield from map(unseen_text, summary.unseen[:MOST_UNSEEN])
    told = {x.rank for x in summary.unseen[:MOST_UNSEEN]}
    if missing := [x for x in summary.missing if x not in told]:
        named = ", ".join(safe(x, 80) for x in missing[:MOST_NAMED])
        more = f" and {len(missing) - MOST_NAMED:,} more" if len(missing) > MOST_NAMED else ""
        yield f"There is no log of {named}{more}, which others name."
    yield from (safe(x, 400) for x in summary.clocks)


def _sections(summary: Summary) -> Iterable[tuple[str, str, str]]:
    if len(summary.bench) > 1:
        yield "benches", "Benchmarks, side by side", benches.compared(summary.bench)
    for i, one in enumerate(summary.bench):
        yield f"bench-{i}", f"Benchmark: {safe(one.name, 80)}", benches.section(one)
    if summary.engines:
        yield "pulls", "Throughput and latency", _pulls(summary)
        yield "phases", "Phases", _phases(summary)
        yield "failures", "Failures", _failures(summary)
        yield "late", "Blocks that came back late", _late(summary)
        yield "blocks", "Blocks held", _blocks(summary)
        yield "peers", "Peers", _peers(summary)
        if summary.offloads.ranks:
            yield "offload", "Offload", _offloads(summary)
        yield "loops", "Event loops", _loops(summary)
        yield "warnings", "Other warnings and errors", _warned(summary)
        yield "processes", "Processes", _engines(summary)
    if summary.read.files:
        yield "read", "What was read", _read(summary)


def _empty(why: str) -> str:
    return f'<p class="empty">{escape(why)}</p>\n'


def _grid(*figures: str) -> str:
    return f'<div class="plots">\n{"".join(figures)}</div>\n'


def _more(rows: Sequence[object]) -> str:
    return (
        _empty(f"The first {MOST_ROWS} of {len(rows):,}; the report as JSON has all.") if len(rows) > MOST_ROWS else ""
    )


NO_PULLS = (
    "No pull ended in these logs: there is no log of a process that pulls among them, or its level leaves out what "
    "went well (info has it)."
)
NO_SUCCESS = (
    "No pull that completed is in these logs: there is no log of a process that pulls, nothing went well, or their "
    "level is above info."
)


def _pulls(summary: Summary) -> str:
    if not summary.pulls.ended:
        return _empty(NO_PULLS)
    figures = [plots.throughput(summary)]
    if summary.pulls.num_bytes:
        figures.append(plots.volume(summary))
    if summary.pulls.latency_s is None:
        return _grid(*figures) + _empty(NO_SUCCESS)
    slow = summary.pulls.slowest
    text = f"The slowest in the logs: request {safe(slow['request_id'])} on {safe(slow['rank'])}, "
    text += f"{duration(slow['seconds'])}. asynckv timeline LOGS --request ID shows it."
    return _grid(*figures, plots.latency(summary), plots.phases(summary)) + _empty(text)


def _phases(summary: Summary) -> str:
    kinds = summary.pulls.phases_s
    if not kinds:
        return _empty(NO_SUCCESS)
    # A release that goes on after the line was written has no duration there.
    ordered = sorted(
        (n for n in kinds if n != "release" or kinds[n].max > 0), key=lambda n: [*PHASES, *WITHIN].index(n)
    )
    rows = [
        [
            f"{name} (in read)" if name in WITHIN else name,
            *(duration(getattr(kinds[name], q)) for q in ("mean", "p50", "p90", "p99", "max")),
        ]
        for name in ordered
    ]
    table = frame.table(["phase", "mean", "p50", "p90", "p99", "slowest"], rows, label="Phases")
    figure = plots.phase_quantiles(kinds, "How long each phase took", "Thick: p50. Pale: p99.")
    return f'<div class="plots">\n{figure}<div>{table}</div></div>\n'


def _failures(summary: Summary) -> str:
    if not summary.failures:
        return _empty(f"Nothing failed. ({summary.pulls.logged + summary.leases.logged:,} ends are in the logs.)")
    words = {"pull": "pull", "attempt": "attempt, tried again", "lease": "lease"}
    rows = [
        [
            safe(x.cause, 60),
            words[x.side],
            f"{x.count:,}",
            ", ".join(f"{safe(k, 40)} {n:,}" for k, n in x.failed_in.items()) or UNKNOWN,
            time_text(x.first),
            time_text(x.last),
            safe(x.detail, 300) or UNKNOWN,
            safe(x.where.rsplit("/", 1)[-1], 60),
        ]
        for x in summary.failures[:MOST_ROWS]
    ]
    heads = ["cause", "of a", "how often", "in phase", "first", "last", "what the first says", "where"]
    return (
        _grid(plots.failures(summary))
        + frame.table(heads, rows, label="Failures", texts=("of a", "in phase", "what the first says", "where"))
        + _more(summary.failures)
    )


def _late(summary: Summary) -> str:
    late = summary.late
    if not late.requests:
        return _empty("No block came back late, as far as these logs say.")
    rows = [
        [
            safe(x["title"], 120),
            f"{x['requests']:,}",
            UNKNOWN if x["blocks"] is None else f"{x['blocks']:,}",
            UNKNOWN if x["longest_s"] is None else duration(x["longest_s"]),
            safe(x.get("example", ""), 400),
            safe(x["remedy"], 400),
        ]
        for x in late.causes.values()
    ]
    heads = ["cause", "requests", "blocks", "longest", "for example", "what to do"]
    by_cause = frame.table(heads, rows, label="Late blocks by cause", texts=("for example", "what to do"))
    rows = [
        [
            safe(x["request_id"], 80),
            x["side"],
            x["state"],
            UNKNOWN if x["blocks"] is None else f"{x['blocks']:,}",
            UNKNOWN if x["seconds"] is None else duration(x["seconds"]),
            safe(x["sentence"], 400),
            safe(", ".join(x["holders"]), 120),
        ]
        for x in late.worst[:MOST_LATE]
    ]
    heads = ["request", "side", "blocks were", "blocks", "held for", "why", "held by"]
    one_by_one = frame.table(heads, rows, label="Late blocks", texts=("side", "blocks were", "why", "held by"))
    text = f"The {len(rows)} that were held longest, of {late.requests:,}; asynckv leaks has the evidence for each."
    return by_cause + _empty(text) + one_by_one


def _blocks(summary: Summary) -> str:
    figures, said = [], []
    if summary.leases.lent:
        figures.append(plots.blocks(summary))
    else:
        said.append("No lease is in these logs: there is no log of a process that lends, or its level is above info.")
    if any(summary.quarantine.pulls) or summary.quarantine.retired:
        figures.append(plots.quarantine(summary))
    elif summary.pulls.ended:
        said.append("Decode side: no pull failed while a transfer could still write into its blocks.")
    rows = [
        [
            safe(x.waits, 200),
            f"{WORDS[x.side]}{f', {safe(x.state)}' if x.state not in ('', WORDS[x.side]) else ''}",
            f"{x.most:,}",
            duration(x.oldest_s),
            time_text(x.first),
            time_text(x.last),
            safe(x.example, 80),
        ]
        for x in summary.held[:MOST_ROWS]
    ]
    text = "".join(map(_empty, said))
    if not rows:
        return _grid(*figures) + text + _empty("Nothing was held for so long that it was warned of.")
    heads = ["held for long, waiting for", "side", "at once, most", "longest", "first warned", "last", "for example"]
    table = frame.table(heads, rows, label="Held for long", texts=("side", "for example"))
    return _grid(*figures) + text + table + _more(summary.held)


def _peers(summary: Summary) -> str:
    if not summary.peers:
        return _empty("No peer is named in these logs: there is no log of a process that pulls among them.")
    drawn = [x for x in summary.peers if x.states]
    figure = (
        _grid(plots.states(summary, drawn))
        if drawn or plots.readers(summary)
        else _empty("No change of a peer's state is in these logs: their level is above info, or they begin later.")
    )
    logged = {x.rank for x in summary.engines}
    rows = [_peer(x, x.reader in logged) for x in summary.peers[:MOST_ROWS]]
    heads = [
        "peer",
        "seen by",
        "pulls",
        "bytes",
        "failed",
        "causes",
        "released, by the peer's log",
        "state",
        "lost for",
        "last went well",
    ]
    table = frame.table(heads, rows, label="Peers", texts=("seen by", "causes", "released, by the peer's log", "state"))
    return figure + table + _more(summary.peers)


def _peer(pair: Pair, is_logged: bool) -> list[str]:
    state = UNKNOWN
    if pair.states:
        name, since, until = pair.states[-1]
        state = f"{safe(name)} for {duration(until - since)}"
    return [
        safe(pair.peer, 80),
        safe(pair.reader, 80),
        count_text(pair.pulls) if is_logged else "no log",
        bytes_text(pair.num_bytes) if is_logged else UNKNOWN,
        f"{sum(pair.failures.values()):,}" if is_logged else UNKNOWN,
        ", ".join(f"{safe(k, 40)} {n:,}" for k, n in pair.failures.items()) or UNKNOWN,
        ", ".join(f"{n:,} {safe(k, 40)}" for k, n in pair.released.items()) or UNKNOWN,
        state,
        duration(pair.not_ready_s) if pair.not_ready_s else UNKNOWN,
        time_text(pair.last_good) if pair.last_good is not None else "never",
    ]


def _offloads(summary: Summary) -> str:
    ranks = summary.offloads.ranks
    heads = [
        "rank",
        "looked up",
        "found",
        "loaded",
        "stored",
        "from files",
        "to files",
        "evicted",
        "failed",
        "files",
        "as of",
    ]
    table = frame.table(heads, [_offload(x) for x in ranks[:MOST_ROWS]], label="Offload", texts=("files", "as of"))
    plot = _grid(plots.offloaded(summary)) if summary.offloads.bytes_per_s else ""
    return plot + table + _more(ranks)


def _offload(rank: Offload) -> list[str]:
    count = rank.counters.get
    looked_up = count("tokens.looked_up", 0)
    return [
        safe(rank.rank, 80),
        f"{looked_up:,} tokens",
        share(count("tokens.found", 0), looked_up) if looked_up else UNKNOWN,
        *(bytes_text(count(f"bytes.{move}", 0)) for move in ("load", "store", "promotion", "write_back")),
        f"{count('evicted.host', 0) + count('evicted.file', 0):,}",
        f"{rank.failed:,}",
        f"lost: {safe(rank.files_lost)}" if rank.files_lost else bytes_text(rank.file_bytes or 0),
        "its end" if rank.has_stopped else "never told" if rank.told_at is None else time_text(rank.told_at),
    ]


def _loops(summary: Summary) -> str:
    if not summary.away:
        return _empty("No event loop was away for longer than log.away_s (a second, unless configured).")
    return _grid(plots.away(summary))


def _warned(summary: Summary) -> str:
    if not summary.warned:
        return _empty("There are none.")
    rows = [
        [x.event, x.level, f"{x.count:,}", time_text(x.first), time_text(x.last), safe(x.example, 300)]
        for x in summary.warned[:MOST_ROWS]
    ]
    heads = ["event", "level", "how often", "first", "last", "for example"]
    return frame.table(heads, rows, label="Warnings", texts=("level", "for example")) + _more(summary.warned)


def _engines(summary: Summary) -> str:
    rows = [_process(x, summary.last) for x in summary.engines[:MOST_ROWS]]
    heads = ["process", "host", "version", "did", "started", "ended", "events", "warnings", "errors"]
    table = frame.table(heads, rows, label="Processes", texts=("host", "version", "did", "started", "ended"))
    return table + _more(summary.engines)


def _process(engine: Engine, last: float) -> list[str]:
    did = [number(n, what, f"{what}s") for n, what in ((engine.leases, "lease"), (engine.pulls, "pull")) if n]
    pid = f" ({engine.pid})" if engine.pid is not None else ""
    return [
        safe(engine.rank, 80),
        f"{safe(engine.host, 60)}{pid}" if engine.host else UNKNOWN,
        safe(engine.version, 40) or UNKNOWN,
        ", ".join(did) or UNKNOWN,
        time_text(engine.started) if engine.started is not None else f"before {time_text(engine.first)}",
        time_text(engine.stopped)
        if engine.stopped is not None
        else f"log ends {time_text(engine.last)}"
        + (f", {duration(last - engine.last)} before the last line of all" if last - engine.last > EARLY_S else ""),
        f"{engine.events:,}",
        f"{engine.warnings:,}",
        f"{engine.errors:,}",
    ]


def _read(summary: Summary) -> str:
    read = summary.read
    text = f"{number(read.lines, 'line', 'lines').capitalize()} of {number(read.files, 'file', 'files')}: "
    text += f"{number(read.events, 'event', 'events')} of asynckv's, {number(read.others, 'line', 'lines')} of other "
    text += f"programs, {read.repeated:,} that {'was' if read.repeated == 1 else 'were'} there twice."
    if not read.skipped:
        return _empty(f"{text} Nothing was skipped.")
    rows = [[safe(x["reason"]), f"{x['lines']:,}", safe(x["where"], 100), safe(x["first"])] for x in read.skipped]
    table = frame.table(
        ["skipped, because", "lines", "first", "begins"], rows, label="Skipped", texts=("first", "begins")
    )
    return _empty(text) + table
