"""Attacks on real workers: a short run of `tests/lab/attack.py`, its own judgement, and its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asynckv.edges import zmq as edge
from tests.lab import attack
from tests.lab.arena import arena

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(240)]

FRAMES = 10_000


def test_nobody_notices_an_attack(capsys: pytest.CaptureFixture[str]) -> None:
    status = attack.main(["--frames", str(FRAMES), "--seed", "3", "--json", "-"])
    record = json.loads(capsys.readouterr().out)
    assert record["problems"] == []
    assert status == 0
    with_keys, without = record["rounds"]
    for each in (with_keys, without):
        assert each["pulls"]["complete"] > 60
        assert each["pulls"]["failed"] == {}
        assert each["pulls"]["bytes_wrong"] == 0
        assert each["left"] == {"decode": {}, "prefill": {}}
        assert each["sent"]["mutated_to_prefill"] + each["sent"]["mutated_to_decode"] == FRAMES // 2
        assert each["prefill"]["rejected.timeout"] >= attack.SLOW
        assert {k: v for k, v in each["sent"].items() if k.startswith("rude")} == dict.fromkeys(
            ("rude_parts", "rude_queues", "rude_ids"), attack.RUDE
        )
        assert each["prefill"]["dropped_frames"] > 0
        assert list(each["felt"]) == ["quiet", "raw", "packets", "huge", "parts", "queues", "ids", "afterwards"]
        assert all(felt["asked"] > 0 and felt["longest_turn_ms"] > 0 for felt in each["felt"].values())
    # A peer that sends too much rubbish is not listened to for a while, unless limits are lifted.
    assert with_keys["prefill"]["dropped.malformed"] > 100
    assert with_keys["prefill"]["dropped.too_many"] > FRAMES // 10
    assert without["prefill"]["dropped.malformed"] > FRAMES // 10
    causes = {"rejected.no_key", "rejected.unlisted_key", "rejected.wrong_key", "rejected.handshake"}
    assert causes <= with_keys["prefill"].keys()


@pytest.mark.anyio
async def test_a_stranger_that_is_answered_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with arena("open", 1) as place:
        work = attack.Attack(place, 100, lambda _: None)
        work.make_keys(tmp_path)
        await place.decode.start()
        await work.victim.start()
        assert work.mallory is not None
        listed = work.mallory
        monkeypatch.setattr(edge, "make_pair", lambda: listed)  # what is to be unlisted is not
        await work.strangers()
    assert any("(unlisted_key) was answered" in x for x in place.problems)
    assert any("(unlisted_key) was sent" in x for x in place.problems)
    assert any("(unlisted_key) was not counted" in x for x in place.problems)
    assert not any("(no_key)" in x for x in place.problems)
