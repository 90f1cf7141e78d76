"""Fixtures and hooks that all tests share."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from asynckv.observe.log import Recorder
from asynckv.observe.setup import configure_logging
from tests.commands import Command
from tests.documented import Lines, problems
from tests.engines import Bench

# How long an example takes says what else the machine does.
settings.register_profile("repeatable", deadline=None, derandomize=True)  # a test that fails once fails again
settings.load_profile("repeatable")

# Many tests start processes. Where these may not write down what they have compiled, each compiles the package anew,
# and that takes longer than most of these tests: so they share a folder of their own.
COMPILED = tempfile.TemporaryDirectory(prefix="akv-pyc-") if os.environ.pop("PYTHONDONTWRITEBYTECODE", "") else None
if COMPILED is not None:
    os.environ["PYTHONPYCACHEPREFIX"] = COMPILED.name

# Modules and tests are there to the end. The collector does not look through them as they are loaded, nor in any test.
gc.disable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Every test that is a coroutine runs on the loop of `anyio_backend`: none has to say so."""
    session.add_marker("anyio")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def anyio_backend() -> str:
    """asyncio only: the control plane's sockets are driven by its loop."""
    return "asyncio"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A new folder for sockets: their paths have at most 107 letters, a test's own folder may be too deep."""
    with tempfile.TemporaryDirectory(prefix="akv-") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def documented_events() -> Iterator[None]:
    """Whatever any engine logs is as `asynckv.told` says; see `tests/test_events.py`."""
    wrong: list[str] = []
    write = Recorder.write

    def checked(self: Recorder, level: Any, name: str, fields: dict[str, Any]) -> None:
        wrong.extend(problems(level, name, fields))
        write(self, level, name, fields)

    with pytest.MonkeyPatch.context() as patch:  # one of its own: a test's is undone before what the test was given
        patch.setattr(Recorder, "write", checked)
        yield
    assert not wrong, wrong[:10]


@pytest.fixture(autouse=True)
def unconfigured_logging() -> Iterator[None]:
    """Leave structlog as it was found: the command line configures it for its own process."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def logs() -> Lines:
    """What is logged from here on; `unconfigured_logging` ends it."""
    lines = Lines()
    configure_logging("info", stream=lines.stream)
    return lines


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.nixl)])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param == "real")


@pytest.fixture
def sim() -> Bench:
    return Bench(False)


@pytest.fixture
def sides(anyio_backend: str) -> Iterator[list[Any]]:
    """Planes of `tests/test_nixl_edge.py` to close in the end, twice, whatever happened."""
    made: list[Any] = []
    yield made
    for side in made:
        side.plane.close()
        side.plane.close()
