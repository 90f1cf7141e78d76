"""More evidence never knows less: a property of `asynckv why`, over simulated services and kept logs.

    python -m tests.lab.evidence --services 1000

Of each service the logs are read, of a simulated one also what its engines answer at a moment amid it all, when the
logs end as well. Then must hold, by what `asynckv why` finds in logs and answers together:

- what logs alone find is found, or is shown to be over;
- without one of the logs, with one cut at one of ten places, without one of the answers, without all of them, or with
  the answers alone, a service that had findings is never well.

Exit status 1 if it does not hold; the first exceptions are shown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from asynckv.account.values import decode_account
from asynckv.core.wire import StatusRequest
from asynckv.engine import Engine
from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.findings import Finding, Findings, Seen, find
from asynckv.tools.diagnose.join import start_of
from asynckv.tools.diagnose.reading import MOST_ASKED, Looking
from asynckv.tools.diagnose.records import Logs, Record, read_logs
from tests.lab.leaky import make_leaky
from tests.lab.logs import BEGIN
from tests.lab.logs import Logs as Written
from tests.lab.script import make_script
from tests.lab.service import Service
from tests.lab.world import Process

AWAY_S = 1.0
"""A loop that does not come back for so long gives no answer."""
PLACES = 10
"""Places at which each log is cut: after so many tenths of its lines."""


class Case(NamedTuple):
    """Logs by the names of their files, and what engines answer."""

    name: str
    logs: Mapping[str, Sequence[Record]]
    answers: Sequence[Answer] = ()


class Exception_(NamedTuple):
    """A case that knows less with more, or is well with less."""

    case: str
    without: str
    lost: str


class Asker:
    """Asks all engines of a simulated service at one moment of its time."""

    def __init__(self, at: float) -> None:
        self.at, self.answers = at, list[Answer]()
        self._engines: list[tuple[Process, Engine]] = []

    def listen(self, process: Process, engine: Engine) -> None:
        self._engines.append((process, engine))

    def ask(self) -> None:
        for process, engine in self._engines:
            is_away = max(process.now, process.frozen_until) > self.at + AWAY_S
            if not (process.is_dead or is_away or engine._life.is_shut or engine._life.state.value == "suspended"):
                self.answers.append(self._answer(process, engine))

    def _answer(self, process: Process, engine: Engine) -> Answer:
        work = engine._driver.survey._work(StatusRequest(1, MOST_ASKED))
        next(work)
        try:
            while True:
                work.send(process.epoch + process.rate * process.now)
        except StopIteration as done:
            status = done.value
        account = decode_account(status.account)
        return Answer(address=f"/{account.rank}", gauges=status.gauges, account=account, at=BEGIN + self.at)


def simulated(seed: int, kind: str) -> Case:
    """Play a service, and keep its logs and answers of a moment of it."""
    script = make_leaky(seed) if kind == "leaky" else make_script(seed)
    asker = Asker(random.Random(repr(("asked", seed))).uniform(2.0, script.seconds + 30.0))
    written = Written()
    service = Service(script, listeners=[written, asker])
    service.world.at(asker.at, asker.ask)
    service.run()
    with tempfile.TemporaryDirectory() as name:
        for log in written.processes:
            (Path(name) / log.file_name).write_text(log.until(asker.at))
        return kept(Path(name), asker.answers)._replace(name=f"{kind} {seed}")


def kept(directory: Path, answers: Sequence[Answer] = ()) -> Case:
    """Read the logs in a directory."""
    paths = sorted(x for x in directory.iterdir() if x.stat().st_size)
    read = {x.name: read_logs([x]).records for x in paths}
    # Each line is decoded once, not at each look.
    return Case(directory.name, {x: [replace(z, said=z.fields) for z in y] for x, y in read.items()}, answers)


def looked(logs: Mapping[str, Sequence[Record]], answers: Sequence[Answer]) -> tuple[Seen, Findings]:
    """Return what is known, and what is found."""
    records = sorted((x for each in logs.values() for x in each), key=lambda x: x.at)
    looking = Looking([], None, None, None, 1.0)
    looking._logs = Logs(records)
    seen = looking._joined(answers)
    return seen, find(seen)


def variants(case: Case) -> Iterator[tuple[str, Mapping[str, Sequence[Record]], Sequence[Answer]]]:
    """Yield the case with less: one source dropped, or one log cut."""
    for name, records in case.logs.items():
        yield f"without {name}", {x: y for x, y in case.logs.items() if x != name}, case.answers
        lines = sorted({_line(x) for x in records})
        for tenth in range(1, PLACES):
            last = lines[len(lines) * tenth // PLACES - 1] if len(lines) * tenth // PLACES else 0
            few = [x for x in records if _line(x) <= last]
            yield f"{name} cut at {tenth}/{PLACES}", {**case.logs, name: few}, case.answers
    if case.answers:
        yield "logs alone", case.logs, ()
        yield "answers alone", {}, case.answers
    for answer in case.answers:
        yield f"without the answer of {answer.rank}", case.logs, [x for x in case.answers if x is not answer]


def _line(record: Record) -> int:
    return int(record.where.rpartition(":")[2])


def exceptions(case: Case, counts: Counter[str]) -> Iterator[Exception_]:
    """Yield where the property does not hold."""
    whole_seen, whole = looked(case.logs, case.answers)
    counts["cases"] += 1
    counts["with findings"] += bool(whole.wrong)
    counts["well"] += not (whole.wrong or whole.limits)
    for without, logs, answers in variants(case) if whole.wrong else ():
        counts["looks"] += 1
        if not (answers or any(logs.values())):
            continue
        less_seen, less = looked(logs, answers)
        if less.wrong or less.limits:
            continue
        if not all(_is_beyond(x, whole_seen, less_seen) for x in whole.wrong):
            yield Exception_(case.name, without, "; ".join(f"{x.code}: {x.what}" for x in whole.wrong))
    if case.answers and any(case.logs.values()):
        for lost in _lost(looked(case.logs, ())[1], whole):
            yield Exception_(case.name, "more: the answers", lost)


def _is_beyond(wrong: Finding, whole: Seen, less: Seen) -> bool:
    """Return True for a fault that is no part of the claim that all is well.

    Logs are well until the first of them ends: the death of its process after that does not matter, nor a lease that
    only the answer of its owner calls late by now. Earlier starts of ranks are not expected, nor are processes that no
    source names.
    """
    late = [x for x in whole.late if x.request_id in wrong.requests]
    holders = {rank for x in late for rank in x.holders if x.state == "held"}
    if holders and holders <= {x.rank for x in whole.answers} - {x.rank for x in less.answers}:
        return all(x.state == "held" for x in late)
    process = whole.axis.service.process_named(wrong.what.split()[0])
    if not wrong.code.startswith("died") or process is None:
        return False
    words = repr([(x.rank, x.fields) for x in less.logs.records])
    is_claimed_until = process.incarnation in less.axis.service.processes
    return process.successor is not None or is_claimed_until or process.start not in words


def _lost(alone: Findings, both: Findings) -> Iterator[str]:
    """Yield findings of logs alone that are neither found with answers, nor shown to be over."""
    words = " ".join(f"{x.what} {x.evidence}" for x in (*both.wrong, *both.notes))
    names = {y for x in both.wrong for y in x.requests} | {
        y for x in both.late for y in (x.request_id, *x.decode_request_ids)
    }
    for finding in alone.wrong:
        is_named = all(x in names or x in words for x in finding.requests)
        rank = next((x for x in finding.what.replace(",", " ").split() if start_of(x)), "")
        if not (is_named if finding.requests else rank in words):
            yield f"{finding.code}: {finding.what} {finding.requests}"


def _chunk(work: tuple[str, Sequence[int]]) -> tuple[list[Exception_], Counter[str]]:
    counts: Counter[str] = Counter()
    return [x for seed in work[1] for x in exceptions(simulated(seed, work[0]), counts)], counts


def main(argv: Sequence[str] | None = None) -> int:
    """Look for exceptions, and show the first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--services", type=int, default=1000, help="how many simulated services; half of each kind")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kept", type=Path, nargs="*", default=[], metavar="DIR", help="directories of kept logs")
    parser.add_argument("--show", type=int, default=10, help="exceptions to show")
    options = parser.parse_args(argv)
    begun, counts, found = time.perf_counter(), Counter[str](), list[Exception_]()
    for directory in options.kept:
        found += exceptions(kept(directory), counts)
    seeds = range(options.first_seed, options.first_seed + (options.services + 1) // 2)
    work = [(kind, seeds[i : i + 5]) for i in range(0, len(seeds), 5) for kind in ("leaky", "faults")]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for more, counted in pool.imap(_chunk, work):
            found += more
            counts += counted
    for each in found[: options.show]:
        print(f"{each.case}, {each.without}: {each.lost}")
    told = ", ".join(f"{number:,} {what}" for what, number in counts.items())
    print(f"{told}, in {time.perf_counter() - begun:.0f} s: {len(found):,} exceptions")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
