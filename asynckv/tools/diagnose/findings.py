"""Findings about a service, the worst first, and the things that could not be judged.

The functions are pure: logs and answers, joined, go in, and values come out. Their texts come from logs and engines, so
they are foreign, and are escaped before they are shown.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from asynckv import told
from asynckv.account.survey import MAX_PEERS
from asynckv.edges.kernel import FIRST_PID_NAMESPACE
from asynckv.integrations.vllm.options import WORDS
from asynckv.tools.console import grouped
from asynckv.tools.diagnose import standing
from asynckv.tools.diagnose.ask import Answer, Trouble
from asynckv.tools.diagnose.axis import Axis, clock_time, counted, shown_seconds
from asynckv.tools.diagnose.causes import CATALOGUE, CAUSE, HEADING, remedy_of
from asynckv.tools.diagnose.join import LoggedPull, LoggedRequest, Process, Service, base_name
from asynckv.tools.diagnose.leaks_copies import REMEDY, LateCopy
from asynckv.tools.diagnose.leaks_pulls import Failure, failures
from asynckv.tools.diagnose.leaks_values import Leak, listed, some
from asynckv.tools.diagnose.pauses import Pause, longest, pauses
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import Logs, Record, integer
from asynckv.tools.diagnose.stalls import last_stall, stalls
from asynckv.tools.diagnose.timeline_model import Ground, families, last_attempt

NOT_JUDGED = "Nothing wrong was found, but not all could be judged"
MOST = 12  # findings of a kind
MAX_TEXT = 600
DIED = "Look at its stderr, its supervisor and the kernel's log (out of memory?); start it again."
UNSURE = "See whether it lives (`asynckv why` of its socket or address, `ps -o pid,stat`): its log may be cut off."
ONE_NAME = "Give each engine an `engine_id` of its own, and each of its ranks a place of its own."
GIVE_CORES = "Give the engines cores of their own, or move other work away: 'CPU and NUMA' in docs/deploy.md."
RAISE_LIMIT = "Raise the CPU limit of their container (`cpu.max`, `resources.limits.cpu`): docs/deploy.md."
AWAY = "While it is away its engine answers nothing. Find what blocks it: py-spy dump, or asyncio's debug mode."
UNSEEN = "Give the logs of all processes, from level info on, and of the whole time."
ASK_THEM = "Give their addresses, or the directories of their sockets, to `asynckv why` too."
HALF_READ = "{} only announces {}, which another rank of its engine has read: ask again in ten seconds"
DROPPED = "the log of {} lacks {} that could not be written"
WAIT_OR_LOOK = "See what these ranks and their schedulers do: their logs, `asynckv why` of their sockets, py-spy dump."
LET_IT_RUN = "Let it run on, or end it: docs/why.md, 'Continue it or kill it'."
CONNECT = "See whether the host is up, and whether a firewall is in between: `asynckv doctor --to ADDRESS`."
TROUBLES = {
    Trouble.GONE: (HEADING.GONE, DIED),
    Trouble.AWAY: (HEADING.STOPPED, LET_IT_RUN),
    Trouble.NETWORK: (HEADING.NETWORK, CONNECT),
    Trouble.KEYS: (HEADING.WRONG, "Give --keys and --authorized, and the address with its key: docs/why.md."),
}
"""Headings and remedies of engines that did not answer."""
STUCK, DIFFER = CAUSE.SCHEDULER_STUCK, CAUSE.BYTES_DIFFER
LOOPS_AWAY = {CAUSE.DECODE_LOOP_AWAY, CAUSE.PREFILL_LOOP_AWAY}
OF_PROCESSES = {HEADING.GONE, HEADING.STOPPED, HEADING.UNKNOWN}
"""Headings of late requests that are reported with their process."""

NEVER_ASKED = {CAUSE.NEVER_HEARD_OF, CAUSE.NEVER_CLAIMED, CAUSE.NO_STEP}
SAID_ELSEWHERE = {x.event for x in (told.LeaseHeld, told.PullHeld, told.PullRefused, told.PromptsCounted)}
SAID_ELSEWHERE |= {x.event for x in (told.LoopWasAway, told.PeerChanged, told.OffloadRetired, told.BytesDiffer)}
"""Warnings of processes that other findings report."""


LEAST_SHARE, LEAST = 0.05, 10
"""Share and number of prompts from which on a cause of computing them locally is wrong, in all or between two lines."""
NO_SHARE = ("prompt_logprobs", "not_lent")
"""Causes that are a client's wish, or have no share, because prompts to be lent are not counted."""
PARAMS_CAUSES = ("without_params", "no_params", "not_asked")
"""Causes of prompts computed locally for which the router is the place to look."""
ALL = ""  # all prompts, among the causes
READ_MORE = "See 'Prompts without params' and 'Computed locally' in docs/vllm.md."


