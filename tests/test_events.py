"""The types of events are what engines log: no name of one elsewhere, no field beside them, and a fresh page."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import asynckv
from asynckv import told
from asynckv.told import EVENTS, Line
from scripts.draw.events import fields_of, page
from tests.documented import problems
from tests.engines import Bench, until
from tests.lab.logs import Logs
from tests.lab.simulation import simulate

PACKAGE = Path(asynckv.__file__).parent
OTHERS = {"tools/diagnose/causes.py"}
"""Names of causes, some of which are called as the event that shows them."""
COMMON = fields_of(Line)
ADDED = {field.name for field in COMMON}


def test_every_event_and_every_field_says_what_it_is() -> None:
    for name, event in EVENTS.items():
        assert event.side in ("prefill", "decode", "both")
        assert (event.__doc__ or "").rstrip().endswith(".")
        assert not ADDED & set(event.__struct_fields__), f"{name} would hide what every line says"
        for field in fields_of(event):
            assert field.meaning.endswith(".") or field.meaning.endswith(".)"), (name, field.name)
            assert (field.kind == "seconds") is (
                field.name.endswith("_s") or field.name in ("seconds", "seconds_after_failure")
            ), (name, field.name)


def test_every_warning_says_what_ends_it() -> None:
    for name, event in EVENTS.items():
        may_warn = not {"warning", "error"}.isdisjoint(event.levels)
        assert may_warn is bool(event.until), f"{name}: say `until` of an event that may be a warning, and of no other"
        assert not event.only_with or {event.only_with} <= set(event.__struct_fields__), name
    assert set(told.ENDS) == {x.event for x in EVENTS.values() if x.until not in ((), told.ITSELF, told.ADVICE)}


def test_the_name_of_an_event_is_written_nowhere_by_hand() -> None:
    names = set(EVENTS) - {"refused", "drained"}  # which are words of other things, too
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if path.relative_to(PACKAGE).as_posix() in OTHERS or not any(name in text for name in names):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, f"{path}:{node.lineno}: say {EVENTS[node.value].__name__}.event"


def test_what_differs_from_its_type_is_found() -> None:
    right, name = {"peer": "p", "detail": "d"}, told.SlowGeometry.event
    assert problems("warning", name, right) == []
    assert problems("info", name, right) == ["slow_geometry: level info is not documented"]
    assert problems("warning", name, {"peer": "p"}) == ["slow_geometry: Object missing required field `detail`"]
    (wrong,) = problems("warning", name, right | {"x": 1})
    assert wrong == "slow_geometry: field 'x' is not documented, or not all that is in it"
    (wrong,) = problems("warning", name, right | {"peer": 3})
    assert wrong == "slow_geometry: Expected `str`, got `int` - at `$.peer`"
    assert problems("info", "none_such", {}) == ["event 'none_such' is not documented"]
    held = {"state": "lent", "waits": "w", "requests": 1, "oldest": [{"request_id": "r"}]}
    (wrong,) = problems("warning", told.LeaseHeld.event, held)
    assert wrong == "lease_held: Object missing required field `sequence` - at `$.oldest[0]`"


@pytest.mark.parametrize("level", ["debug", "info"])
def test_what_simulated_services_log_is_documented(level: str) -> None:
    """Every event goes through `conftest.documented_events`; here the lines themselves are looked at as well."""
    seen = set()
    for seed in range(2 if level == "debug" else 3):
        logs = Logs(level)
        assert simulate(seed, logs=logs).violation == ""
        for text in logs.files().values():
            for line in text.splitlines():
                said = json.loads(line)
                name = said["event"]
                assert {f.name for f in COMMON if f.always} <= said.keys()
                fields = {k: v for k, v in said.items() if k not in ADDED}
                assert problems(said["level"], name, fields) == []
                seen.add(name)
    assert {"engine_started", "peer_changed", "lease_ended", "pull_ended", "reader_met"} <= seen
    assert ("pull_transition" in seen) is (level == "debug")


@pytest.mark.nixl
@pytest.mark.slow
async def test_what_real_engines_log_is_documented(tmp_path: Path) -> None:
    config = asynckv.LogConfig(file=tmp_path / "all.jsonl", level="debug")
    async with Bench(True).pair(log=config) as (prefill, decode, group):
        for i in range(3):
            params, lent = prefill.lent(group, f"r{i}", [i], written=True)
            await decode.engine.pull(f"d{i}", [(0, [i])], params)
            await lent.wait_released()
        lent.withdraw()
        decode.engine.announce("never", group.make_params("never", [(0, [9])], 16))
        await until(lambda: prefill.engine.statistics().gauges["parked"] == 1)
    seen = set()
    for line in (tmp_path / "all.jsonl").read_text().splitlines():
        said = json.loads(line)
        seen.add(said["event"])
        fields = {k: v for k, v in said.items() if k not in ADDED}
        assert problems(said["level"], said["event"], fields) == []
    assert {"engine_started", "engine_stopped", "lease_transition", "pull_transition", "reader_met"} <= seen


def test_the_page_names_every_field_once() -> None:
    text = page()
    for name, event in EVENTS.items():
        (section,) = re.findall(rf"^### {name}$(.*?)(?=^### |\Z)", text, re.DOTALL | re.MULTILINE)
        for field in fields_of(event):
            assert len(re.findall(rf"(?:^\| |[:,]\s)\*?`{field.name}`", section, re.MULTILINE)) == 1
