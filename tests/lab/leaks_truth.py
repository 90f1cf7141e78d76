"""Judge what `asynckv why` concludes from logs, on simulated services with faults of which the truth is known.

    python -m tests.lab.leaks_truth --services 1000

Each seed is played twice over: as a service in which single requests have mishaps (`tests.lab.leaky`), and, with
`--faults`, as one in which everything goes wrong that may (`tests.lab.script`). What its processes log is given
to `asynckv.tools.diagnose`, with both sides' logs, and with one side's only. A witness who saw every packet and every
death (`tests.lab.truth`) knows which requests' blocks were late, and all that is true of why. With `--modes cut` the
logs of both sides end at a moment in the midst of it all as well; with `torn` each ends at a moment of its own, as
files do that are copied one after the other while they are written. With `set` the clock of one host is put back amid
it all. Then must hold:

- every request that was late is named (with one side's logs: those of which that side must know);
- no other is;
- the heading of each cause that is named is true of that request, and each late lease, pull or announcement has one
  that is (causes under one heading are told apart by the tests of the table and by `tests.lab.why_live`);
- with both sides' logs none of them is a class ("the reader fell silent"), which is for logs of one side only.

Exit status 1 if anything disagrees; the first disagreements are shown with what is true and what the logs say.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TextIO

from asynckv.arguments import without_control
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.causes import CATALOGUE, CAUSE, HEADING
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.leaks import find_leaks
from asynckv.tools.diagnose.leaks_values import Leak
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import read_logs
from tests.lab.leaky import make_leaky
from tests.lab.logs import Logs, ProcessLog
from tests.lab.script import Script, make_script
from tests.lab.truth import Forgotten, LateLease, LatePull, Owed, Witness, watch

MODES = ("both", "prefill", "decode", "cut", "torn", "set")
"""The given logs: of both sides or one; cut short at one moment, or each at another; or with a clock set back."""

PUT_BACK_S = 60.0
"""By how much the clock of one host is put back."""

TORN_S = 1.0
"""Seconds by which a torn log may end earlier or later than others."""

C, H = CAUSE, HEADING
TRUE: Mapping[HEADING, set[str]] = {
    H.GONE: {"died", "rank_dead", "reader_closed", "none_runs", "owner_died", "owner_closed", "agent_died"}
    | {"peer_died", "peer_lost"},
    H.STOPPED: {"reader_away", "owner_away", "silenced"},
    H.NETWORK: {"unmet", "release_lost", "transfer_running", "transfer_doubt"},
    H.NEVER_CAME: {"never_handed", "never_asked", "rank_dead"},
    H.DROPPED: {"retry_never", "announced_only", "left_out"},
    H.WRONG: {"keys", "stale", "other_id", "refused"},
    H.LEASE: {"too_short", "max_lease", "released_early", "ended_soon"},
    H.UNKNOWN: {"late", "unanswered", "peer_lost"},
}
"""What a witness may have seen of a late lease, a late pull or a message, of which a cause under a heading is true."""


class Alone(NamedTuple):
    """A mishap, where nothing else befell its request: the headings that are good enough, and what it brings."""

    headings: set[HEADING]
    brings: set[str]


ALONE: Mapping[str, Alone] = {
    "params_lost": Alone({H.NEVER_CAME, H.DROPPED}, {"never_handed"}),
    "aborted": Alone({H.NEVER_CAME, H.DROPPED}, {"never_asked"}),
    "announced": Alone({H.DROPPED}, {"announced_only"}),
    "late": Alone({H.LEASE}, {"handed_late"}),
    "renamed": Alone({H.WRONG}, {"other_id"}),
    "dies_before_claim": Alone({H.GONE}, {"died"}),
    "dies_reading": Alone({H.GONE}, {"died"}),
    "dies_before_release": Alone({H.GONE}, {"died", "release_lost"}),
    "release_lost": Alone({H.NETWORK}, {"release_lost"}),
    "release_renamed": Alone({H.WRONG}, {"other_id"}),
    "retry_never": Alone({H.DROPPED}, {"retry_never"}),
    "unmet": Alone({H.NETWORK}, {"unmet", "release_lost"}),
    "keys_refused": Alone({H.WRONG}, {"keys", "unmet", "release_lost"}),
    "reader_away": Alone({H.STOPPED}, {"reader_away"}),
    "owner_away": Alone({H.STOPPED}, {"owner_away", "release_lost"}),
}
"""With both sides' logs."""