@dataclass(frozen=True, slots=True)
class Finding:
    heading: HEADING  # what kind of thing it is; it decides what to do
    code: str  # a stable name of what it is: a cause of late blocks, how a process is, why requests failed, an event
    what: str  # what is wrong, with names and numbers
    evidence: str = ""  # how that is known
    remedy: str = ""  # what to do
    requests: tuple[str, ...] = ()  # requests that are late or failed for it, by their names on the prefill side
    blocks: int = -1  # how many blocks these hold; -1 if that is not known
    ranks: tuple[str, ...] = ()  # ranks that it is about


@dataclass(frozen=True, slots=True)
class Findings:
    wrong: Sequence[Finding] = ()  # what is wrong, the worst first
    limits: Sequence[Finding] = ()  # what was expected, and could not be judged: without one, all is well
    notes: Sequence[Finding] = ()  # what else was seen
    late: Sequence[Leak] = ()  # every request that was late; the findings tell of them in groups


@dataclass(frozen=True, slots=True)
class Seen:
    logs: Logs
    presence: Presence  # has the service, its times, and the fates of its processes
    grounds: Sequence[Ground]  # all processes
    late: Sequence[Leak]  # of `find_leaks`
    copies: Sequence[LateCopy] = ()  # of `late_copies`
    answers: Sequence[Answer] = ()  # of engines that were asked
    since: float = -math.inf  # nothing counts that was over before
    failed: Sequence[str] = ()  # stores and loads of the request that was asked for, each in a line

    @property
    def axis(self) -> Axis:
        return self.presence.axis

    @property
    def service(self) -> Service:
        return self.presence.service

    def is_past(self, record: Record) -> bool:
        """Return True if a line is of before the time in question."""
        return self.axis.at(self.service.processes[record.incarnation], record.at) < self.since


def find(seen: Seen) -> Findings:
    """Return findings, the worst first; if two are about the same fault, the one that decides the remedy."""
    failed, told_of = _failed(seen), set(map(_key, seen.late))
    there = [*_gone(seen, failed), *_silent(seen), *_stopped(seen)]
    waits = standing.waiting(seen.presence, [x for x in seen.service.requests if _key(x) not in told_of])
    stalled = [*_stalled(seen, _ranks(there), failed, waits)]
    refused = {(x.text("peer"), x.text("prefill_request_id")) for x in _refusals(seen)}
    asked = [x for x in seen.late if not (x.cause in NEVER_ASKED and (x.engine_id, x.request_id) in refused)]
    late, failed = _unexplained(asked, there, stalled), _unblamed(failed, there)
    found = pauses(seen.axis, seen.since)
    every: list[Leak | Failure] = [*late, *failed]
    slow = [(x, y) for x in every if (y := _machine_of(seen.axis, found, x)) is not None]
    done = {id(x) for x, _ in slow}
    first, then = ([x for x in there if bool(x.requests) is is_first] for is_first in (True, False))
    computed, warned = [*_prompts(seen)], [*_logged(seen, "warning")]
    long, also = _away(found, [*asked, *failed])
    wrong = [*first, *stalled, *_machines(found, slow), *_late([x for x in late if id(x) not in done])]
    wrong += [*_waits(seen, waits, _ranks(there) | _ranks(stalled)), *then, *_copies(seen.copies)]
    wrong += [*_refused(seen), *map(_pulls, (x for x in failed if id(x) not in done))]
    wrong += [*_differ(seen, failed), *(x for is_wrong, x in computed if is_wrong), *_twice(seen, asked, failed), *long]
    wrong += _logged(seen, "error")
    wrong += [*_open(seen, _ranks(wrong))]
    # Whether a warning of a newer version is over is not known.
    limits = [*_limits(seen), *(x for x in warned if x.code not in told.EVENTS)]
    notes = [*also, *_notes(seen), *(x for is_wrong, x in computed if not is_wrong)]
    notes += [x for x in warned if x.code in told.EVENTS]
    return Findings(wrong, limits, notes, asked)


def _unexplained(asked: Sequence[Leak], there: Sequence[Finding], stalled: Sequence[Finding]) -> list[Leak]:
    """Return late requests that are not reported with the process that they hang on."""
    named, halted = _ranks(there), _ranks(stalled)
    return [x for x in asked if not (_is_about(x, named) or any(_is_step_of(x, y) for y in halted))]


def _unblamed(failed: Sequence[Failure], there: Sequence[Finding]) -> list[Failure]:
    """Return failures that are not reported with a stuck scheduler or a dead process."""
    gone = _ranks(x for x in there if x.heading is HEADING.GONE)
    of_dead = [x for x in failed if x.verdict.cause is CAUSE.PREFILL_DIED and x.verdict.names["by"] in gone]
    return [x for x in failed if x.verdict.cause is not STUCK and x not in of_dead]


