"""The examples of the three ways run as they are, with real processes, and are as short as they are said to be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
WAYS = ("native", "threaded", "pumped")
MOST_LINES = 40


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_example_runs(way: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{way}.py")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1])},
    )
    assert (done.returncode, done.stdout) == (0, "393216 bytes, released\n"), done.stderr


@pytest.mark.nixl
@pytest.mark.slow
def test_the_example_of_a_trace_prints_one() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "traced.py")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1])},
    )
    spans = [line.split()[:2] for line in done.stdout.splitlines()]
    assert sorted(name for _, name in spans) == ["asynckv.lease", "asynckv.pull", "asynckv.release", "request"]
    assert (done.returncode, len({trace for trace, _ in spans})) == (0, 1), done.stderr


@pytest.mark.nixl
@pytest.mark.slow
def test_the_example_of_an_offload_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "offload.py")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1])},
    )
    assert (done.returncode, done.stdout) == (0, "393216 bytes, 48 tokens\n"), done.stderr


@pytest.mark.parametrize("way", [*WAYS, "offload"])
def test_an_example_is_short(way: str) -> None:
    assert len((EXAMPLES / f"{way}.py").read_text().splitlines()) <= MOST_LINES