MAJOR = {"handed_late", "reader_closed", "owner_closed", "owner_died", "agent_died", "rank_dead"}
MAJOR |= set[str]().union(*(mishap.brings for mishap in ALONE.values()))
"""Reasons that may be true of a late lease, each of which is enough by itself."""


@dataclass(slots=True)
class Disagreement:
    """A statement that is said and not true, or true and not said.

    Attributes:
        kind: `leaky` or `faults`.
        mode: The logs that were given.
        what: `missed`, `false`, `wrong`, or `vague`.
        lines: What the logs say of the request.
    """

    seed: int
    kind: str
    mode: str
    what: str
    request: str
    said: list[str] = field(default_factory=list)
    true: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


Ident = tuple[str, int, str]


@dataclass(slots=True)
class Truth:
    """The leases and pulls of one request that were late."""

    ask: int
    leases: list[LateLease] = field(default_factory=list)
    pulls: list[LatePull] = field(default_factory=list)
    forgotten: list[Forgotten] = field(default_factory=list)

    def told(self) -> list[str]:
        """Write it."""
        out = []
        for lease in self.leases:
            gone = f" {' '.join(sorted(lease.gone))}" if lease.gone else ""
            out.append(f"lease of {lease.owner} {lease.state}{'' if lease.is_sure else ' (perhaps)'}:{gone}")
            out += [
                f"    {x.reader} {sorted(x.starts)}: {' '.join(sorted(x.whys))} {' '.join(sorted(x.reasons))}".rstrip()
                for x in lease.owed
            ]
        out += [
            f"pull {x.pull_id} of {x.reader} {'came back late' if x.is_returned else 'never came back'}"
            f"{'' if x.is_sure else ' (perhaps)'}: {' '.join(sorted(x.whys))}"
            for x in self.pulls
        ]
        return out + [f"announcement {x.pull_id} of {x.reader} was forgotten" for x in self.forgotten]