def _ranks(found: Iterable[Finding]) -> set[str]:
    return {rank for each in found for rank in each.ranks}


def _key(what: Leak | LoggedRequest) -> tuple[str, str, int]:
    """Name a request, because one id may be lent by two engines, and by one engine twice."""
    return what.engine_id, what.request_id, what.sequence


def _is_about(leak: Leak, ranks: Collection[str]) -> bool:
    """Return True if late blocks depend on one of these processes: it is a reader that is gone or silent, or the
    lender."""
    if leak.side == "decode" or leak.cause in (CAUSE.DECODE_UNRESPONSIVE, *LOOPS_AWAY):
        named: Iterable[str] = leak.about
    elif leak.cause is CAUSE.PREFILL_DIED:
        named = leak.holders
    else:
        named = (leak.reader, *leak.owed) if CATALOGUE[leak.cause].heading in OF_PROCESSES else ()
    return any(x in ranks for x in named)


def _gone(seen: Seen, failed: Sequence[Failure]) -> Iterator[Finding]:
    """Find ranks of which logs end without a goodbye, the earliest first, with the requests that are late
    since, or failed. The deaths of one rank are one finding.
    """
    ended = [(x, x.gone) for x in sorted(seen.grounds, key=lambda x: x.end) if x.gone is not None]
    deaths = grouped(
        (x.process.base, (x, gone))
        for x, gone in ended
        if gone.kind == "died" and not (x.process.successor is not None and x.end < seen.since)
    )
    for base, died in deaths.items():
        ranks, (last, fate) = tuple(x.process.rank for x, _ in died), max(reversed(died), key=lambda x: x[1].is_proved)
        mine = [x for x in seen.late if _is_about(x, ranks)]
        lost = [x for x in failed if x.verdict.cause is CAUSE.PREFILL_DIED and x.verdict.names["by"] in ranks]
        hurt: list[Leak | Failure] = [*mine, *lost]
        evidence = hurt[0].sentence if hurt else ""
        heading, remedy = (HEADING.GONE, DIED) if fate.is_proved else (HEADING.UNKNOWN, UNSURE)
        what = f"{last.process.rank} {fate.text[:MAX_TEXT]}"
        if len(died) > 1:
            first, then = (seen.axis.moment(x.end) for x in (died[0][0], died[-1][0]))
            what = f"{base} died {counted(len(died), 'time')}, from {first} to {then}; {what}"
        yield Finding(heading, fate.gone, what, evidence, remedy, *_of(hurt), ranks)


def _silent(seen: Seen) -> Iterator[Finding]:
    """Find engines that did not answer, except processes that are reported dead, and sockets that starts left which
    are older than one that answers.
    """
    there = {base_name(x.rank): x.at - x.account.facts.uptime_s for x in seen.answers if not x.error}
    named = seen.service.ranks_by_address()
    told = {x.process.rank for x in seen.grounds if x.gone is not None and x.gone.kind == "died"}
    for answer in seen.answers:
        rank = answer.account.rank or named.get(answer.address, "")
        began = there.get(base_name(answer.rank))
        is_left = answer.trouble is Trouble.GONE and began is not None and not answer.made_at > began
        if answer.error and not is_left and not (rank and rank in told):
            told.add(rank)
            mine = [x for x in seen.late if rank and _is_about(x, {rank})]
            heading, remedy = TROUBLES.get(answer.trouble, (HEADING.UNKNOWN, ""))
            what = f"{rank or answer.rank} does not answer"
            if rank and base_name(rank) in there:  # over another way
                heading, remedy = HEADING.NETWORK, CONNECT
                what += f" at {answer.address}, where its readers look for it"
            ranks = (rank or answer.rank,)
            yield Finding(heading, "no_answer", what, answer.error, remedy, *_of(mine), ranks)


def _stopped(seen: Seen) -> Iterator[Finding]:
    """Find stopped or paused processes of this host that were not asked."""
    asked = {x.rank for x in seen.answers if x.error}
    for process in seen.service.processes.values():
        if process.halted and process.rank not in asked:
            mine = [x for x in seen.late if _is_about(x, {process.rank})]
            what = f"{process.rank} is stopped or paused"
            yield Finding(HEADING.STOPPED, "stopped", what, process.halted, LET_IT_RUN, *_of(mine), (process.rank,))


