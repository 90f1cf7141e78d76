"""Plant small bugs and see whether a test notices: `python -m scripts.mutate --paths asynckv/geometry --sample 60`.

A test suite is as good as the bugs that it catches. This script plants bugs one at a time, as a tired engineer writes
them: a boundary off by one, a negated condition, a missing statement or check, two swapped calls or arguments. For each
bug it runs the tests that run its function (`scripts/reach.py` measures once which these are), and reports whether a
test failed (*killed*) or all passed (*survived*).

A survivor needs your judgement. Either no test states the rule behind the line: then write one, and run the script with
`--again` on the same results. Or the bug has no visible effect (an unused cache, a bound far above all real values):
then the mutant is *equivalent*, and perhaps the line can go.

The script works in a copy of the tree with uncommitted changes, and never touches the checkout. The folder of
`--journal` gets one JSON line per mutant in `results.jsonl`, and the measurements; an interrupted run continues from
there. The last line on stdout is the summary; progress goes to stderr. The same `--seed` takes the same sample, and
mostly the same one after the code has changed. Bugs in `asynckv/integrations/vllm` are also judged in the environment
of `tox run -e vllm` if it exists, by the tests that start no engines.

    python -m scripts.mutate --paths asynckv/geometry --list            # possible bugs, by kind and file
    python -m scripts.mutate --paths asynckv/geometry --sample 60 --seed 1 --journal /tmp/mutants
    python -m scripts.mutate --again --journal /tmp/mutants             # only the survivors, after you wrote tests
    python -m scripts.mutate --paths asynckv/core --sample 60 --services 40 --kinds "removed check" "swapped statements"
    python -m scripts.mutate --paths asynckv/core/lease.py --sample 20 --tests tests/test_machine.py
"""

from __future__ import annotations

import argparse
import ast
import configparser
import contextlib
import copy
import difflib
import functools
import hashlib
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
LARGEST = 64  # larger numbers are not changed, because they are chosen limits, and one more or less is no bug
EXCHANGED = {"min": "max", "max": "min", "any": "all", "all": "any"}
IMPORTED = (anyio, hypothesis, msgspec, numpy, structlog, zmq)
"""Modules that tests import and that get no bugs; importing them here makes every run faster."""
REMOVED = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
BUDGET_S = 120.0  # seconds of tests to choose for a mutant; the quickest and most specific tests come first
CONNECTOR, VLLM = "asynckv/integrations/vllm/", "tests/vllm/"


