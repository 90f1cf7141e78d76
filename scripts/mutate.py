"""Plant small bugs and see whether a test notices: `python -m scripts.mutate --paths asynckv/geometry --sample 60`.

A test suite is as good as the bugs that it catches. This script plants bugs one at a time, the kind that a tired
engineer writes: a boundary off by one, a condition the wrong way round, a statement forgotten, two arguments exchanged.
For each it runs the tests of that file and says whether one failed (*killed*) or all passed (*survived*).

A survivor is a question to you. Either no test states the rule that the line keeps: write it, run the script with
`--again` on the same results, and see it killed. Or nothing can be told from outside (a cache that is never asked, a
bound far above all that can occur): then the mutant is *equivalent*, and perhaps the line can go.

It works in a copy of the tree, uncommitted changes included, and never touches the checkout. One JSON line per mutant
goes to stdout, the last one sums up; progress goes to stderr. The same `--seed` takes the same sample of the same code.

    python -m scripts.mutate --paths asynckv/geometry --list            # what could be planted, by kind and file
    python -m scripts.mutate --paths asynckv/geometry --sample 60 --seed 1 > results.jsonl
    python -m scripts.mutate --again results.jsonl                      # the survivors only, after you wrote tests
    python -m scripts.mutate --paths asynckv/core --sample 60 --quick --services 40   # what dies soon, first
    python -m scripts.mutate --paths asynckv/core/lease.py --sample 20 --tests tests/test_machine.py
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import importlib
import itertools
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio._backends._asyncio
import hypothesis.internal.conjecture.engine
import hypothesis.stateful
import msgspec
import numpy.random
import pytest
import structlog
import zmq.asyncio

ROOT = Path(__file__).resolve().parent.parent

TESTS: dict[str, str] = {
    "asynckv/geometry/bounds.py": "layout messages pairing | plan",
    "asynckv/geometry/strides.py": "layout geometry | plan",
    "asynckv/geometry/layout.py": "layouts layout register_tensors explain | geometry",
    "asynckv/geometry/check.py": "layouts layout | fuzz geometry",
    "asynckv/geometry/overlap.py": "layouts explain layout | geometry",
    "asynckv/geometry/blocks.py": "explain pairing prefill layout | plan geometry",
    "asynckv/geometry/match.py": "layouts sources explain layout | geometry",
    "asynckv/geometry/tables.py": "explain pairing | plan geometry",
    "asynckv/geometry/pairing.py": "explain pairing | plan geometry",
    "asynckv/geometry/plan.py": "explain pairing | plan geometry",
    "asynckv/geometry/packed.py": "packed",
    "asynckv/geometry/kept.py": "packed",
    "asynckv/core/lease.py": "lease tables rows held prefill requests sources | machine races lifecycle engine",
    "asynckv/core/ledger.py": "ledger prefill requests sources | machine races lifecycle engine",
    "asynckv/core/spent.py": "spent requests | machine lifecycle",
    "asynckv/core/limits.py": "limits requests | machine lifecycle engine",
    "asynckv/core/wire.py": "messages limits lease | fuzz arguments machine zmq_edge",
    "asynckv/core/types.py": "messages sources requests | fuzz arguments engine",
    "asynckv/core/prefill.py": "prefill pull lease sources requests rows | machine races lifecycle engine",
    "asynckv/core/lifecycle.py": "rows tables | lifecycle engine",
    "asynckv/core/flow.py": "queue tables rows admission flow sources requests | machine races lifecycle engine",
    "asynckv/core/pull.py": "rows pull tables proof sources requests admission held races | machine lifecycle engine",
    "asynckv/core/source.py": "pull proof sources requests rows races | machine lifecycle engine",
    "asynckv/core/attempts.py": "rows requests sources | machine races lifecycle engine",
    "asynckv/core/peer.py": "tables peers rows requests limits sources races | machine lifecycle engine",
    "asynckv/core/peers.py": "peers sources requests races | machine lifecycle engine",
    "asynckv/core/readers.py": "agents peers requests limits | machine lifecycle engine",
    "asynckv/core/outbox.py": "messages requests limits | machine lifecycle engine",
    "asynckv/core/watch.py": "held requests | machine races lifecycle engine",
    "asynckv/offload": "offload_catalogue offload_parts | offload_machine +",
    "asynckv/core": "requests sources rows pairing admission held races pull | messages machine lifecycle engine",
    "asynckv/edges/zmq.py": "keys zmq_edge | conformance arguments",
    "asynckv/edges/sharing.py": "sharing",
    "asynckv/edges/choice.py": "sharing | conformance engine",
    "asynckv/edges/transports.py": "sharing",
    "asynckv/edges/torch.py": "register_tensors | real_models",
    "asynckv/edges/clock.py": "clock manual_clock | lifecycle engine",
    "asynckv/edges/keeper.py": "keeper | + process",
    "asynckv/edges/process.py": "keeper process | + conformance process",
    "asynckv/edges/process_wire.py": "process keeper | + conformance process",
    "asynckv/edges/process_child.py": "process | + conformance process",
    "asynckv/edges/process_main.py": "sharing | + conformance process",
    "asynckv/edges/posters.py": "conformance nixl_edge posters",
    "asynckv/edges/nixl_raw.py": "bench_floor | + bench_floor",
    "asynckv/edges": "conformance nixl_edge process | posters sharing",
    "asynckv/scheduler.py": "lifecycle engine",
    "asynckv/engine": "engine lifecycle races threads arguments held",
}
"""File, or folder, to the tests that cover it, the quickest first: most mutants end at the first failure.