def _stalled(
    seen: Seen, told_of: Collection[str], failed: Sequence[Failure], waits: Sequence[standing.Waiting]
) -> Iterator[Finding]:
    """Find engines that make no steps although something waits for one, and prefill ranks that do not lend."""
    for process in (x for x in seen.service.processes.values() if x.rank not in told_of):
        rank = process.rank
        mine = [x for x in failed if x.verdict.cause is STUCK and x.verdict.names["by"] == rank]
        now = None if seen.presence.fate(process).is_over else last_stall(process)
        worst = max(stalls(process), key=lambda x: x.seconds, default=None)
        late = [x for x in seen.late if _is_step_of(x, rank)] if worst is not None else []
        if not (now or mine or late):
            continue
        names, blocks = _of(late)
        pulls = [pull for x in mine for pull in x.pulls]
        pulls += [pull for x in waits if rank in x.owners for _, pull in x.pulls]
        names = tuple(dict.fromkeys((*names, *(x.prefill_request_id for x in pulls))))
        said = [*(x.sentence for x in mine), *dict.fromkeys(x.sentence for x in late)]
        worst = now or worst
        what = f"the scheduler of {rank} {'makes' if now else 'made'} no steps" + (f": {worst.text}" if worst else "")
        evidence = "; ".join(said[:2]) or "`waits_for_step` of its last sign of life (`engine_alive`), or of its answer"
        remedy = _dump(process)
        yield Finding(HEADING.STOPPED, STUCK.value, what, evidence[:MAX_TEXT], remedy, names, blocks, (rank,))


def _is_step_of(leak: Leak, rank: str) -> bool:
    """Return True if a request may be late because a rank had no step for it."""
    is_step = leak.cause in (CAUSE.DECODE_UNRESPONSIVE, CAUSE.ANNOUNCED_AND_FORGOTTEN)
    return (is_step or leak.reason == "not_lent_yet") and rank in leak.about


def _dump(process: Process) -> str:
    namespace, pid = process.pid or (-1, 0)
    which = f"`py-spy dump --pid {pid}`" if pid > 0 else "`py-spy dump`"
    where = "on the host" if namespace in (-1, FIRST_PID_NAMESPACE) else "in the container"
    where += f" of {process.rank}; if that process only waits for orders, the same of its scheduler's"
    return f"{which} {where}. Each step has to call `take_finished`."


def _late(late: Sequence[Leak]) -> Iterator[Finding]:
    """Find causes of late blocks and their processes, the most frequent first."""
    groups = grouped(((x.cause, x.reader), x) for x in late)
    for (cause, _), found in sorted(groups.items(), key=lambda x: -len(x[1])):
        entry = CATALOGUE[cause]
        names, blocks = _of(found)
        seconds = max((x.seconds for x in found if not math.isnan(x.seconds)), default=math.nan)
        most = " at most" if len(names) > 1 else ""
        held = "" if math.isnan(seconds) else f", held for {shown_seconds(seconds)}{most}"
        how = "" if blocks < 0 else f", {counted(blocks, 'block')}"
        what = f"{counted(len(names), 'request')} late: {entry.title}{how}{held}"
        ranks = tuple(dict.fromkeys(y for x in found for y in (x.reader, *x.about, *x.holders) if y not in ("", "*")))
        yield Finding(entry.heading, cause.value, what, found[0].sentence, found[0].remedy, names, blocks, ranks)


def _of(late: Sequence[Leak | Failure]) -> tuple[tuple[str, ...], int]:
    """Return the names of late requests, and of those with failed pulls, and the number of their late blocks."""
    blocks = grouped((_key(x), x.blocks) for x in late if isinstance(x, Leak))
    failed = (p.prefill_request_id or p.request_id for x in late if isinstance(x, Failure) for p in x.pulls)
    # Of a request that is late on both sides, the one with more blocks counts.
    known = [most for each in blocks.values() if (most := max(each)) >= 0]
    names = tuple(request_id for _, request_id, _ in blocks)
    return names + tuple(dict.fromkeys(x for x in failed if x not in names)), sum(known) if known else -1


def _copies(copies: Sequence[LateCopy]) -> Iterator[Finding]:
    if copies:
        blocks = sum(max(x.blocks, 0) for x in copies)
        worst = copies[0]
        which = "1 store or load" if len(copies) == 1 else f"{len(copies):,} stores or loads"
        what = f"{which} did not end in time, {counted(blocks, 'block')}"
        example = f"{worst.what} of {worst.request_id} on {worst.rank}: {worst.state} {worst.detail}"
        ranks = tuple(dict.fromkeys(x.rank for x in copies))
        yield Finding(HEADING.STOPPED, "copy_hangs", what, example, REMEDY, (), blocks, ranks)


