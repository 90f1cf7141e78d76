"""`asynckv why` of requests whose blocks were taken back at once, and of second looks that found other bytes."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asynckv import BytesDiffer, LeaseLost, PullConfig
from asynckv.account.values import Account, Facts
from asynckv.core.types import How
from asynckv.observe.setup import configure_logging
from asynckv.tools.cli import app
from asynckv.tools.diagnose.causes import HEADING
from tests.engines import Bench, Side, until
from tests.test_why_engines import DECODE, answer, found_in

ALL = PullConfig(second_look=1.0, second_look_bytes="all")


class Logs:
    """The lines of both engines, and what the command finds in them."""

    def __init__(self, directory: Path) -> None:
        self.stream, self._path, self._out = io.StringIO(), directory / "all.jsonl", directory / "why.json"

    def lines(self, *events: str) -> list[dict[str, Any]]:
        return [x for x in map(json.loads, self.stream.getvalue().splitlines()) if x["event"] in events]

    def why(self, *without: str, request: str = "") -> tuple[dict[str, Any], str]:
        kept = (x for x in self.stream.getvalue().splitlines() if json.loads(x)["event"] not in without)
        self._path.write_text("\n".join(kept) + "\n")
        asked = ["why", *([request] if request else []), str(self._path)]
        shown = CliRunner().invoke(app, asked).stdout
        CliRunner().invoke(app, [*asked, "--json", str(self._out)])
        return json.loads(self._out.read_text()), shown


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    found = Logs(tmp_path)
    configure_logging("info", stream=found.stream)
    return found


async def land(decode: Side, task: asyncio.Task[Any], kind: type[Exception]) -> None:
    """Let what is posted land until a pull has failed."""
    while not task.done():
        decode.data.finish()
        await asyncio.sleep(0)
    with pytest.raises(kind):
        await task


async def test_a_recalled_pull_is_no_failure_and_no_leak(sim: Bench, logs: Logs) -> None:
    async with sim.pair() as (prefill, decode, group):
        decode.data.deferred = True
        params, lent = prefill.lent(group, "r", [1], written=True, recall=True)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [6])], params))
        await until(lambda: decode.data.running and lent._lease.grants)
        prefill.engine.recall([params])
        await land(decode, task, LeaseLost)
    [ended], [over] = logs.lines("pull_ended"), logs.lines("lease_ended")
    assert (ended["cause"], ended["how"]) == ("lease_lost", How.RECALLED)
    assert (over["cause"], over["revoked_by"]) == ("revoked", "recall")
    found, shown = logs.why()
    assert (found["findings"], found["late"], found["limits"]) == ([], [], [])
    [note] = [x for x in found["notes"] if x["code"] == "recalled"]
    assert note["what"] == f"1 pull ended because {over['rank']} took the blocks back at once (recall)"
    assert shown.startswith("All is well")
    found, shown = logs.why(request="r")
    assert found["late"] == []
    said = " ".join(shown.split())
    assert "recalled; grants dropped: 1" in said
    assert "because the prefill engine took its blocks back at once" in said
    # The reader's log says it alone.
    assert logs.why("lease_lent", "lease_granted", "lease_ended")[0]["findings"] == []


async def test_a_second_look_that_differs_is_a_finding_of_its_own(sim: Bench, logs: Logs) -> None:
    async with sim.pair(pull=ALL) as (prefill, decode, group):
        decode.data.deferred = True
        for number in (1, 2):
            params, _ = prefill.lent(group, f"r{number}", [number], written=True)
            task = asyncio.create_task(decode.engine.pull(f"d{number}", [(0, [number + 4])], params))
            await until(lambda: decode.data.running)
            decode.data.finish()
            await until(lambda: any(x.ours for x in decode.data.running.values()))
            for array in prefill.arrays:
                array[:] ^= 0xFF
            await land(decode, task, BytesDiffer)
        counters = decode.engine.statistics().counters
    assert (counters["pulls.differs"], counters["bytes.looked_at"] > 0) == (2, True)
    [event] = logs.lines("bytes_differ")
    owner, reader = event["peer"], event["rank"]
    of_pulls = ((), 2, ["d1", "d2"], "part 'k' of layer 'layers.0', tokens 0 to 15")
    of_the_event = (("pull_ended", "pulls_ended_alike"), 1, ["d1"], "part k of layers.0, from token 0")
    for without, number, requests, where in (of_pulls, of_the_event):
        found, shown = logs.why(*without)
        [finding] = [x for x in found["findings"] if x["code"] == "bytes_differ"]
        assert (finding["heading"], finding["requests"]) == (HEADING.BYTES, requests)
        assert "the blocks changed while they were lent, or the transport changed them" in finding["what"]
        assert {owner, reader} <= set(finding["ranks"])
        assert finding["remedy"].startswith(f"On {owner}: synchronize with the stream")
        said = finding["what"] + finding["evidence"]
        assert where in said
        assert f"{number} pull" in said
        assert "error bytes_differ" not in shown, "the event is told once"


async def test_an_engine_that_is_asked_tells_of_second_looks_that_differ() -> None:
    account = Account(rank=DECODE, incarnation="b" * 32, facts=Facts(counters={"pulls.differs": 3}))
    asked = answer(DECODE, account=account)
    found, shown = found_in([asked])
    [finding] = found["findings"]
    assert (finding["code"], finding["ranks"]) == ("bytes_differ", [DECODE])
    assert f"3 pulls of {DECODE} from prefill ranks failed" in shown
