"""A plugin of pytest that records which functions of the package each test runs: `-p scripts.reach`.

`scripts.mutate` judges a bug by the tests that run its function; `scripts.tests_of` prints their files. The variable
`REACHED` names the file for the result: each test's seconds and functions. Functions in child processes are not seen.
This module needs only pytest, because it also runs in vLLM's environment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(ROOT / "asynckv") + os.sep
_ran: set[Any] = set()
_unfit: set[str] = set()
_functions: dict[str, int] = {}
_tests: dict[str, tuple[float, list[int]]] = {}


def _called(frame: FrameType, event: str, arg: object) -> None:
    _ran.add(frame.f_code)  # None is returned, so that no lines are traced


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that start engines of vLLM, because these run for minutes in other processes."""
    items[:] = [item for item in items if "server" not in getattr(item, "fixturenames", ())]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        _unfit.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace one test with its set-up and tear-down."""
    _ran.clear()
    began = time.perf_counter()
    threading.settrace(_called)
    sys.settrace(_called)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        if item.nodeid not in _unfit:
            _note(
                str(item.path.relative_to(ROOT)) + item.nodeid[item.nodeid.index("::") :], time.perf_counter() - began
            )


def _note(test: str, seconds: float) -> None:
    ours = [code for code in list(_ran) if code.co_filename.startswith(PACKAGE)]
    names = {f"asynckv/{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}" for code in ours}
    _tests[test] = round(seconds, 3), sorted(_functions.setdefault(name, len(_functions)) for name in names)


def pytest_sessionfinish() -> None:
    """Write the result."""
    Path(os.environ["REACHED"]).write_text(json.dumps({"functions": list(_functions), "tests": _tests}))