def _refusals(seen: Seen) -> list[Record]:
    """Return pulls that decode engines refused by themselves, of requests without a complete pull."""
    requests = (r for r in seen.service.requests if not any(p.cause == "complete" for p in r.all_pulls))
    refused = (x for r in requests for x in r.before if x.event == told.PullRefused.event)
    return [x for x in refused if not seen.is_past(x)]


def _refused(seen: Seen) -> Iterator[Finding]:
    """Find causes for which decode engines refused requests by themselves, the most frequent first."""
    groups = grouped(((x.rank, x.text("cause")), x) for x in _refusals(seen))
    for (rank, cause), found in sorted(groups.items(), key=lambda x: -len(x[1])):
        names = dict.fromkeys(x.text("prefill_request_id") or x.text("request_id") for x in found)
        what = f"{rank} refused {counted(len(found), 'pull')} by itself, and began nothing: {cause}"
        keys = {(x.text("peer"), x.text("prefill_request_id")) for x in found}
        _, blocks = _of([x for x in seen.late if (x.engine_id, x.request_id) in keys and x.cause in NEVER_ASKED])
        remedy = remedy_of(CAUSE.REFUSED_LOCALLY, cause)
        yield Finding(HEADING.DROPPED, cause, what, found[0].text("detail"), remedy, tuple(names), blocks, (rank,))


def _failed(seen: Seen) -> list[Failure]:
    """Find failed pulls by reason and by rank, except repeated attempts and late requests."""
    told = set(map(_key, seen.late))
    last: set[LoggedPull] = set()
    for family in families(seen.service.requests):
        if told.isdisjoint(map(_key, family)):
            last |= set(last_attempt([p for r in family for p in r.all_pulls]))

    def counts(pull: LoggedPull) -> bool:
        is_final = pull in last and not pull.will_be_tried_again
        return is_final and pull.ended is not None and not seen.is_past(pull.ended)

    return failures(seen.presence, counts)


def _pulls(failed: Failure) -> Finding:
    number, times, entry = len(failed.pulls), failed.times, CATALOGUE[failed.verdict.cause]
    span = f"{counted(number, 'pull')}, {clock_time(min(times))}"
    span += f" to {clock_time(max(times))}" if number > 1 else ""
    names, verdict = tuple(dict.fromkeys(x.request_id for x in failed.pulls)), failed.verdict
    readers = (x.process.rank for x in failed.pulls)
    ranks = tuple(dict.fromkeys((verdict.names["by"], verdict.names["holder"], *readers)))
    what = failed.sentence[:MAX_TEXT]
    return Finding(entry.heading, verdict.cause.value, what, span, verdict.remedy, names, ranks=ranks)


def _differ(seen: Seen, failed: Sequence[Failure]) -> Iterator[Finding]:
    """Find readers whose second looks differed, by the event or by an engine's count, unless failed pulls say so."""
    reported = {pull.process for x in failed if x.verdict.cause is DIFFER for pull in x.pulls}
    # A count has no time, so it says nothing of a part of the time.
    answers = () if math.isfinite(seen.since) else seen.answers
    counts = {x.account.incarnation: x.account.facts.counters.get("pulls.differs") for x in answers}
    for process in (x for x in seen.service.processes.values() if x not in reported):
        lines = [x for x in process.of(told.BytesDiffer) if not seen.is_past(x)]
        if number := integer(counts.get(process.incarnation), len(lines)):
            owners, names = (tuple(x.text(name) for x in lines) for name in ("peer", "request_id"))
            who = f"{process.rank} from {listed(owners) or 'prefill ranks'}"
            what = f"{counted(number, 'pull')} of {who} failed: {CATALOGUE[DIFFER].title}"
            where = [
                f"part {x.text('part')} of {x.text('layer')}, from token {x.integer('first_token')}" for x in lines
            ]
            remedy = remedy_of(DIFFER, names={"holder": listed(owners)})
            evidence, ranks = some(where)[:MAX_TEXT] or "`pulls.differs` of its answer", (process.rank, *owners)
            yield Finding(HEADING.BYTES, DIFFER.value, what, evidence, remedy, names, ranks=ranks)


def _twice(seen: Seen, late: Iterable[Leak], failed: Iterable[Failure]) -> Iterator[Finding]:
    """Find ranks that two processes were at once, of which both took one request that was late or failed."""
    keys, pulls = set(map(_key, late)), {x for each in failed for x in each.pulls}
    found: list[tuple[tuple[str, ...], str]] = []
    for request in seen.service.requests:
        if _key(request) in keys or not pulls.isdisjoint(request.all_pulls):
            readers = sorted({x.process for x in request.all_pulls}, key=lambda x: (x.base, x.first_at))
            at_once = ((x, y) for x, y in itertools.pairwise(readers) if x.base == y.base)
            found += [((x.rank, y.rank), request.name) for x, y in at_once if _ran_at_once(seen.axis, x, y)]
    for ranks, names in grouped(found).items():
        what = f"{' and '.join(ranks)} ran at once under one name, and both took {counted(len(names), 'request')}"
        yield Finding(HEADING.WRONG, "one_id_twice", what, "", ONE_NAME, tuple(dict.fromkeys(names)), ranks=ranks)


