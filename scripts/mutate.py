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
    python -m scripts.mutate --paths asynckv/core/lease.py --sample 20 --tests tests/test_machine.py
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

TESTS: dict[str, str] = {
    "asynckv/geometry/bounds.py": "layout messages pairing plan",
    "asynckv/geometry/strides.py": "layout plan geometry",
    "asynckv/geometry/layout.py": "layout layouts register_tensors explain geometry",
    "asynckv/geometry/check.py": "layout fuzz layouts geometry",
    "asynckv/geometry/overlap.py": "layout layouts explain geometry",
    "asynckv/geometry/blocks.py": "pairing explain layout plan geometry",
    "asynckv/geometry/match.py": "sources layouts explain geometry",
    "asynckv/geometry/tables.py": "explain plan geometry",
    "asynckv/geometry/pairing.py": "pairing explain plan geometry",
    "asynckv/geometry/plan.py": "explain plan geometry",
    "asynckv/core": "tables ledger limits spent messages requests admission machine lifecycle races engine",
    "asynckv/edges": "keys sharing conformance posters nixl_edge zmq_edge process",
    "asynckv/scheduler.py": "lifecycle engine",
    "asynckv/engine": "engine lifecycle races threads arguments held",
}
"""File, or folder, to the tests that cover it, the quickest first: most mutants end at the first failure."""

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
        if isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args):
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


def _is_text(*nodes: ast.AST) -> bool:
    """Texts, lists and tuples are joined with a plus as well, and nothing else is done to them."""
    literal = ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp
    return any(isinstance(n, literal) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in nodes)


# -- running --------------------------------------------------------------------------------------------


def known_tests(path: str) -> list[str]:
    """The tests that cover a file, the quickest first."""
    own = f"tests/test_{Path(path).stem}.py"
    known = TESTS.get(path) or next((TESTS[str(p)] for p in Path(path).parents if str(p) in TESTS), "")
    names = [f"tests/test_{name}.py" for name in known.split()] or [own]
    return [name for name in names if (ROOT / name).exists()]


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


def run_tests(tree: Path, tests: Sequence[str], timeout_s: float | None) -> tuple[str, float]:
    """Run tests in a copy: `passed`, `failed` or `timeout`, and the seconds it took; `said.txt` has what they said."""
    began = time.monotonic()
    said = (tree / "said.txt").open("wb")
    child = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=said,
        stderr=said,
        start_new_session=True,  # a mutant may start children, which have to go with it
    )
    try:
        found = "passed" if child.wait(timeout_s) == 0 else "failed"
    except subprocess.TimeoutExpired:
        found = "timeout"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        said.close()
    return found, time.monotonic() - began


def judge(mutant: Mutant, tree: Path, tests: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Plant one bug, run the tests, take it out again."""
    target = tree / mutant.path
    source = target.read_text()
    try:
        target.write_text(mutant.planted(source))
        found, seconds = run_tests(tree, tests, timeout_s)
    finally:
        target.write_text(source)
    outcome = {"passed": "survived", "failed": "killed", "timeout": "timeout"}[found]
    return {"outcome": outcome, "seconds": round(seconds, 1), "diff": mutant.diff(source), **asdict(mutant)}


def play(
    sample: Sequence[Mutant], jobs: int, timeout_s: float, tests: Sequence[str] | None
) -> Iterator[dict[str, Any]]:
    """Judge every mutant, in as many copies as there are jobs.

    Raises:
        SystemExit: The tests fail without any bug.
    """
    waiting: queue.SimpleQueue[Mutant | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()
    for mutant in [*sample, *[None] * jobs]:
        waiting.put(mutant)

    def work(tree: Path) -> None:
        try:
            while (mutant := waiting.get()) is not None:
                done.put(judge(mutant, tree, tests or known_tests(mutant.path), timeout_s))
        except BaseException as exc:
            done.put(exc)

    with tempfile.TemporaryDirectory(prefix="mutate-") as home:
        trees = [Path(home, str(i)) for i in range(jobs)]
        for tree in trees:
            copy_tree(tree)
        needed = sorted({test for m in sample for test in (tests or known_tests(m.path))})
        found, seconds = run_tests(trees[0], needed, timeout_s or None)
        timeout_s = timeout_s or 3 * seconds + 30
        print(f"without a bug: {found} after {seconds:.0f} s ({' '.join(needed)})", file=sys.stderr)
        if found != "passed":
            said = (trees[0] / "said.txt").read_text(errors="replace")
            raise SystemExit(f"{said[-3000:]}\nthe tests have to pass before a bug is planted")
        for tree in trees:
            threading.Thread(target=work, args=(tree,), daemon=True).start()
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
    parser.add_argument("--list", action="store_true", help="say what could be planted, and run nothing")
    given = parser.parse_args()
    if given.again:
        rows = [json.loads(line) for line in given.again.read_text().splitlines()]
        keys = Mutant.__dataclass_fields__
        sample = [Mutant(**{k: row[k] for k in keys}) for row in rows if row.get("outcome") == "survived"]
    else:
        files = [p for each in given.paths for p in (sorted((ROOT / each).rglob("*.py")) or [ROOT / each])]
        known = [m for p in files for m in mutants(p.relative_to(ROOT).as_posix(), p.read_text())]
        if given.list or not known:
            counts = {"mutants": len(known), "kinds": dict(Counter(m.kind for m in known).most_common())}
            print(json.dumps({**counts, "files": dict(Counter(m.path for m in known).most_common())}))
            return
        random.Random(given.seed).shuffle(known)
        sample = list(itertools.islice((m for m in known if m.is_code((ROOT / m.path).read_text())), given.sample))
    if lost := sorted({m.path for m in sample if not (given.tests or known_tests(m.path))}):
        parser.error(f"no tests are known for {', '.join(lost)}; name them with --tests")
    outcomes: Counter[str] = Counter()
    for number, row in enumerate(play(sample, given.jobs, given.timeout_s, given.tests), 1):
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