class Judge:
    """Compares what is said of one service with what is true of it."""

    def __init__(self, seed: int, kind: str, script: Script, logs: Logs, witness: Witness) -> None:
        self.seed, self.kind, self.logs, self.witness = seed, kind, logs, witness
        self.cut_at = random.Random(repr(("cut", seed))).uniform(2.0, script.seconds + 4.0)
        draw = random.Random(repr(("torn", seed))).uniform
        self.torn_at = {x.file_name: max(self.cut_at + draw(-TORN_S, TORN_S), 0.1) for x in logs.processes}
        self.set_on = random.Random(repr(("set", seed))).choice([x.host.name for x in logs.processes])
        last = max(self.torn_at.values(), default=self.cut_at)
        self.under_way = {
            "cut": witness.under_way(self.cut_at, self.cut_at),
            "torn": witness.under_way(min(self.torn_at.values(), default=last), last),
        }
        self.mishaps = {mishap.ask: mishap.kind for mishap in script.mishaps}
        self.befell = {(mishap.ask, name) for mishap in script.mishaps for name in mishap.readers}
        self.truths: dict[tuple[str, int, str], Truth] = {}
        leases, pulls = witness.late()
        for lease in leases:
            self._truth(lease.engine_id, lease.sequence, lease.request_id, lease.ask).leases.append(lease)
        for pull in pulls:
            self._truth(pull.engine_id, pull.sequence, pull.prefill_request_id, pull.ask).pulls.append(pull)
        for one in witness.forgotten():
            self._truth(one.engine_id, one.sequence, one.prefill_request_id, one.ask).forgotten.append(one)

    def _truth(self, engine_id: str, sequence: int, request_id: str, ask: int) -> Truth:
        return self.truths.setdefault((engine_id, sequence, _own(request_id)), Truth(ask))

    def text_of(self, mode: str, log: ProcessLog) -> str:
        """Return the text of a process's file."""
        if mode == "set":
            return log.put_back(self.cut_at, PUT_BACK_S) if log.host.name == self.set_on else log.text
        return log.until({"cut": self.cut_at, "torn": self.torn_at[log.file_name]}.get(mode, math.inf))

    def judge(self, mode: str, leaks: Sequence[Leak], counts: Counter[str]) -> Iterator[Disagreement]:
        """Find what disagrees, given what is concluded from the logs of one side or of both."""
        said: dict[Ident, list[Leak]] = {}
        for leak in leaks:
            said.setdefault((leak.engine_id, leak.sequence, _own(leak.request_id)), []).append(leak)
        for ident, truth in self.truths.items():
            if missed := list(self._missed(mode, truth, said.get(ident, []))):
                counts[f"{mode}.missed"] += 1
                yield self._disagreement(mode, "missed", ident, said.get(ident, []), truth, missed)
        for ident, named in said.items():
            known = self.truths.get(ident)
            for leak in named:
                what = self._is_wrong(mode, ident, known or Truth(-1), leak)
                counts[f"{mode}.{leak.cause}"] += 1
                if what:
                    counts[f"{mode}.{leak.cause}.{what.partition(':')[0]}"] += 1
                    yield self._disagreement(mode, what, ident, [leak], known, [])

    def _missed(self, mode: str, truth: Truth, said: Sequence[Leak]) -> Iterator[str]:
        """Yield the late leases and pulls that one side's logs, or both, must have told, and did not."""
        holders = {name for leak in said for name in leak.holders}
        if mode in self.under_way:
            end = self.cut_at if mode == "cut" else min(self.torn_at.values())
            yield from (
                f"lease of {x.owner}" for x in truth.leases if x.is_sure and x.told_at < end and x.owner not in holders
            )
            return
        if mode != "decode":
            yield from (f"lease of {x.owner}" for x in truth.leases if x.is_sure and x.owner not in holders)
        if mode != "prefill":
            yield from (f"blocks of {x.reader}" for x in truth.pulls if x.is_sure and x.reader not in holders)
            if truth.forgotten and not said:
                yield f"announcement of {truth.forgotten[0].reader}"

    def _is_wrong(self, mode: str, ident: Ident, truth: Truth, leak: Leak) -> str:
        """Return the mistake in a conclusion; empty if it is true."""
        under_way = ident in self.under_way.get(mode, ())
        if under_way and (leak.state == "held" or CATALOGUE[leak.cause].is_class):
            return ""  # that it is held is all that is said, or why it was by then
        if leak.side == "decode":
            pulls = [x for x in truth.pulls if x.reader in leak.holders]
            if not pulls:
                return "false"
            if not any(_is_true(leak, x.whys) for x in pulls):
                return "wrong"
            return "vague" if mode == "both" and CATALOGUE[leak.cause].is_class else ""
        if leak.cause is C.ANNOUNCED_AND_FORGOTTEN and truth.forgotten:
            return ""
        leases = [x for x in truth.leases if x.owner in leak.holders or mode == "decode"]
        if not leases:
            if mode != "decode":
                return "false"
            # This side cannot know that nothing was late; what it says of its own messages must be true.
            return "" if _is_true(leak, self.witness.said_of(*ident)) else "false"
        if mode == "decode" and _is_true(leak, self.witness.said_of(*ident)):
            return ""
        if mode == "set" and "was set: it went back" in leak.sentence:
            return ""  # it says itself what it hangs on
        if not any(_is_true(leak, whys) for x in leases for whys in [x.gone, *(owed.whys for owed in x.owed)]):
            return "wrong"
        if mode != "both":
            return ""
        if CATALOGUE[leak.cause].is_class:
            # The log does not name the reader: no log can tell whether that was the one that died, or was away.
            whys = {C.NEVER_CLAIMED: {"untold"}, C.DECODE_UNRESPONSIVE: {"untold", "other_away"}}.get(leak.cause, set())
            return "" if all(o.whys & whys for x in leases for o in x.owed) else "vague"
        mishap = self.mishaps.get(truth.ask, "")
        if mishap in ALONE and not any(self._has_more(truth.ask, mishap, x) for x in leases):
            # A full prefix hit reads nothing and meets no rank, so only its release is lost.
            is_hit = leak.cause is C.RELEASE_LOST and any("completed" in owed.whys for x in leases for owed in x.owed)
            is_good = is_hit or CATALOGUE[leak.cause].heading in ALONE[mishap].headings
            return "" if is_good else f"wrong: {mishap} alone"
        return ""

    def _has_more(self, ask: int, mishap: str, lease: LateLease) -> bool:
        """Something befell a lease that its request's mishap does not bring, or befell a reader that it is not for."""

        def brought(owed: Owed) -> set[str]:
            name = owed.reader.replace("decode", "d").replace("/tp", ".")
            return ALONE[mishap].brings if (ask, name) in self.befell else set()

        return bool(lease.gone & MAJOR) or any(x.whys & MAJOR - brought(x) for x in lease.owed)

    def _disagreement(
        self, mode: str, what: str, ident: Ident, said: Sequence[Leak], truth: Truth | None, missed: list[str]
    ) -> Disagreement:
        mishap = self.mishaps.get(truth.ask) if truth is not None else None
        true = [f"script: {mishap}"] if mishap else []
        true += truth.told() if truth is not None else ["nothing was late"]
        return Disagreement(
            self.seed,
            self.kind,
            mode,
            what,
            f"{ident[0]} sequence {ident[1]} {ident[2]!r}",
            [f"{x.side} {x.state} {x.cause} at {', '.join(x.holders)}: {x.sentence}" for x in said],
            [*true, *(f"MISSED {x}" for x in missed)],
            list(self._lines(ident, truth)) if len(self.truths) else [],
        )

    def _lines(self, ident: Ident, truth: Truth | None) -> Iterator[str]:
        """Yield the log lines of a request, and of processes that came and went."""
        number = ident[2].removeprefix("P:").partition(",")[0]
        words = (f'"P:{number},', f'"D{number}"')
        always = ("engine_started", "engine_stopped", "engine_suspended", "loop_was_away")
        for log in self.logs.processes:
            for line in log.text.splitlines():
                if any(x in line for x in words) or any(f'"event": "{x}"' in line for x in always):
                    yield f"{log.file_name}: {line}"