def _ran_at_once(axis: Axis, one: Process, other: Process) -> bool:
    lives = [(axis.when(x, x.first_at)[1], axis.when(x, x.last_at)[0]) for x in (one, other)]
    return max(x for x, _ in lives) < min(x for _, x in lives)


def _prompts(seen: Seen) -> Iterator[tuple[bool, Finding]]:
    """Find the shares of prompts that engines computed by themselves, by cause; True with those that are wrong."""
    for process in seen.service.processes.values():
        lines = list(process.of(told.PromptsCounted))
        new = [x for x in lines if not seen.is_past(x)]
        so_far = [Counter(), *map(_counts, lines)][-len(new) - 1 :]
        steps = [after - before for before, after in itertools.pairwise(so_far)]
        rows = [x for x in new if x.integer("in_a_row", 0) >= told.MANY_PROMPTS]
        had_none = bool(lines) and lines[-1].integer("with_params", 0) == 0
        rows = [x for x in rows if x.number("in_a_row_s", 0.0) >= told.LONG_S or had_none]
        total = (counts := so_far[-1] - so_far[0]).pop(ALL, 0)
        for cause, count in counts.most_common(MOST):
            of = max(total, count)
            how = "itself" if cause in PARAMS_CAUSES else "itself, at least in part"
            what = f"{process.rank} computed {count:,} of {counted(of, 'prompt')} {how} ({count / of:.1%}): {cause}"
            if cause == "not_lent":
                what = f"{process.rank} did not lend {counted(count, 'prompt')}: {cause}"
            text, seen_in = WORDS["computed_locally"].get(cause, ""), [x for x in steps if x[ALL]]
            is_wrong = count >= max(LEAST, LEAST_SHARE * of)
            is_wrong |= any(x[cause] >= max(LEAST, LEAST_SHARE * x[ALL]) for x in seen_in)
            if cause == "without_params":
                text, is_wrong = WORDS["prompts"][cause], bool(rows)
                what += f", at most {max(x.integer('in_a_row', 0) for x in new):,} in a row"
            heading = HEADING.NEVER_CAME if cause in PARAMS_CAUSES else HEADING.DROPPED
            yield is_wrong and cause not in NO_SHARE, Finding(heading, cause, what, text, READ_MORE)


def _counts(line: Record) -> Counter[str]:
    """Return the number of a line's prompts (`ALL`), and those that were computed locally by cause."""
    found = {cause: max(integer(n), 0) for cause, n in line.mapping("computed_locally").items()}
    found["without_params"] = line.integer("without_params", 0)
    return Counter(found | {ALL: found["without_params"] + line.integer("with_params", 0)})


def _machine_of(axis: Axis, found: Sequence[Pause], late: Leak | Failure) -> Pause | None:
    """Return the pause of a whole machine that explains why a request was late, or pulls failed, if one does."""
    if isinstance(late, Leak):
        owner = axis.service.process_named(next(iter(late.holders), ""))
        lived = [(owner, at) for at in (late.since, late.until)]
    else:
        lived = [(x.process, at) for x in late.pulls for at in (x.begun_at, x.last_at)]
    times = [axis.at(x, at) for x, at in lived if x is not None and not math.isnan(at)]
    worst = longest(found, _blamed(late), min(times, default=-math.inf), max(times, default=math.inf))
    return worst if worst is not None and worst.is_hosts else None


def _blamed(late: Leak | Failure) -> Sequence[str]:
    """Return the ranks of which one was away, if a request was late, or pulls failed, because a loop was away."""
    if isinstance(late, Leak):
        return (late.reader, *late.owed, *late.holders) if late.cause in LOOPS_AWAY else ()
    return (late.verdict.names["by"],) if late.verdict.cause in LOOPS_AWAY else ()


def _machines(found: Sequence[Pause], slow: Sequence[tuple[Leak | Failure, Pause]]) -> Iterator[Finding]:
    """Find machines without processor time for their processes, of which requests were late."""
    for clock, hurt in grouped((pause.process.clock, late) for late, pause in slow).items():
        mine = [x for x in found if x.is_hosts and x.process.clock == clock]
        worst, ranks = max(mine, key=lambda x: x.seconds), dict.fromkeys(x.process.rank for x in mine)
        host = worst.process.host or worst.process.rank
        what = f"{counted(len(ranks), 'process')} of {host} {worst.why}: {_times(mine)}"
        evidence = f"{hurt[0].sentence}; the event loops of {some(ranks)} were away"
        remedy = RAISE_LIMIT if worst.lacked("throttled_s") else GIVE_CORES
        yield Finding(HEADING.STOPPED, "no_processor_time", what, evidence, remedy, *_of(hurt), tuple(ranks))


