"""Whether a peer's death still ends processes inside UCX: `tests/lab/ucx_abort.py`, and its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def tried(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Run it where nothing of NIXL is loaded yet; its exit status and record."""
    command = (sys.executable, "-m", "tests.lab.ucx_abort", *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=80, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(170)
def test_reads_over_tcp_still_end_owners_whose_reader_is_killed() -> None:
    """If this fails UCX has been mended: what serves remote readers needs no process of its own any more."""
    for seed in range(5):
        status, record = tried("--fault", "away-kill", "--trials", "10", "--seconds", "25", "--seed", str(seed))
        assert status == (record["died"] > 0)
        assert record["transfers_ended"] > 0
        if status:
            break
    else:
        raise AssertionError("no owner died in 50 trials")


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.parametrize(
    "arguments",
    [["--ucx", "UCX_TLS=cma,posix,tcp"], ["--operation", "write"], ["--survivor", "initiator"]],
    ids=["shared memory", "the owner writes", "who only reads"],
)
def test_who_is_not_read_over_tcp_survives(arguments: list[str]) -> None:
    status, record = tried("--fault", "away-kill", "--trials", "10", "--seconds", "40", *arguments)
    assert (status, record["deaths"]) == (0, {})
    assert record["transfers_ended"] > 0