def _own(request_id: str) -> str:
    """The id of a request that a router has changed on its way."""
    return request_id.rstrip("'")


def _is_true(leak: Leak, whys: Set[str]) -> bool:
    """Whether what is seen makes the heading of a cause true; of one that is over, it is never true that it is held."""
    return leak.cause is not C.STILL_HELD and bool(TRUE[CATALOGUE[leak.cause].heading] & whys)


def conclude(logs: Logs, mode: str, directory: Path) -> list[Leak]:
    """Have `asynckv.tools.diagnose` look at the logs of both sides, or of one."""
    side = {"prefill": "prefill", "decode": "decode"}.get(mode, "")
    paths = [directory / x.file_name for x in logs.processes if x.engine_id.startswith(side) and x.times]
    return find_leaks(Presence(Axis(join(read_logs(paths))))) if paths else []


def one(
    seed: int, kind: str, modes: Sequence[str] = MODES[:3], edit: Callable[[str], str] = lambda text: text
) -> tuple[list[Disagreement], Counter[str]]:
    """Play a service, and judge what is concluded from its logs.

    Args:
        seed: The seed of the script.
        kind: `leaky` or `faults`.
        modes: The logs that are given.
        edit: Changes the text of each log, so that it can be seen that the judge judges.
    """
    counts: Counter[str] = Counter()
    script = make_leaky(seed) if kind == "leaky" else make_script(seed)
    service, logs, witness = watch(script)
    if service.world.violation:
        return [Disagreement(seed, kind, "", "violation", service.world.violation)], counts
    judge = Judge(seed, kind, script, logs, witness)
    found: list[Disagreement] = []
    counts["services"] += 1
    counts["late requests"] += len(judge.truths)
    counts["requests"] += len(witness.requests())
    with tempfile.TemporaryDirectory() as name:
        for mode in modes:
            for log in logs.processes:
                (Path(name) / log.file_name).write_text(edit(judge.text_of(mode, log)))
            found += judge.judge(mode, conclude(logs, mode, Path(name)), counts)
    return found, counts