@dataclass(frozen=True)
class Mutant:
    """One bug: a place in a file, the code there, and its replacement."""

    path: str
    line: int
    column: int
    kind: str
    before: str
    after: str
    function: str = ""

    def planted(self, source: str) -> str:
        """Return the whole file with the bug.

        Raises:
            ValueError: The file has changed.
        """
        lines = source.encode().splitlines(keepends=True)
        at = sum(map(len, lines[: self.line - 1])) + self.column
        data = source.encode()
        if data[at : at + len(self.before.encode())] != self.before.encode():
            raise ValueError(f"{self.path}:{self.line} is not {self.before!r} any more")
        return (data[:at] + self.after.encode() + data[at + len(self.before.encode()) :]).decode()

    def is_code(self, source: str) -> bool:
        """Return True if Python can parse the file with the bug, and the result differs (not so in some f-strings)."""
        try:
            return ast.dump(ast.parse(self.planted(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False

    def diff(self, source: str) -> str:
        """Return the change as a diff."""
        lines = difflib.unified_diff(
            source.splitlines(), self.planted(source).splitlines(), self.path, self.path, lineterm="", n=1
        )
        return "\n".join(list(lines)[2:])


def mutants(path: str, source: str) -> list[Mutant]:
    """Return every bug that can be planted in a file."""
    out = []
    lines = source.encode().splitlines(keepends=True)
    tree = ast.parse(source)
    functions = list(_functions(tree))
    for node, kind, changed in _changes(tree):
        first, last = node.lineno - 1, node.end_lineno - 1
        before = b"".join(lines[first : last + 1])[node.col_offset :]
        before = before[: len(before) - len(lines[last]) + node.end_col_offset]
        # Parentheses keep the changed code one operand of a larger expression.
        after = ast.unparse(changed).strip().replace("\n", "\n" + " " * node.col_offset)
        after = after if isinstance(node, ast.stmt | ast.Constant) else f"({after})"
        within = [name for first, last, name in functions if first <= node.lineno <= last]
        out.append(Mutant(path, node.lineno, node.col_offset, kind, before.decode(), after, (within or [""])[-1]))
    return out


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[int, int, str]]:
    """Yield first and last lines of all functions with their qualified names; inner functions come later."""
    for node in ast.iter_child_nodes(tree):
        within = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.end_lineno or 0, prefix + node.name
            within += f"{node.name}.<locals>."
        elif isinstance(node, ast.ClassDef):
            within += f"{node.name}."
        yield from _functions(node, within)


def as_it_is_now(mutant: Mutant) -> Mutant | None:
    """Return the same bug in code that has moved since; None if the code is gone."""
    path = ROOT / mutant.path
    known = mutants(mutant.path, path.read_text()) if path.exists() else []
    same = [m for m in known if (m.kind, m.before, m.after) == (mutant.kind, mutant.before, mutant.after)]
    return min(same, key=lambda m: abs(m.line - mutant.line), default=None)


def _changes(tree: ast.AST) -> Iterator[tuple[Any, str, ast.AST]]:
    """Yield nodes, the kind of each change, and the changed node."""
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
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ENDS):
            yield node, "removed check", ast.Pass()
        stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        if _is_call(node) or stored or isinstance(node, REMOVED):
            yield node, "removed statement", ast.Pass()
        for _, block in ast.iter_fields(node):
            for first, second in itertools.pairwise(block if isinstance(block, list) else []):
                if _is_call(first) and _is_call(second):
                    both = copy.copy(first)
                    both.end_lineno, both.end_col_offset = second.end_lineno, second.end_col_offset
                    yield both, "swapped statements", ast.Module([second, first], [])


def _is_call(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value.value if isinstance(value, ast.Await) else value, ast.Call)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the code that runs: no texts of errors, annotations, decorators, options of classes or imports."""
    skipped: list[ast.AST] = []
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list") or (
            field == "keywords" and isinstance(tree, ast.ClassDef)
        ):
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
    """Return True if the order of arguments matters, unlike in `min` and `max`."""
    if isinstance(call.func, ast.Name) and call.func.id in ("min", "max"):
        return False
    return not any(isinstance(a, ast.Starred) for a in call.args)


def _is_text(*nodes: ast.AST) -> bool:
    """Return True for texts, lists and tuples: a plus joins them, and other operators would only raise."""
    literal = ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp
    return any(isinstance(n, literal) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in nodes)


# -- running --------------------------------------------------------------------------------------------


def copy_tree(to: Path) -> None:
    """Copy all files that git tracks or would add, in their current state."""
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


def run(tree: Path, command: Sequence[str], timeout_s: float | None, keep_bytecode: bool = False) -> str:
    """Run tests in a copy, and return `passed`, `failed` or `timeout`; their output is in `said.txt`.

    They run in a fork of this process, because it has imported the libraries: this halves the time of a short test.
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
                found, is_there = "failed" if os.waitstatus_to_exitcode(status) not in (0, 5) else "passed", False
            elif timeout_s and time.monotonic() - began > timeout_s:
                found = "timeout"
            else:
                time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if is_there:
            os.waitpid(child, 0)
    return found


def _in_copy(tree: Path, command: Sequence[str], keep_bytecode: bool) -> int:
    os.setsid()  # a mutant may start children, which must be killed with it
    said = os.open(tree / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    # Later runs use the bytecode of the run without a bug and write none. A file with a bug is newer than its bytecode,
    # so Python does not use that.
    sys.dont_write_bytecode = not keep_bytecode
    if not keep_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if command[-1].startswith(VLLM):
        python, environment = vllm(tree)
        os.execve(python, [str(python), "-m", "pytest", *PYTEST, *command], {**os.environ, **environment})
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry and Path(entry) != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("asynckv", "tests", "scripts")]:
        del sys.modules[name]
    if command[0] == "services":
        return _violations(int(command[1]))
    return int(pytest.main([*PYTEST, "-p", "scripts.mutate", "--hypothesis-seed=0", *command]))


def vllm(tree: Path) -> tuple[Path, dict[str, str]]:
    """Return the interpreter of vLLM's environment next to this one, and the variables that tox sets for it."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(tree / "tox.ini")
    folder = Path(sys.prefix).parent
    words = {"work_dir": str(folder), "tox_root": str(tree), ":": ":"}
    (section,) = (name for name in tox if name.startswith("testenv:vllm"))
    lines = re.sub(r"{(work_dir|tox_root|:)}", lambda m: words[m[1]], tox[section]["set_env"]).split("\n")
    # Lines that begin with a factor are of one version: the newest is the one that is not named.
    named = [line.removeprefix("!0.32: ") for line in lines if line and not line.startswith("0.32: ")]
    return folder / "vllm/bin/python", dict(line.split(" = ") for line in named)


def _violations(services: int) -> int:
    """Simulate services until one shows a bug; return 1 if one did."""
    simulate = importlib.import_module("tests.lab.simulation").simulate
    return int(any(simulate(seed).violation for seed in range(services)))


def pytest_configure() -> None:
    """Turn off the search for smaller examples: as a plugin of pytest, only the failure matters."""
    quick = hypothesis.settings(phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate], database=None)
    hypothesis.settings.register_profile("mutate", quick)
    hypothesis.settings.load_profile("mutate")


PYTEST = ["-x", "-q", "-p", "no:cacheprovider"]
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # for modules that are imported here already


@dataclass(frozen=True)
class Reach:
    """The functions that each test runs, and its time."""

    tests: dict[str, tuple[float, frozenset[str]]]

    def of(self, path: str, function: str = "") -> list[str]:
        """Return the tests that run a function, the quickest and most specific first.

        If no test is seen to run it, return those that run anything in the file or in files that name it. Code outside
        functions runs when the file is loaded, and some functions run only in other processes.
        """
        own = {f"{path}:{function}"}
        if not any(own & ran for _, ran in self.tests.values()):
            near = {path, *(naming := _naming(path)), *(other for each in naming for other in _naming(each))}
            own = {name for _, ran in self.tests.values() for name in ran if name.partition(":")[0] in near}
        costs = {t: (seconds + 0.02) * len(ran) for t, (seconds, ran) in self.tests.items() if own & ran}
        return sorted(costs, key=lambda test: costs[test])

    def stages(self, path: str, function: str) -> list[tuple[list[str], float]]:
        """Return the stages to run for a bug in a function until one fails, with their times.

        First come the tests in the first test's file, then the others, and last those that need vLLM.
        """
        left = BUDGET_S
        chosen: list[str] = []
        for test in self.of(path, function):
            left -= self.tests[test][0]
            if left < 0 and chosen:
                break
            chosen.append(test)
        beside = [test for test in chosen if test.startswith(VLLM)]
        ours = [test for test in chosen if test not in set(beside)]
        first = [test for test in ours if test.startswith(ours[0].partition("::")[0])]
        parts = [first, [test for test in ours if test not in set(first)], beside]
        return [(part, sum(self.tests[test][0] for test in part)) for part in parts if part]


def _naming(path: str) -> list[str]:
    """Return the package's files that name another one, because they import it or start it as a process."""
    module = path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    folder, _, stem = module.rpartition(".")
    name = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(folder)} import .*\b{stem}\b")
    return [other for other, text in sources().items() if other != path and name.search(text)]


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of the package's files by their paths."""
    return {p.relative_to(ROOT).as_posix(): p.read_text() for p in (ROOT / "asynckv").rglob("*.py")}