What stands after the bar runs only for what survived the tests before it; with a plus, slow tests too.
"""

OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
LARGEST = 64
"""Numbers above it stay: they are limits that somebody chose, and one more or less is no bug."""
EXCHANGED = {"min": "max", "max": "min", "any": "all", "all": "any"}
IMPORTED = (anyio, hypothesis, msgspec, numpy, structlog, zmq)
"""What tests import and no bug is planted in."""
REMOVED = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Mutant:
    """One bug: what stands at a place of a file, and what is put there instead."""

    path: str
    line: int
    column: int
    kind: str
    before: str
    after: str

    def planted(self, source: str) -> str:
        """The whole file with it.

        Raises:
            ValueError: The file is another one by now.
        """
        lines = source.encode().splitlines(keepends=True)
        at = sum(map(len, lines[: self.line - 1])) + self.column
        data = source.encode()
        if data[at : at + len(self.before.encode())] != self.before.encode():
            raise ValueError(f"{self.path}:{self.line} is not {self.before!r} any more")
        return (data[:at] + self.after.encode() + data[at + len(self.before.encode()) :]).decode()

    def is_code(self, source: str) -> bool:
        """Whether Python reads the file with it, and as something else: not so, say, within some f-strings."""
        try:
            return ast.dump(ast.parse(self.planted(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False

    def diff(self, source: str) -> str:
        """The change, for people."""
        lines = difflib.unified_diff(
            source.splitlines(), self.planted(source).splitlines(), self.path, self.path, lineterm="", n=1
        )
        return "\n".join(list(lines)[2:])


def mutants(path: str, source: str) -> list[Mutant]:
    """Every bug that can be planted in a file."""
    out = []
    lines = source.encode().splitlines(keepends=True)
    for node, kind, changed in _changes(ast.parse(source)):
        first, last = node.lineno - 1, node.end_lineno - 1
        before = b"".join(lines[first : last + 1])[node.col_offset :]
        before = before[: len(before) - len(lines[last]) + node.end_col_offset]
        # Whatever is exchanged inside a larger expression stays one operand of it.
        after = ast.unparse(changed) if isinstance(node, ast.stmt | ast.Constant) else f"({ast.unparse(changed)})"
        out.append(Mutant(path, node.lineno, node.col_offset, kind, before.decode(), after))
    return out


def as_it_is_now(mutant: Mutant) -> Mutant | None:
    """The same bug in code that has moved since; None if it is gone."""
    path = ROOT / mutant.path
    known = mutants(mutant.path, path.read_text()) if path.exists() else []
    same = [m for m in known if (m.kind, m.before, m.after) == (mutant.kind, mutant.before, mutant.after)]
    return min(same, key=lambda m: abs(m.line - mutant.line), default=None)


def _changes(tree: ast.AST) -> Iterator[tuple[Any, str, ast.AST]]:
    """Nodes, what is done to them, and what they become."""
    for node in _code(tree):
        match node:
            case ast.Compare():
                for i, op in enumerate(node.ops):
                    yield node, "comparison", _with(node, "ops", i, OPPOSITE[type(op)]())
            case ast.BoolOp():
                changed = copy.copy(node)
                changed.op = OPPOSITE[type(node.op)]()  # type: ignore[assignment]
                yield node, "and, or", changed
            case ast.BinOp(left=left, right=right) if type(node.op) in OPPOSITE and not _is_text(left, right):
                changed_op = copy.copy(node)
                changed_op.op = OPPOSITE[type(node.op)]()  # type: ignore[assignment]
                yield node, "arithmetic", changed_op
            case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
                yield node, "sign", operand
            case ast.Constant(value=bool(value)):
                yield node, "constant", ast.Constant(not value)
            case ast.Constant(value=int(value)) if value <= LARGEST:
                yield node, "constant", ast.Constant(value + 1)
                if value > 0:
                    yield node, "constant", ast.Constant(value - 1)
            case ast.Call(func=ast.Name(id=name)) if name in EXCHANGED:
                changed_call = copy.copy(node)
                changed_call.func = ast.Name(EXCHANGED[name])
                yield node, "exchanged function", changed_call
            case _:
                pass
        if isinstance(node, ast.Call) and len(node.args) > 1 and _has_order(node):
            swapped = copy.copy(node)
            swapped.args = [node.args[1], node.args[0], *node.args[2:]]
            yield node, "swapped arguments", swapped
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test, "negated condition", ast.UnaryOp(ast.Not(), node.test)
        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield test, "negated condition", ast.UnaryOp(ast.Not(), test)
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        if is_call or stored or isinstance(node, REMOVED):
            yield node, "removed statement", ast.Pass()


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs: no texts of errors, no annotations of functions, no decorators, imports or lists of names."""
    skipped: list[ast.AST] = []
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list"):
            skipped += value if isinstance(value, list) else [value]
    for child in ast.iter_child_nodes(tree):
        if child in skipped or isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if isinstance(child, ast.BinOp) and isinstance(child.op, ast.LShift):
            continue  # `1 << 18` is one of the large numbers
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _code(child)


