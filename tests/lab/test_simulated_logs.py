"""What simulated processes log is what real ones would, by clocks of their own."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from datetime import datetime
from pathlib import Path

import pytest
import structlog

from asynckv.observe.setup import configure_logging
from tests.engines import Bench
from tests.lab.logs import BEGIN, Logs
from tests.lab.simulate import main
from tests.lab.simulation import simulate


def heard(seed: int, level: str = "info") -> Logs:
    logs = Logs(level)
    assert simulate(seed, logs=logs).violation == ""
    return logs


def test_a_seed_says_the_same_again_and_leaves_nothing_behind() -> None:
    assert heard(7).files() == heard(7).files() != heard(8).files()
    assert not structlog.is_configured()
    assert logging.getLogger("asynckv").level == logging.NOTSET


def test_each_start_of_a_process_has_a_file_whose_lines_bear_its_hosts_time() -> None:
    logs = heard(3)
    wrong = logs.clocks()["files"]
    assert set(wrong) == set(logs.files())
    begun = []
    for name, text in logs.files().items():
        lines = [json.loads(line) for line in text.splitlines()]
        assert {(x["engine_id"], x["tp_rank"]) for x in lines} == {(wrong[name]["engine_id"], wrong[name]["tp_rank"])}
        assert lines[0]["event"] == "engine_started"
        assert {x["level"] for x in lines} <= {"info", "warning", "error"}
        times = [datetime.fromisoformat(x["timestamp"]).timestamp() for x in lines]
        assert times == sorted(times)
        if name.endswith("-1.jsonl"):
            begun.append(times[0] - BEGIN - wrong[name]["offset_s"])
    # All began together, by their own word at other times.
    assert max(begun) - min(begun) < 0.01
    assert len({x["offset_s"] for x in wrong.values()}) > 1


def test_lines_have_the_form_that_a_configured_program_writes() -> None:
    stream = io.StringIO()
    configure_logging("info", form="json", stream=stream)
    try:
        structlog.get_logger("asynckv", engine_id="e").info("engine_started", address="a")
    finally:
        structlog.reset_defaults()
    real = list(json.loads(stream.getvalue()))
    line = next(iter(heard(3).files().values())).splitlines()[0]
    simulated = list(json.loads(line))
    assert [x for x in simulated if x in real] == real
    assert simulated[-3:] == real[-3:]


def test_only_what_is_worth_a_warning_if_that_is_asked_for() -> None:
    lines = [json.loads(x) for text in heard(3, "error").files().values() for x in text.splitlines()]
    assert {x["level"] for x in lines} <= {"error"}


@pytest.mark.slow
def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tmp_path / "logs")
    assert main(["--first-seed", "3", "--seeds", "2", "--jobs", "1", "--logs", where]) == 0
    capsys.readouterr()
    logs = heard(3)
    found = {path.name: path.read_text() for path in (tmp_path / "logs" / "seed-3").iterdir()}
    assert json.loads(found.pop("clocks.json")) == logs.clocks()
    assert found == logs.files()
    assert (tmp_path / "logs" / "seed-4").is_dir()
    (tmp_path / "file").write_text("")
    assert main(["--seeds", "1", "--logs", str(tmp_path / "file")]) == 2
    assert "--logs" in capsys.readouterr().err


async def test_what_should_have_been_done_before_is_no_sign_that_the_loop_was_away(sim: Bench) -> None:
    async with sim.pair() as (_, decode, _):
        # As it is for a peer whose pause was over long before its last release was given up (seed 94 of `make_leaky`).
        decode.engine._driver._arm(sim.clock.now() - 30.0)
        sim.clock.advance(0.1)
        await asyncio.sleep(0)
        found = decode.engine.statistics()
        assert found.counters["loop.was_away"] == 0
        assert found.loop_lag_most_s < 1.0