def measured(tree: Path, home: Path, with_vllm: bool, names: Sequence[str] | None = None) -> Reach:
    """Run tests in a copy without a bug, and record the functions that each runs, unless recorded already.

    A test file is measured again when it has changed, or when any other file than a test file has.
    """
    folders = ("tests/", "tests/lab/", *([VLLM] if with_vllm else []))
    present = [path for folder in folders for path in sorted(tree.glob(f"{folder}test_*.py"))]
    files = [*(names or [])] or [str(path.relative_to(tree)) for path in present]
    shared = [*(tree / "asynckv").rglob("*.py"), *(tree / "tests").rglob("*.py")]
    common = b"".join(path.read_bytes() for path in sorted(shared) if not path.name.startswith("test_"))
    folder = home / "reach"
    folder.mkdir(parents=True, exist_ok=True)
    notes = {
        name: folder / (Path(name).stem + "-" + hashlib.sha256(common + (tree / name).read_bytes()).hexdigest()[:16])
        for name in files
    }
    tests = {}
    for name, note in notes.items():
        if not note.exists():
            os.environ["REACHED"] = str(note)
            found = run(tree, ["-p", "scripts.reach", "--maxfail=99", name], None, keep_bytecode=True)
            print(f"{name} {found} without a bug", file=sys.stderr)
            if not note.exists():
                raise SystemExit((tree / "said.txt").read_text(errors="replace")[-3000:])
        noted = json.loads(note.read_text())
        for test, (seconds, ran) in noted["tests"].items():
            tests[test] = seconds, frozenset(noted["functions"][i] for i in ran)
    return Reach(tests)