def _with(node: ast.Compare, field: str, index: int, value: ast.AST) -> ast.AST:
    changed = copy.copy(node)
    values = list(getattr(node, field))
    values[index] = value
    setattr(changed, field, values)
    return changed


def _has_order(call: ast.Call) -> bool:
    """Other arguments first are another call: not so of `min` and `max`."""
    if isinstance(call.func, ast.Name) and call.func.id in ("min", "max"):
        return False
    return not any(isinstance(a, ast.Starred) for a in call.args)


def _is_text(*nodes: ast.AST) -> bool:
    """Texts, lists and tuples are joined with a plus as well, and nothing else is done to them."""
    literal = ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp
    return any(isinstance(n, literal) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in nodes)


# -- running --------------------------------------------------------------------------------------------


def known_tests(path: str) -> list[list[str]]:
    """The tests that cover a file, the quickest first: those that begin, and those that follow if they pass."""
    known = TESTS.get(path) or next((TESTS[str(p)] for p in Path(path).parents if str(p) in TESTS), Path(path).stem)
    out = []
    for stage in known.split("|"):
        names = [name for name in stage.split() if (ROOT / f"tests/test_{name}.py").exists()]
        if names:
            out.append([*(["-m", "not gpu"] if "+" in stage else []), *(f"tests/test_{name}.py" for name in names)])
    return out


