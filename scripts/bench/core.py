"""Measure the pure core alone: no sockets, no NIXL, no event loop.

There are two kinds of figures. *Time* is CPU time of this process (median and quartiles over the rounds), for both
sides of every pull together, with each message encoded and decoded. *Instructions* are those of one operation in user
space (`perf stat`, else `valgrind`): the difference between a longer and a shorter run, without the start-up. They
repeat to a tenth of a percent even on a busy host, so compare them to find what became slower.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from asynckv.config import EngineConfig, LeaseConfig, LimitsConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.ledger import Ledger
from asynckv.core.outbox import LoadPeer, Milestone, PullReached
from asynckv.core.pull import PullRequest
from asynckv.core.rank import RankCore
from asynckv.core.readers import Identity
from asynckv.core.types import Cohort, Endpoint, KVTransferParams, Outcome, decode_params
from asynckv.core.wire import Ack, Claim, Granted, Message, Release, blocks_digest, decode_packet, encode_packet
from asynckv.errors import ConfigError
from asynckv.geometry.blocks import check_block_ids, runs_of
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.layout import Layout
from asynckv.geometry.match import assign
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import plan_read
from asynckv.geometry.tables import PeerTables
from asynckv.scheduler import PrefillRanks
from asynckv.testing.fabric import Fabric, Origin, Port
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Model
from scripts.command import check, listed, output, script

SCHEMA = 1
TURN = 32
"""Posts and plans per turn, as many as an engine fits into its time slice."""

Work = Callable[[int], None]
"""Function that repeats an operation this many times."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case to measure.

    Attributes:
        number: Operations per round.
        make: Prepares this many operations, and returns a function that does some of them.
    """

    name: str
    what: str
    number: int
    make: Callable[[int], Work]


class Side(Port):
    """One core, and the packets that wait for it."""

    def __init__(self, fabric: Fabric, name: str, layout: Layout, config: EngineConfig) -> None:
        super().__init__(fabric, f"core://{name}", name)
        identity = Identity(config.engine_id, name, f"agent-{name}", b"metadata " + name.encode(), layout, 1000)
        self.core = RankCore(identity, config)
        self.inbox: deque[tuple[Origin, bytes]] = deque()
        self.open()

    def hear(self, origin: Origin, packet: bytes) -> None:
        """Keep a packet for the next turn."""
        self.inbox.append((origin, packet))


class Pulls:
    """A decode rank that pulls from prefill ranks, in a closed loop; transfers end inside the post, as on one host.

    Args:
        requests: Number of prepared requests.
        in_flight: Number of requests without an outcome at any time.
        peers: Prefill engines, used in turn.
        announced: Announce every request a round of the loop before its pull.
        blocks, layers: Size of one request; each block is its own piece in every layer.
    """

    def __init__(
        self,
        requests: int,
        *,
        in_flight: int,
        peers: int = 1,
        announced: bool = False,
        blocks: int = 1,
        layers: int = 1,
    ) -> None:
        self.now = 0.0
        self.events = 0
        self._announced, self._in_flight = announced, in_flight
        limits = LimitsConfig(messages_per_s=1e9, message_burst=1 << 30)
        model = Model("core", (Heads(2, 32),) * layers)
        layout = model_layout(model, num_blocks=(in_flight + 1) * blocks)

        def config(name: str) -> EngineConfig:
            return EngineConfig(engine_id=name, limits=limits, lease=LeaseConfig(lease_s=3600.0, max_lease_s=7200.0))

        fabric = Fabric()
        self.decode = Side(fabric, "decode", layout, config("decode"))
        self.prefill = [Side(fabric, f"prefill{i}", layout, config(f"p{i}")) for i in range(peers)]
        source = random.Random(0)  # the same keys in every run, so that the instructions are the same
        groups = [
            PrefillRanks(
                f"p{i}",
                [Endpoint(0, side.address, side.core.identity.incarnation)],
                token_hex=lambda size: source.randbytes(size).hex(),
            )
            for i, side in enumerate(self.prefill)
        ]
        # The blocks are not adjacent, so that nothing is merged.
        self._slots = [[(0, list(range(i, (in_flight + 1) * blocks, in_flight + 1)))] for i in range(in_flight)]
        self._firsts = [decode_params(group.make_params("first", self._slots[0], 1)) for group in groups]
        self._asked = [
            (i % peers, decode_params(groups[i % peers].make_params(f"r{i}", self._slots[i % in_flight], 16 * blocks)))
            for i in range(requests)
        ]
        self._next = self._announce_next = 0
        self._free = deque(range(in_flight))
        self._slot_of: dict[str, int] = {}
        self._done = 0
        self._meet()

    def _meet(self) -> None:
        """Shake hands with every peer by a pull that is not measured, so that no request pays for it."""
        for i, side in enumerate(self.prefill):
            params = self._firsts[i]
            side.core.lend(params, 1, self._time())
            self._slot_of[f"first{i}"] = 0
            first = PullRequest(f"first{i}", [(0, self._slots[0][0][1][:1])], params)
            self.decode.core.pull(first, 0, 3600.0, self._time())
            while self.decode.core.decode.pulls:
                self._turn()
        self._free, self._done = deque(range(self._in_flight)), 0
        self._met = self._count()

    def run(self, requests: int) -> None:
        """Pull the next prepared requests."""
        upto = self._next + requests
        target = self._done + requests
        while self._done < target:
            while self._free and self._next < upto:
                self._ask(upto)
            self._turn()
        while self.decode.core.decode.pulls or any(side.inbox for side in self.prefill):
            self._turn()

    def _ask(self, upto: int) -> None:
        core = self.decode.core
        if self._announced:
            # Like a real decode engine, send the claim before there are blocks.
            while self._announce_next < min(upto, self._next + self._in_flight):
                peer, params = self._asked[self._announce_next]
                self.prefill[peer].core.lend(params, 1, self._time())
                core.announce(params.request_id, params, "", 3600.0, self._time())
                self.events += 2
                self._announce_next += 1
        peer, params = self._asked[self._next]
        if not self._announced:
            self.prefill[peer].core.lend(params, 1, self._time())
            self.events += 1
        slot = self._free.popleft()
        self._slot_of[params.request_id] = slot
        core.pull(PullRequest(params.request_id, self._slots[slot], params), 0, 3600.0, self._time())
        self.events += 1
        self._next += 1

    def _time(self) -> float:
        self.now += 1e-6
        return self.now

    def _turn(self) -> None:
        """Run one turn of every loop: arrived packets, due timers, and then the core's commands."""
        for side in (self.decode, *self.prefill):
            inbox = side.inbox
            if side is not self.decode and not inbox and side.core.next_at > self.now:
                continue
            while inbox:
                origin, data = inbox.popleft()
                side.core.receive(origin, data, self._time())
                self.events += 1
            if side.core.next_at <= self.now:
                side.core.tick(self._time())
                self.events += 1
            self._settle(side)

    def _settle(self, side: Side) -> None:
        decode = side.core.decode
        self._do(side)
        if side is self.decode:
            for _ in range(TURN):
                if (read := decode.next_read(self._time())) is not None:
                    decode.ended(TransferEnded(read.transfer_id, Ending.DONE), 0.0, self._time())
                    self.events += 2
                elif decode.admit(self._time()) is not None:
                    self.events += 1
                else:
                    break
            self._do(side)

    def _do(self, side: Side) -> None:
        core = side.core
        for to, data in core.outbox.take_packets():
            side.send(to, data)
        while commands := core.outbox.commands:
            core.outbox.commands = []
            for command in commands:
                match command:
                    case LoadPeer(peer, _):
                        core.decode.load_ended(peer, "", self._time())
                    case PullReached(pull, Milestone.ENDED):
                        assert pull.reason == "complete", pull.detail
                        self._free.append(self._slot_of.pop(pull.request_id))
                        self._done += 1
                    case _:
                        pass

    def statistics(self) -> dict[str, int]:
        """Return counts of events (calls of a core), packets, bytes and messages since the handshakes."""
        return {name: number - self._met[name] for name, number in self._count().items()}

    def _count(self) -> dict[str, int]:
        sides = (self.decode, *self.prefill)
        return {
            "events": self.events,
            "messages": sum(n for s in sides for name, n in s.core.outbox.counters.items() if name.startswith("sent.")),
            "packets": sum(side.packets_out for side in sides),
            "bytes": sum(side.bytes_out for side in sides),
        }