def judge(mutant: Mutant, tree: Path, stages: Sequence[tuple[list[str], float]]) -> dict[str, Any]:
    """Plant one bug, run the tests, and remove it again."""
    target = tree / mutant.path
    source, times = target.read_text(), target.stat()
    found, by, began = "passed", "", time.monotonic()
    try:
        target.write_text(mutant.planted(source))
        for tests, seconds in stages:
            found = run(tree, tests, 3 * seconds + 30)
            said = (tree / "said.txt").read_text(errors="replace")
            if "(no match in any of" in said:  # the bug has changed the set of tests
                found = run(tree, sorted({test.partition("::")[0] for test in tests}), 3 * seconds + 60)
            if found != "passed":
                by = next(iter(re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)), "")
                break
    finally:
        target.write_text(source)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
    outcome = {"passed": "survived", "failed": "killed", "timeout": "timeout"}[found]
    took = round(time.monotonic() - began, 1)
    return {"outcome": outcome, "seconds": took, "by": by, "diff": mutant.diff(source), **asdict(mutant)}


def main() -> None:
    """List, sample, plant and judge bugs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", nargs="+", default=[], help="files or folders to plant bugs in, from the root")
    parser.add_argument("--sample", type=int, default=30, help="number of mutants to try, of all possible ones (30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample; the same seed takes the same (0)")
    parser.add_argument("--kinds", nargs="+", help="only bugs of these kinds; --list names them")
    parser.add_argument("--journal", type=Path, help="folder for results and measurements, to continue from")
    parser.add_argument("--tests", nargs="+", help="use and measure only the tests of these files")
    parser.add_argument("--again", action="store_true", help="try only the survivors of the journal again")
    parser.add_argument("--services", type=int, default=0, help="simulated services for bugs that tests of core missed")
    parser.add_argument("--list", action="store_true", help="list possible bugs, and run nothing")
    given = parser.parse_args()
    files = [p for each in given.paths for p in (sorted((ROOT / each).rglob("*.py")) or [ROOT / each])]
    known = [m for p in files for m in mutants(p.relative_to(ROOT).as_posix(), p.read_text())]
    known = [m for m in known if not given.kinds or m.kind in given.kinds]
    if given.list or not (known or given.again):
        counts = {"mutants": len(known), "kinds": dict(Counter(m.kind for m in known).most_common())}
        print(json.dumps({**counts, "files": dict(Counter(m.path for m in known).most_common())}))
        return
    with tempfile.TemporaryDirectory(prefix="mutate-") as temporary:
        home = given.journal or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        journal = home / "results.jsonl"
        rows = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        done = {Mutant(**{k: row[k] for k in Mutant.__dataclass_fields__}): row for row in rows}
        if given.again:
            gone = [mutant for mutant, row in done.items() if row["outcome"] == "survived"]
            found = [as_it_is_now(mutant) for mutant in gone]
            sample = [mutant for mutant in found if mutant is not None]
            print(f"{len(found) - len(sample)} of {len(found)} are of code that is gone", file=sys.stderr)
        else:
            known.sort(key=lambda m: hashlib.sha256(f"{given.seed}{replace(m, line=0)}".encode()).digest())
            sample = list(itertools.islice((m for m in known if m.is_code((ROOT / m.path).read_text())), given.sample))
        tree = Path(temporary, "tree")
        copy_tree(tree)
        is_beside = any(m.path.startswith(CONNECTOR) for m in sample) and vllm(tree)[0].exists()
        reach = measured(tree, home, is_beside, given.tests)
        outcomes: Counter[str] = Counter()
        for number, mutant in enumerate(sample, 1):
            row = None if given.again else done.get(mutant)
            if row is None:
                stages = reach.stages(mutant.path, mutant.function)
                if given.services and mutant.path.startswith("asynckv/core/"):
                    stages.append((["services", str(given.services)], 2.0 * given.services))
                if not stages:
                    parser.error(f"no test runs anything of {mutant.path}")
                row = judge(mutant, tree, stages)
                with journal.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                where = f"{row['path']}:{row['line']} {row['kind']} {row['by']}"
                print(f"[{number}/{len(sample)}] {row['outcome']} {row['seconds']} s  {where}", file=sys.stderr)
                if row["outcome"] == "survived":
                    print(row["diff"], file=sys.stderr)
            outcomes[row["outcome"]] += 1
    killed = outcomes["killed"] + outcomes["timeout"]
    print(json.dumps({"sampled": len(sample), **outcomes, "killed_share": round(killed / max(len(sample), 1), 3)}))


if __name__ == "__main__":
    main()