def _times(found: Sequence[Pause]) -> str:
    return f"{counted(len(found), 'time')}, at most {shown_seconds(max(x.seconds for x in found))}"


def _away(found: Sequence[Pause], late: Iterable[Leak | Failure]) -> tuple[list[Finding], list[Finding]]:
    """Find event loops that were blocked for long while requests waited, and count all other pauses."""
    said = {rank for x in late for rank in _blamed(x)}
    left = [x for x in found if x.process.rank not in said]
    blocked = [x for x in left if x.seconds >= standing.LONG_AWAY_S and not x.is_hosts and any(x.held.values())]
    long, worst_of = list[Finding](), {x.process.rank: x for x in sorted(blocked, key=lambda x: x.seconds)}
    for rank, worst in reversed(worst_of.items()):
        what = f"the event loop of {rank} was away: {_times([x for x in left if x.process.rank == rank])}"
        held = ", ".join(counted(number, name) for name, number in worst.held.items())
        evidence = f"until {clock_time(worst.end)}; open: {held}"
        long.append(Finding(HEADING.STOPPED, told.LoopWasAway.event, what, evidence, AWAY, ranks=(rank,)))
    if not (left := [x for x in left if x.process.rank not in worst_of]):
        return long, []
    ranks, worst = dict.fromkeys(x.process.rank for x in left), max(left, key=lambda x: x.seconds)
    why = f" (they {worst.why})" if worst.is_hosts else ""
    what = f"event loops of {counted(len(ranks), 'process')} were away: {_times(left)}{why}, and nothing was late by it"
    return long, [Finding(HEADING.STOPPED, told.LoopWasAway.event, what, some(ranks), ranks=tuple(ranks))]


def _logged(seen: Seen, level: str) -> Iterator[Finding]:
    """Find events at a level that no other finding reports, by event and process."""
    lines = ((x, process) for process in seen.service.processes.values() for x in process.records if x.level == level)
    found = grouped(((x.event, process.base), x) for x, process in lines if not _is_said_elsewhere(seen, x))
    for (event, base), same in sorted(found.items(), key=lambda x: -len(x[1])):
        first = same[0]
        texts = [x for name in ("cause", "detail", "error", "who", "peer", "reader") if (x := first.text(name))]
        rank = first.rank if first.rank == same[-1].rank else base  # several starts of it, as in a crash loop
        what = f"{counted(len(same), level)} {event} on {rank}"
        evidence = ", ".join(texts)[:MAX_TEXT]
        yield Finding(HEADING.UNKNOWN, event, what, evidence, "See docs/logging.md.", ranks=(first.rank,))


def _is_said_elsewhere(seen: Seen, record: Record) -> bool:
    is_copy = record.event == told.OffloadFailed.event and record.integer("held", 0) == 1
    return is_copy or record.event in SAID_ELSEWHERE or seen.is_past(record)


def _waits(seen: Seen, waits: Sequence[standing.Waiting], told_of: Collection[str]) -> Iterator[Finding]:
    """Find pulls that wait for long, except for ranks that are reported themselves."""
    for each in waits:
        if not any(x in told_of for x in each.owners):
            owners, number = listed(each.owners) or "the prefill side", counted(len(each.pulls), "pull")
            heading = HEADING.STOPPED if each.is_never_lent(seen.presence) else HEADING.UNKNOWN
            state = ", ".join(each.states).replace("not_lent", "not lent yet")
            what = f"{number} of {each.reader.rank} waited for {owners}, for {shown_seconds(each.seconds)}: {state}"
            names = dict.fromkeys(request.name for request, _ in each.pulls)
            evidence = f"{told.PullHeld.event} says so at {clock_time(each.until)}, and nothing says that they ended"
            ranks = (each.reader.rank, *each.owners)
            yield Finding(heading, told.PullHeld.event, what, evidence, WAIT_OR_LOOK, tuple(names), ranks=ranks)


def _open(seen: Seen, told_of: Collection[str]) -> Iterator[Finding]:
    """Find warnings of processes that nothing has ended, except about ranks that are reported."""
    known = {*told_of, *map(base_name, told_of)}
    for record, subject in standing.open_warnings(seen.presence):
        if known.isdisjoint((record.text("peer") or record.rank, subject)) and not seen.is_past(record):
            what = f"{record.event} of {record.rank}{f', {subject},' if subject else ''} is not over"
            texts = [x for name in ("state", "cause", "detail") if (x := record.text(name))]
            evidence, ranks = ", ".join(texts)[:MAX_TEXT], (record.rank,)
            yield Finding(HEADING.UNKNOWN, record.event, what, evidence, "See docs/logging.md.", ranks=ranks)


