"""Running a sweep: one `asynckv bench` after the other, each in a process of its own, each a line of the journal.

What one point leaves behind cannot touch the next, and every line's command repeats its point by itself.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from asynckv.errors import ConfigError
from asynckv.tools.bench import report
from asynckv.tools.bench.grid import Point
from asynckv.tools.bench.journal import Journal, Row

Status = Literal["good", "bad", "failed"]


def target_of(out: str) -> Path:
    """Name the journal: FILE.jsonl, or sweep.jsonl in a directory.

    Raises:
        ConfigError: It is another kind of file.
    """
    if not out:
        raise ConfigError("--out is empty; give a FILE.jsonl or a directory")
    path = Path(out)
    if path.suffix == ".jsonl" and not path.is_dir():
        return path
    if (path.suffix or path.exists()) and not path.is_dir():
        raise ConfigError(f"--out {out} is neither a FILE.jsonl nor a directory")
    return path / "sweep.jsonl"


def judged(returncode: int, stdout: bytes, stderr: bytes) -> tuple[Status, str, dict[str, Any] | None]:
    """Say what became of a point: status, the reason if it is not good, the report if there is one."""
    try:
        found = msgspec.json.decode(stdout, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = {}
    lines = stderr.decode(errors="replace").splitlines()
    if returncode not in (0, 1) or found.get("schema") != report.SCHEMA:
        said = [line.removeprefix("asynckv: ") for line in lines if line.startswith("asynckv: ")] or lines
        how = f"killed by signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
        return "failed", (said[-1].strip()[:600] if said else how), None
    if returncode == 0:
        return "good", "", found
    return "bad", "; ".join(report.faults(found))[:600] or "incomplete", found


class _Runner:
    """Runs points, and ends the one that runs when it is told to."""

    def __init__(self) -> None:
        self.stopping = False
        self._process: asyncio.subprocess.Process | None = None

    def interrupt(self) -> None:
        """Ctrl-C: let the running point end in order, and begin no other."""
        self.stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)

    async def run(self, argv: Sequence[str]) -> tuple[int, bytes, bytes]:
        """Run one point: exit status, stdout, stderr."""
        command = [sys.executable, "-m", "asynckv", "bench", *argv, "--json", "-"]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        if self.stopping:
            self.interrupt()
        out, errors = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, out, errors


async def run(
    journal: Journal,
    points: Sequence[Point],
    *,
    retry_failed: bool = False,
    progress: Callable[[int, Point, int, Row | None], None] = lambda done, point, number, row: None,
) -> bool:
    """Run what the journal misses, in its order; Ctrl-C or SIGTERM ends it between lines.

    Args:
        journal: Begun with a head of these points.
        points: The grid's.
        retry_failed: Run again what failed or was bad.
        progress: Called with the number of runs that are done, a point and its round: when it begins, and with its
            row when that is written.

    Returns:
        Whether it was interrupted.

    Raises:
        ConfigError: Every single point was refused as bad input; the file is gone again.
    """
    runner, by_key = _Runner(), {point.key: point for point in points}
    todo = journal.sweep.missing(retry_failed=retry_failed)
    total = len(journal.sweep.head.points) * journal.sweep.head.rounds
    done, refusals = total - len(todo), list[str]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, runner.interrupt)
    try:
        for index, key in todo:
            if runner.stopping:
                break
            point = by_key[key]
            progress(done, point, index, None)
            began = time.monotonic()
            returncode, out, errors = await runner.run(point.argv)
            status, reason, found = judged(returncode, out, errors)
            if runner.stopping and (found is None or found["interrupted"]):
                break
            if returncode == 2:
                refusals.append(reason)
            row = Row(
                key=key,
                round=index,
                axes=point.axes,
                params=point.params,
                command=shlex.join(["asynckv", "bench", *point.argv]),
                status=status,
                reason=reason,
                seconds=round(time.monotonic() - began, 3),
                at=datetime.now(UTC).isoformat(timespec="seconds"),
                report=found,
            )
            journal.add(row)
            done += 1
            progress(done, point, index, row)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if refusals and len(refusals) == total:
        # The options are to blame, and a corrected sweep shall not find this one in its way.
        journal.path.unlink()
        raise ConfigError(f"every point was refused: {refusals[0]}")
    return runner.stopping and done < total