def judged(kind: str, seeds: Sequence[int], modes: Sequence[str]) -> tuple[list[Disagreement], Counter[str]]:
    """Judge several services."""
    found: list[Disagreement] = []
    counts: Counter[str] = Counter()
    for seed in seeds:
        disagreements, more = one(seed, kind, modes)
        found += disagreements
        counts += more
    return found, counts


def many(
    kinds: Sequence[str], seeds: Sequence[int], modes: Sequence[str], jobs: int
) -> tuple[list[Disagreement], Counter[str]]:
    """Judge many services, on several processes."""
    work = [(kind, seeds[i : i + 10]) for kind in kinds for i in range(0, len(seeds), 10)]
    found: list[Disagreement] = []
    counts: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for disagreements, more in pool.starmap(partial(judged, modes=modes), work):
            found += disagreements
            counts += more
    return found, counts


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, and say what disagrees."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--services", type=int, default=1000, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kind", choices=("leaky", "faults", "all"), default="all", help="which services (all)")
    parser.add_argument(
        "--modes", type=lambda x: x.split(","), default=list(MODES[:3]), help=f"some of {','.join(MODES)}"
    )
    parser.add_argument("--show", type=int, default=5, help="disagreements to show in full")
    parser.add_argument("--json", metavar="FILE", help="write counts and disagreements there; - for stdout")
    options = parser.parse_args(argv)
    kinds = ("leaky", "faults") if options.kind == "all" else (options.kind,)
    begun = time.perf_counter()
    if strange := set(options.modes) - set(MODES):
        parser.error(f"--modes: {min(strange)!r} is unknown; some of {','.join(MODES)}")
    seeds = range(options.first_seed, options.first_seed + options.services)
    found, counts = many(kinds, seeds, options.modes, options.jobs)
    seconds = time.perf_counter() - begun
    if options.json:
        text = json.dumps({"seconds": seconds, "counts": counts, "disagreements": [asdict(x) for x in found]}, indent=1)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text)
    out = sys.stderr if options.json == "-" else sys.stdout
    for disagreement in found[: options.show]:
        show(disagreement, out)
    table(found, counts, seconds, out)
    return 1 if found else 0


def show(x: Disagreement, out: TextIO) -> None:
    """Write one disagreement."""
    print(f"\n{x.kind} seed {x.seed}, logs of {x.mode}: {x.what.upper()}  {x.request}", file=out)
    for head, lines in (("said", x.said or ["nothing"]), ("true", x.true), ("logs", x.lines)):
        for line in lines:
            print(f"  {head}: {without_control(line)}", file=out)


def table(found: Sequence[Disagreement], counts: Counter[str], seconds: float, out: TextIO) -> None:
    """Write how often what was said."""
    modes = [mode for mode in MODES if any(key.startswith(f"{mode}.") for key in counts)]
    print(f"\n{'cause':<28}" + "".join(f"{mode:>24}" for mode in modes), file=out)
    for cause in CAUSE:
        cells = []
        for mode in modes:
            bad = sum(counts[f"{mode}.{cause}.{x}"] for x in ("false", "wrong", "vague"))
            said = counts[f"{mode}.{cause}"]
            cells.append(f"{said:,}" + (f" ({bad:,} bad)" if bad else "") if said else "-")
        if any(cell != "-" for cell in cells):
            print(f"{cause:<28}" + "".join(f"{cell:>24}" for cell in cells), file=out)
    print(f"{'missed':<28}" + "".join(f"{counts[f'{mode}.missed']:>24,}" for mode in modes), file=out)
    kinds = Counter((x.kind, x.mode, x.what) for x in found)
    for key, number in sorted(kinds.items()):
        print(f"  {number:,} {' '.join(key)}", file=out)
    print(
        f"{counts['services']:,} services, {counts['requests']:,} requests, {counts['late requests']:,} late, in "
        f"{seconds:.0f} s: {len(found):,} disagreements",
        file=out,
    )


if __name__ == "__main__":
    sys.exit(main())