def copy_tree(to: Path) -> None:
    """Copy what git knows or would add, as it is now."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, names.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run(tree: Path, command: Sequence[str], timeout_s: float | None, keep_bytecode: bool = False) -> tuple[str, float]:
    """Run tests in a copy: `passed`, `failed` or `timeout`, and the seconds it took; `said.txt` has what they said.

    In a fork of this process, which has imported all that is not under test: half of what a short test takes.
    """
    began = time.monotonic()
    if (child := os.fork()) == 0:
        try:
            os._exit(_in_copy(tree, command, keep_bytecode))
        finally:
            os._exit(1)
    found, is_there = "", True
    try:
        while not found:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                found, is_there = "passed" if status == 0 else "failed", False
            elif timeout_s and time.monotonic() - began > timeout_s:
                found = "timeout"
            else:
                time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if is_there:
            os.waitpid(child, 0)
    return found, time.monotonic() - began


def _in_copy(tree: Path, command: Sequence[str], keep_bytecode: bool) -> int:
    os.setsid()  # a mutant may start children, which have to go with it
    said = os.open(tree / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    # What the run without a bug has compiled is good for all that follow: they write none, and a file with a bug in it
    # is younger than what was compiled of it.
    sys.dont_write_bytecode = not keep_bytecode
    if not keep_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry and Path(entry) != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("asynckv", "tests", "scripts")]:
        del sys.modules[name]
    if command[0] == "services":
        return _violations(int(command[1]))
    return int(pytest.main(list(command)))


def _violations(services: int) -> int:
    """Simulate services until one shows a bug; whether one did."""
    simulate = importlib.import_module("asynckv.testing.simulation").simulate
    return int(any(simulate(seed).violation for seed in range(services)))


def pytest_configure() -> None:
    """As a plugin of pytest: a failure is enough, the smallest example of it is of no use here."""
    quick = hypothesis.settings(phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate], database=None)
    hypothesis.settings.register_profile("mutate", quick)
    hypothesis.settings.load_profile("mutate")


def commands(path: str, tests: Sequence[str] | None, services: int, quick: bool) -> list[list[str]]:
    """What is run for a mutant of a file, one after the other, until something fails."""
    stages = [list(tests)] if tests else known_tests(path)[: 1 if quick else None]
    if len(stages[0]) > 1 and not tests:
        stages[:1] = [stages[0][:1], stages[0][1:]]  # the first alone: to collect the others takes as long as to run it
    out = [[*PYTEST, *stage] for stage in stages]
    if services and path.startswith("asynckv/core/"):
        out.append(["services", str(services)])
    return out


PYTEST = ["-x", "-q", "-p", "no:cacheprovider", "-p", "scripts.mutate", "--hypothesis-seed=0"]
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported here already


def judge(mutant: Mutant, tree: Path, stages: Sequence[Sequence[str]], timeout_s: float) -> dict[str, Any]:
    """Plant one bug, run the tests, take it out again."""
    target = tree / mutant.path
    source, times = target.read_text(), target.stat()
    found, seconds = "passed", 0.0
    try:
        target.write_text(mutant.planted(source))
        for stage in stages:
            found, took = run(tree, stage, timeout_s)
            seconds += took
            if found != "passed":
                break
    finally:
        target.write_text(source)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
    outcome = {"passed": "survived", "failed": "killed", "timeout": "timeout"}[found]
    return {"outcome": outcome, "seconds": round(seconds, 1), "diff": mutant.diff(source), **asdict(mutant)}


def play(
    sample: Sequence[Mutant], jobs: int, timeout_s: float, stages: Callable[[str], list[list[str]]]
) -> Iterator[dict[str, Any]]:
    """Judge every mutant, in as many copies as there are jobs.

    Raises:
        SystemExit: The tests fail without any bug.
    """
    waiting: queue.SimpleQueue[Mutant | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()
    for mutant in [*sample, *[None] * jobs]:
        waiting.put(mutant)

    def work(tree: Path, limit_s: float) -> None:
        try:
            while (mutant := waiting.get()) is not None:
                done.put(judge(mutant, tree, stages(mutant.path), limit_s))
        except BaseException as exc:
            done.put(exc)

    with tempfile.TemporaryDirectory(prefix="mutate-") as home:
        trees = [Path(home, str(i)) for i in range(jobs)]
        for tree in trees:
            copy_tree(tree)
        # Every test once, and not once for each file that it covers.
        needed = sorted({word for path in {m.path for m in sample} for stage in stages(path) for word in stage})
        tests = [word for word in needed if word.endswith(".py")]
        found, seconds = run(trees[0], [*PYTEST, *tests], None, keep_bytecode=True)
        print(f"without a bug: {found} after {seconds:.0f} s ({' '.join(tests)})", file=sys.stderr)
        if found != "passed":
            said = (trees[0] / "said.txt").read_text(errors="replace")
            raise SystemExit(f"{said[-3000:]}\nthe tests have to pass before a bug is planted")
        for tree in trees:
            threading.Thread(target=work, args=(tree, timeout_s or 3 * seconds + 30), daemon=True).start()
        for _ in sample:
            row = done.get()
            if isinstance(row, BaseException):
                raise row
            yield row


def main() -> None:
    """List, sample, plant, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", nargs="+", default=[], help="files or folders to plant bugs in, from the root")
    parser.add_argument("--sample", type=int, default=30, help="how many of all possible mutants (30)")
    parser.add_argument("--seed", type=int, default=0, help="which of them; the same seed takes the same ones (0)")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that are tested at once (1)")
    parser.add_argument(
        "--timeout-s", type=float, default=0.0, help="when tests hang (three times what they took without a bug)"
    )
    parser.add_argument("--tests", nargs="+", help="tests to run instead of those that the script knows for a file")
    parser.add_argument("--again", type=Path, help="plant what survived in these results again, and nothing else")
    parser.add_argument("--quick", action="store_true", help="only the tests that begin, of those known for a file")
    parser.add_argument("--services", type=int, default=0, help="simulated services for what the tests of core missed")
    parser.add_argument("--list", action="store_true", help="say what could be planted, and run nothing")
    given = parser.parse_args()
    if given.again:
        rows = [json.loads(line) for line in given.again.read_text().splitlines()]
        survived = [row for row in rows if row.get("outcome") == "survived"]
        found = [as_it_is_now(Mutant(**{k: row[k] for k in Mutant.__dataclass_fields__})) for row in survived]
        sample = [mutant for mutant in found if mutant is not None]
        print(f"{len(found) - len(sample)} of {len(found)} are of code that is gone", file=sys.stderr)
    else:
        files = [p for each in given.paths for p in (sorted((ROOT / each).rglob("*.py")) or [ROOT / each])]
        known = [m for p in files for m in mutants(p.relative_to(ROOT).as_posix(), p.read_text())]
        if given.list or not known:
            counts = {"mutants": len(known), "kinds": dict(Counter(m.kind for m in known).most_common())}
            print(json.dumps({**counts, "files": dict(Counter(m.path for m in known).most_common())}))
            return
        random.Random(given.seed).shuffle(known)
        sample = list(itertools.islice((m for m in known if m.is_code((ROOT / m.path).read_text())), given.sample))

    def stages(path: str) -> list[list[str]]:
        return commands(path, given.tests, given.services, given.quick)

    if lost := sorted({m.path for m in sample if not stages(m.path)}):
        parser.error(f"no tests are known for {', '.join(lost)}; name them with --tests")
    outcomes: Counter[str] = Counter()
    for number, row in enumerate(play(sample, given.jobs, given.timeout_s, stages), 1):
        outcomes[row["outcome"]] += 1
        print(json.dumps(row), flush=True)
        where = f"{row['path']}:{row['line']} {row['kind']}"
        print(f"[{number}/{len(sample)}] {row['outcome']} {row['seconds']} s  {where}", file=sys.stderr)
        if row["outcome"] == "survived":
            print(row["diff"], file=sys.stderr)
    killed = outcomes["killed"] + outcomes["timeout"]
    print(json.dumps({"sampled": len(sample), **outcomes, "killed_share": round(killed / max(len(sample), 1), 3)}))


if __name__ == "__main__":
    main()
