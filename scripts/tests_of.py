"""Print the tests that run the code of a file: `python -m scripts.tests_of asynckv/core/lease.py`.

The output is commands, the quickest tests first. It comes from `tests/data/reached.json`, which
`python -m scripts.tests_of --measure` writes: that runs all tests except slow ones, and records the functions that each
runs (`scripts/reach.py`). For every file it keeps a few test files, which together run every function of it that any
test runs, and those of any room that run its functions most often for their time. A file that no test is seen to run
gets the tests of the files that name it.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from asynckv.errors import ConfigError
from scripts import command
from scripts.mutate import CONNECTOR, ROOT, VLLM, Reach, copy_tree, measured, sources, vllm

RECORD = ROOT / "tests/data/reached.json"  # test files of every file of the package, the quickest first
TIMES = 3  # kept test files that run each function, if there are as many
MOST = 6  # test files that are kept because their tests run the file's functions most often per second
START_S = 5.0  # added to the seconds of each test file, so that a few quick tests do not count for many


def known_tests(path: str) -> list[str]:
    """Return the test files for a file, or for all files of a folder, the quickest first."""
    record: dict[str, list[str]] = json.loads(RECORD.read_text())
    return list(dict.fromkeys(t for name in record if Path(name).is_relative_to(path) for t in record[name]))


def kept(reach: Reach, paths: Sequence[str]) -> dict[str, list[str]]:
    """Return specific and quick test files for each file, which run each of its functions three times if possible."""
    runs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    times: Counter[tuple[str, str]] = Counter()
    breadth: dict[str, set[str]] = defaultdict(set)
    for test, (took, functions) in reach.tests.items():
        tests = test.partition("::")[0]
        breadth[tests] |= functions
        for function in functions:
            path = function.partition(":")[0]
            if path.startswith(CONNECTOR) or not tests.startswith(VLLM):
                runs[path][tests].add(function)
                seconds[path, tests] += took / len(functions)
                times[path, tests] += 1
    out = {}
    for path in paths:
        by_tests = runs[path]
        left = Counter(function for functions in by_tests.values() for function in functions)
        left = Counter({function: min(TIMES, count) for function, count in left.items()})
        chosen: list[str] = []
        while +left:
            gains = {
                tests: sum(left[f] > 0 for f in functions)
                * len(functions)
                / len(breadth[tests])
                / (seconds[path, tests] + 1)
                for tests, functions in by_tests.items()
                if tests not in chosen
            }
            chosen.append(max(gains, key=lambda tests: gains[tests]))
            left.subtract(by_tests[chosen[-1]])
        often = sorted(by_tests, key=lambda tests: -times[path, tests] / (seconds[path, tests] + START_S))[:MOST]
        chosen += [tests for tests in often if tests not in chosen]
        # A file may have no functions, or run only in other processes.
        chosen = chosen or list(dict.fromkeys(test.partition("::")[0] for test in reach.of(path)))[:TIMES]
        out[path] = sorted(chosen, key=lambda t: (t.startswith(VLLM), seconds[path, t]))
    return out


def say(
    path: Annotated[str, typer.Argument(metavar="FILE", help="A file or folder below asynckv/.")] = "asynckv",
    measure: Annotated[bool, typer.Option(help="Measure again which tests run which files (takes minutes).")] = False,
) -> None:
    """Print commands for the tests that run the code of a file, the quickest first.

    Slow tests, and code that runs in child processes of tests, are not considered.
    """
    if measure:
        with tempfile.TemporaryDirectory(prefix="tests-of-") as home:
            copy_tree(Path(home, "tree"))
            reach = measured(Path(home, "tree"), Path(home), with_vllm=vllm(ROOT)[0].exists())
        RECORD.write_text(json.dumps(kept(reach, sorted(sources())), indent=1) + "\n")
    name = Path(path).resolve()
    if not name.exists():
        raise ConfigError(f"{path}: there is no such file")
    if not name.is_relative_to(ROOT / "asynckv"):
        raise ConfigError(f"{path} is not in {ROOT / 'asynckv'}")
    if not (known := known_tests(str(name.relative_to(ROOT)))):
        raise ConfigError(f"no test runs any code of {path}; if it is new, run this with --measure")
    for tests in (t for t in known if not t.startswith(VLLM)):
        print("pytest", tests)
    if beside := [t for t in known if t.startswith(VLLM)]:
        print("tox run -e vllm --", shlex.join(beside))


EPILOG = """
[bold]Example[/bold]

  python -m scripts.tests_of asynckv/core/lease.py

  python -m scripts.tests_of asynckv/core/lease.py | sh -ex

[bold]Exit status[/bold]  0 tests found, 2 none, or bad input
"""
main = command.script(say, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