def _pulls(requests: int, **options: Any) -> Work:
    return Pulls(requests, **options).run


def _plan(number: int, *, blocks: int, layers: int, ranks: int, order: str, scattered: bool, theirs: int = 16) -> Work:
    """Make the plans of all remote ranks from lists of ids, and all of their posts."""
    model = Model("m", (Heads(max(8, ranks), 128),) * layers)
    here = model_layout(model, num_blocks=2 * blocks, order=order)
    there = [
        model_layout(model, tp_rank=r, tp_size=ranks, num_blocks=2 * blocks, order=order, block_size=theirs)
        for r in range(ranks)
    ]
    shares = assign(here, there)
    maps = [PeerTables(here, t, s, itertools.count(1)) for t, s in zip(there, shares, strict=True)]
    rng = np.random.default_rng(0)
    remote_blocks = -(-16 * blocks // theirs)
    local, remote = (
        (rng.permutation(2 * blocks)[:n] if scattered else np.arange(n)).tolist() for n in (blocks, remote_blocks)
    )
    offer = [BlockRuns(0, runs_of(remote))]

    def work(times: int) -> None:
        for _ in range(times):
            lists = BlockLists(check_block_ids(here, [(0, local)]), offer, 16 * blocks)
            for peer in maps:
                for _post in plan_read(peer, lists).posts(4 << 20, 512):
                    pass

    return work


def _params(blocks: int = 1) -> KVTransferParams:
    group = PrefillRanks("prefill", [Endpoint(0, "tcp://127.0.0.1:40001", "0" * 32)])
    return decode_params(group.make_params("cmpl-0123456789abcdef", [(0, list(range(0, 2 * blocks, 2)))], 16 * blocks))


def _messages(number: int, *, per_packet: int) -> Work:
    """Encode and decode a claim, its grant, a release and its acknowledgement once each."""
    params, cohort = _params(), Cohort("decode")
    digest = blocks_digest(params.groups, params.num_tokens, params.written)
    key, request_id, pull_id = params.key, params.request_id, "0123456789abcdef-1"
    kinds: list[Message] = [
        Claim(key, request_id, cohort, pull_id, 1 << 40, digest, 30.0),
        Granted(key, pull_id, 1 << 40, 10.0, 0.25),
        Release(key, request_id, cohort, pull_id, Outcome.COMPLETE),
        Ack(key, pull_id),
    ]
    packets = [[kind] * per_packet for kind in kinds]

    def work(times: int) -> None:
        for i in range(times // per_packet):
            decode_packet(encode_packet("0" * 32, "1" * 32, packets[i % 4]))

    return work


def _ledger(number: int, *, blocks: int, others: int) -> Work:
    """Take blocks for writing and give them back, while others hold blocks."""
    ledger = Ledger([blocks + others])
    for i in range(others):
        ledger.hold(f"other{i}", "lent", f"o{i}", ledger.check("lent", {0: [blocks + i]}), 0.0)
    ids = {0: np.arange(blocks, dtype=np.int64)}

    def work(times: int) -> None:
        for _ in range(times):
            ledger.hold("pull", "writing", "request", ledger.check("writing", ids), 0.0)
            ledger.drop("pull")

    return work


def _make_params(number: int, *, blocks: int) -> Work:
    group = PrefillRanks("prefill", [Endpoint(0, "tcp://127.0.0.1:40001", "0" * 32)])
    ids = list(range(0, 2 * blocks, 2))

    def work(times: int) -> None:
        for _ in range(times):
            group.make_params("cmpl-0123456789abcdef", [(0, ids)], 16 * blocks)

    return work


def _decode_params(number: int, *, blocks: int) -> Work:
    group = PrefillRanks("prefill", [Endpoint(0, "tcp://127.0.0.1:40001", "0" * 32)])
    plain = group.make_params("cmpl-0123456789abcdef", [(0, list(range(0, 2 * blocks, 2)))], 16 * blocks)

    def work(times: int) -> None:
        for _ in range(times):
            decode_params(plain)

    return work


def _geometry(**options: Any) -> Callable[[int], Work]:
    return partial(_plan, **options)


HND = {"order": "hnd", "scattered": True}
CASES = (
    *(
        Case(
            f"pull/{n}-in-flight",
            f"a whole pull of one block, {n:,} asked for",
            max(2000, 2 * n),
            partial(_pulls, in_flight=n),
        )
        for n in (1, 64, 1024, 10_000)
    ),
    Case("pull/64-announced", "the same, announced ahead", 2000, partial(_pulls, in_flight=64, announced=True)),
    Case("pull/256-of-1-peer", "256 in flight, all of one peer", 2560, partial(_pulls, in_flight=256)),
    Case("pull/256-of-256-peers", "256 in flight, one of each peer", 2560, partial(_pulls, in_flight=256, peers=256)),
    Case(
        "pull/16x32-pieces",
        "16 scattered blocks of 32 layers, 16 in flight",
        1000,
        partial(_pulls, in_flight=16, blocks=16, layers=32),
    ),
    Case("plan/1x1", "a plan: 1 block, 1 layer, 1 rank", 2000, _geometry(blocks=1, layers=1, ranks=1, **HND)),
    Case("plan/16x32", "16 scattered blocks, 32 layers", 1000, _geometry(blocks=16, layers=32, ranks=1, **HND)),
    Case("plan/1024x32", "1,024 scattered blocks, 32 layers", 50, _geometry(blocks=1024, layers=32, ranks=1, **HND)),
    Case(
        "plan/1024x32-runs",
        "1,024 blocks in one run, 32 layers",
        500,
        _geometry(blocks=1024, layers=32, ranks=1, order="hnd", scattered=False),
    ),
    Case("plan/256x32-of-8", "256 scattered blocks of 8 ranks", 30, _geometry(blocks=256, layers=32, ranks=8, **HND)),
    Case(
        "plan/256x32-of-64-tokens",
        "256 blocks of 16 tokens from blocks of 64",
        60,
        _geometry(blocks=256, layers=32, ranks=1, theirs=64, **HND),
    ),
    Case("message/alone", "one message, a packet of its own", 8000, partial(_messages, per_packet=1)),
    Case("message/of-64", "one message of 64 in a packet", 64 * 256, partial(_messages, per_packet=64)),
    Case("ledger/1", "1 block taken and given back", 4000, partial(_ledger, blocks=1, others=0)),
    Case("ledger/1-beside-10000", "the same beside 10,000 holds", 4000, partial(_ledger, blocks=1, others=10_000)),
    Case("ledger/1024", "1,024 blocks taken and given back", 2000, partial(_ledger, blocks=1024, others=0)),
    Case("params/make-16", "params of 16 scattered blocks made", 2000, partial(_make_params, blocks=16)),
    Case("params/make-1024", "of 1,024 scattered blocks", 200, partial(_make_params, blocks=1024)),
    Case("params/decode-16", "and checked on arrival", 2000, partial(_decode_params, blocks=16)),
    Case("params/decode-1024", "params of 1,024 scattered blocks checked", 200, partial(_decode_params, blocks=1024)),
)


def measure(case: Case, number: int, rounds: int) -> dict[str, Any]:
    """Time a case: microseconds of CPU per operation, and for whole pulls also the counts."""
    work = case.make(number * (rounds + 1))
    work(number)
    took = []
    for _ in range(rounds):
        gc.collect()
        began = time.process_time()
        work(number)
        took.append((time.process_time() - began) / number * 1e6)
    quartiles = statistics.quantiles(took, n=4) if rounds > 1 else [took[0]] * 3
    found: dict[str, Any] = {"us": quartiles[1], "us_low": quartiles[0], "us_high": quartiles[2]}
    if isinstance(pulls := getattr(work, "__self__", None), Pulls):
        counts = pulls.statistics()
        total = number * (rounds + 1)
        found |= {name: counts[name] / total for name in ("events", "messages", "packets", "bytes")}
        found["events_per_s"] = found["events"] / found["us"] * 1e6
        found["messages_per_s"] = found["messages"] / found["us"] * 1e6
    return found


def run_child(name: str, prepared: int, number: int) -> None:
    """Do some operations of a case and nothing else, for an outer counter."""
    case = next(c for c in CASES if c.name == name)
    work = case.make(prepared)
    gc.collect()
    work(number)


def counter() -> str:
    """Return the tool that counts instructions here: `perf`, `valgrind`, or an empty text."""
    for tool in ("perf", "valgrind"):
        if shutil.which(tool) and _counted(tool, [sys.executable, "-c", ""]) is not None:
            return tool
    return ""


def instructions(tool: str, case: Case, number: int) -> float | None:
    """Return the instructions per operation in user space; None if they could not be counted."""
    few, many = (
        _counted(tool, [sys.executable, "-m", "scripts.bench", "core", "--child", case.name, str(2 * number), str(n)])
        for n in (number, 2 * number)
    )
    return None if few is None or many is None else (many - few) / number


def _counted(tool: str, command: Sequence[str]) -> int | None:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if tool == "perf":
        argv, pattern = ["perf", "stat", "-x,", "-e", "instructions:u", *command], r"^(\d+),[^,]*,instructions:u"
    else:
        out = "--callgrind-out-file=/dev/null"
        argv, pattern = ["valgrind", "--tool=callgrind", out, *command], r"Collected : (\d+)"
    if shutil.which("setarch"):
        # Random addresses would change the order of objects in sets. Valgrind does not follow children.
        argv = ["setarch", "-R", *argv]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    found = re.search(pattern, done.stderr, re.MULTILINE)
    return int(found[1]) if done.returncode == 0 and found else None


def show(report: Mapping[str, Any], old: Mapping[str, Any] | None, console: Console) -> None:
    """Print the table, with ratios to an older one if given."""
    table = Table(box=None, padding=(0, 2))
    for title in ("case", "CPU µs", "quartiles", "instructions", "events", "messages", "packets", "what"):
        table.add_column(title, justify="left" if title in ("case", "what") else "right", no_wrap=True)
    if old is not None:
        table.add_column("CPU, new/old", justify="right")
        table.add_column("instructions, new/old", justify="right")
    for name, row in report["cases"].items():
        cells = [name, f"{row['us']:,.2f}", f"{row['us_low']:,.2f}–{row['us_high']:,.2f}", _whole(row["instructions"])]
        cells += [f"{row[k]:.2f}" if k in row else "" for k in ("events", "messages", "packets")]
        cells.append(row["what"])
        if old is not None:
            before = old["cases"].get(name, {})
            for key in ("us", "instructions"):
                was, now = before.get(key), row.get(key)
                cells.append(f"{now / was:.3f}" if was and now else "")
        table.add_row(*cells)
    console.print(table)
    counted = f"counted by {report['counter']}" if report["counter"] else "not counted (not asked for, or no perf here)"
    console.print(f"Per operation, both sides of a pull together. Instructions {counted}.")


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def worse(report: Mapping[str, Any], old: Mapping[str, Any], percent: float) -> list[str]:
    """Return the cases that need more instructions than before, by more than `percent`."""
    found = []
    for name, row in report["cases"].items():
        was, now = old["cases"].get(name, {}).get("instructions"), row["instructions"]
        if was and now and now > was * (1 + percent / 100):
            found.append(f"{name} takes {now:,.0f} instructions, {now / was - 1:.1%} more than {was:,.0f}")
    return found


def earlier(path: Path, scale: float) -> dict[str, Any]:
    """Read the report to compare with.

    Raises:
        ConfigError: The file is not a report, or was made with other settings.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        is_ours, was = found["schema"] == SCHEMA and isinstance(found["cases"], dict), float(found["scale"])
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise ConfigError(f"--compare: this is not a report of this benchmark: {exc!r}") from exc
    check(is_ours, "--compare: the report is of another version; measure the old tree again")
    check(was == scale, f"--compare: the report was made with --scale {was:g}; give the same")
    return found


def bench(
    cases: Annotated[str, typer.Option(metavar="GLOBS", help="Cases, comma-separated: 'pull/*,ledger/1'.")] = "*",
    rounds: Annotated[int, typer.Option(metavar="N", help="Timed rounds of each case.")] = 5,
    scale: Annotated[float, typer.Option(metavar="SHARE", help="Share of each case's operations.")] = 1.0,
    no_instructions: Annotated[bool, typer.Option("--no-instructions", help="Measure only the time.")] = False,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write the report; - is stdout, without the table.")
    ] = None,
    compare: Annotated[Path | None, typer.Option(metavar="OLD.json", help="Show ratios to an earlier report.")] = None,
    tolerance: Annotated[float, typer.Option(metavar="PERCENT", help="Allowed growth with --compare.")] = 5.0,
    child: Annotated[tuple[str, int, int] | None, typer.Option(hidden=True)] = None,
) -> int:
    """Measure the cost of the pure core: CPU time, and instructions if perf or valgrind can count them.

    Figures are for both sides of every pull together, with every message encoded and decoded. Instructions repeat to a
    tenth of a percent even on a busy host, so compare those. All cases take three minutes.
    """
    if child:
        run_child(*child)
        return 0
    check(rounds >= 1, f"--rounds {rounds} must be 1 or more")
    check(0 < scale <= 100, f"--scale {scale:g} is outside (0, 100]")
    chosen = [c for c in CASES if any(fnmatch.fnmatchcase(c.name, g.strip()) for g in cases.split(","))]
    check(bool(chosen), f"--cases {cases!r} matches none of {', '.join(c.name for c in CASES)}")
    old = earlier(compare, scale) if compare else None
    errors = Console(stderr=True)
    console = Console() if sys.stdout.isatty() else Console(width=200)  # nothing is cut off in a pipe
    tool = "" if no_instructions else counter()
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "scale": scale,
        "counter": tool,
        "python": sys.version.split()[0],
        "cases": {},
    }
    with output(json_to) if json_to else contextlib.nullcontext() as out:
        for case in chosen:
            errors.print(f"{case.name} ...", style="dim", highlight=False)
            number = max(64, int(case.number * scale))
            row = measure(case, number, rounds) | {"what": case.what, "number": number}
            row["instructions"] = instructions(tool, case, number) if tool else None
            report["cases"][case.name] = row
        if out:
            print(json.dumps(report, indent=2), file=out)
    if json_to != "-":
        show(report, old, console)
    slower = worse(report, old, tolerance) if old else []
    for text in slower:
        errors.print(text, style="red", highlight=False)
    return 1 if slower else 0


EPILOG = f"""
[bold]Cases[/bold]

{listed({case.name: case.what for case in CASES})}

[bold]Examples[/bold]

  python -m scripts.bench core --json old.json

  python -m scripts.bench core --compare old.json

  python -m scripts.bench core --cases 'pull/*' --json - --no-instructions

[bold]Exit status[/bold]  0 measured, 1 instructions grew by more than --tolerance, 2 bad input, 130 Ctrl-C
"""
main = script(bench, EPILOG)
