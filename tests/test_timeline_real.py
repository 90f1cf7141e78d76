"""Clocks that are wrong, in real processes and in simulated ones whose truth is known: the true offset lies inside."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import structlog

from asynckv import Engine, EngineConfig, LogConfig, PrefillRanks
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.records import read_logs
from asynckv.tools.diagnose.timeline_model import stories
from tests.engines import memory
from tests.lab.fleet import TRANSPORTS, Fleet
from tests.lab.leaky import make_leaky
from tests.lab.logs import BEGIN
from tests.lab.script import make_script
from tests.lab.truth import watch

pytestmark = pytest.mark.slow

SHIFT = 5.0
SIMULATED_S = 200.0
"""No simulated service logs for longer."""

ROUNDING = 2e-5
"""Times of today as floats, and lines have whole microseconds."""


def blocks_of(number: int) -> list[int]:
    """Ten requests may be under way at once."""
    return [3 * (number % 10) + i for i in range(3)]


class Side:
    """An engine in a process of its own, whose log goes by a clock that is wrong."""

    def __init__(self, *, engine_id: str, log: str, shift: float = 0.0) -> None:
        self.shift = shift
        structlog.configure(
            processors=[structlog.processors.add_log_level, self._stamp, structlog.processors.JSONRenderer()],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            logger_factory=structlog.WriteLoggerFactory(open(log, "a", buffering=1, encoding="utf-8")),  # noqa: SIM115
        )
        registration, _ = memory(len(engine_id))
        config = EngineConfig(engine_id=engine_id, log=LogConfig(successes_per_s=1e4))
        self.engine = Engine(config, registration)

    def _stamp(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["timestamp"] = datetime.fromtimestamp(time.time() + self.shift, UTC).isoformat()
        event.pop("host", None)  # as on two hosts
        event.pop("boot_id", None)
        return event

    async def __aenter__(self) -> Self:
        await self.engine.start()
        self.group = PrefillRanks(self.engine.config.engine_id, [self.engine.endpoint])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.engine.aclose()

    async def put_forward(self, seconds: float) -> None:
        """Set the clock."""
        self.shift += seconds

    async def lend(self, number: int) -> dict[str, Any]:
        """Lend three blocks, and return their params."""
        params = self.group.make_params(f"chat-{number}", [(0, blocks_of(number))], num_tokens=48, written=True)
        self.lent = self.engine.lend(params)
        return params

    async def released(self) -> None:
        """Wait for the last release, which is written down."""
        await self.lent.wait_released()

    async def pull(self, number: int, params: dict[str, Any]) -> int:
        """Read them."""
        return (await self.engine.pull(f"gen-{number}", [(0, blocks_of(number))], params)).num_bytes


async def run(directory: Path, set_after: int = 0, by: float = 0.0, number: int = 40) -> Axis:
    """Move some requests between two processes; return what is made of their logs."""
    async with Fleet(TRANSPORTS["tcp"]) as fleet:
        prefill = await fleet.start(
            "prefill", "tests.test_timeline_real:Side", engine_id="prefill", log=str(directory / "p.log")
        )
        decode = await fleet.start(
            "decode", "tests.test_timeline_real:Side", engine_id="decode", log=str(directory / "d.log"), shift=SHIFT
        )
        for i in range(number):
            if set_after and i == set_after:
                await decode.ask("put_forward", seconds=by)
            assert await decode.ask("pull", number=i, params=await prefill.ask("lend", number=i)) == 3 * 16384
        await prefill.ask("released")
    return Axis(join(read_logs([directory])))


def check(axis: Axis, shifts: Sequence[float]) -> float:
    """See that all true offsets lie inside; return the uncertainty."""
    (decode,) = [x for x in axis.service.processes.values() if x.engine_id == "decode"]
    (reference,) = axis.references
    assert reference.engine_id == "prefill"
    found = axis.offset(decode)
    assert all(abs(found.seconds - x) <= found.within_s + ROUNDING for x in shifts), found
    return found.within_s


async def test_a_clock_that_is_wrong_is_found_by_what_was_exchanged(tmp_path: Path) -> None:
    axis = await run(tmp_path)
    assert check(axis, [SHIFT]) < 0.05
    assert axis.conflicts == []
    found = stories(axis)
    assert len(found) == 40
    for story in found:
        lease, pull = story.lanes
        # In the picture causes come before effects, as far as lines that are late and two clocks allow.
        (granted,) = (b.start for b in lease.bars if b.phase == "granted")
        assert lease.start <= granted <= pull.end + pull.within_s


async def test_a_clock_that_was_set_meanwhile_is_told(tmp_path: Path) -> None:
    axis = await run(tmp_path, set_after=20, by=2.0)
    ((_, _, seconds),) = axis.conflicts
    assert abs(seconds - 2.0) < 0.2
    assert any("a clock was set" in x for x in axis.notes())
    check(axis, [SHIFT + 0.1, SHIFT + 1.9])


@pytest.mark.parametrize("make", [make_leaky, make_script], ids=["mishaps", "faults"])
def test_simulated_hosts_are_where_they_truly_are(make: Any, tmp_path: Path) -> None:
    checked = 0
    for seed in range(8):
        _, logs, _ = watch(make(seed))
        directory = tmp_path / str(seed)
        logs.write(directory)
        read = read_logs(sorted(directory.glob("*.jsonl")))
        axis = Axis(join(read))
        hosts = {str(directory / x.file_name): x.host for x in logs.processes}
        host_of = {x.incarnation: hosts[x.where.rsplit(":", 1)[0]] for x in read.records}
        for process in axis.service.processes.values():
            reference = axis.references[axis.group(process)]
            host, other = host_of[process.incarnation], host_of[reference.incarnation]
            for at in (process.first_at, (process.first_at + process.last_at) / 2, process.last_at):
                t = (at - BEGIN - host.offset_s) / (1 + host.drift)
                found, drift = axis.offset(process), abs(host.drift - other.drift) * SIMULATED_S
                assert abs(at - other.reads(t) - found.seconds) <= found.within_s + drift + ROUNDING, (
                    seed,
                    process.rank,
                )
                checked += 1
    assert checked > 50