def _notes(seen: Seen) -> Iterator[Finding]:
    """Find what else was seen: clocks, recalled pulls, open follows, and requests that an answer shows to be over."""
    for note in seen.axis.notes():
        yield Finding(HEADING.UNKNOWN, "clocks", f"clocks: {note}")
    pulls = (pull for x in seen.service.requests for pull in x.all_pulls if pull.is_recalled)
    recalled = [x for x in pulls if not seen.axis.at(x.process, x.last_at) < seen.since]
    for owner, number in Counter(listed(x.failed_with) for x in recalled).most_common(MOST):
        what = f"{counted(number, 'pull')} ended because {owner} took the blocks back at once (recall)"
        yield Finding(HEADING.UNKNOWN, "recalled", what)
    follows = ((r.name, x) for r in seen.service.requests for x in r.all_pulls if x.is_follow and x.is_open)
    parked = {x.rank: counted(n, "follower") for x in seen.answers if (n := x.gauges.get("followers"))}
    for ranks, found in grouped(((x.process.rank, *x.peer_ranks), (name, x)) for name, x in follows).items():
        most = shown_seconds(max(x.held[-1].number("state_s", 0.0) for _, x in found))
        what = (
            f"{counted(len(found), 'request')} of {ranks[0]} follow, until {listed(ranks[1:])} offers, {most} at most"
        )
        evidence = ", ".join(f"{x} has parked {parked[x]}, for which no request came" for x in ranks if x in parked)
        names = tuple(dict.fromkeys(name for name, _ in found))
        yield Finding(HEADING.UNKNOWN, "follow", what, evidence, requests=names, ranks=ranks)
    for process in (x for x in seen.service.processes.values() if x.over):
        what = f"{counted(len(process.over), 'request')} held for long in its log ({listed(process.over)})"
        yield Finding(HEADING.UNKNOWN, "over", f"{process.rank} answers, and no longer holds {what}")


def _limits(seen: Seen) -> Iterator[Finding]:
    """Find things that were expected and could not be judged: missing, short or unreadable logs."""
    service, presence = seen.service, seen.presence

    def limit(code: str, what: str, evidence: str = "", remedy: str = "") -> Finding:
        return Finding(HEADING.UNKNOWN, code, what, evidence[:MAX_TEXT], remedy)

    if missing := standing.missing(presence):
        none = "neither a log nor an answer" if seen.answers else "no log"
        yield limit("no_log", f"there is {none} of {some(missing)}, which others name", "", UNSEEN)
    of_ranks = (
        ("half_read", standing.left_behind(presence), HALF_READ, ""),
        ("cut", standing.cut(presence), "the log of {} was cut: {}", UNSEEN),
        ("dropped", standing.dropped(seen.logs.records, seen.is_past), DROPPED, UNSEEN),
        ("uncounted", standing.uncounted(presence, seen.answers), "{} has counted what no log shows: {}", UNSEEN),
    )
    for code, found, text, remedy in of_ranks:
        yield from (limit(code, text.format(rank, why), "", remedy) for rank, why in found)
    if not_here := [x.rank for x in service.processes.values() if x.is_elsewhere]:
        why = "All have died since, or these logs were copied before their ends."
        yield limit("not_here", f"no process of {some(not_here)} is on this host any more", why)
    for answer in (x for x in seen.answers if x.peers_left_out):
        what = f"{counted(answer.peers_left_out, 'engine')} that {answer.rank} reads from were not asked"
        yield limit("not_asked", what, f"of one engine's peers the first {MAX_PEERS} are asked", ASK_THEM)
    for ground in seen.grounds:
        if ground.gone is not None and ground.gone.kind != "died":
            yield limit("ends_early", f"the log of {ground.process.rank} ends early", ground.gone.text)
    if quiet := [x.rank for x in service.processes.values() if x.num_records and not (x.says_info or x.answers)]:
        what = f"{counted(len(quiet), 'process')} logged warnings and errors alone: of what went well nothing is known"
        said = Counter(x.event for x in seen.logs.records if x.rank in quiet and standing.may_be_open(x))
        over = "".join(f", nor whether {number:,} {event} are over" for event, number in said.items())
        yield limit("warnings_only", what + over, some(quiet), UNSEEN)
    for skipped in seen.logs.skipped[:MOST]:
        what = f"{counted(skipped.lines, 'line')} could not be read: {skipped.reason}"
        yield limit("not_read", what, f"{skipped.where}: {skipped.first}")
