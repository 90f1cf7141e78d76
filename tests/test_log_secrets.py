"""No key's token, no secret key, no NIXL metadata and no address in memory is ever logged, or said in an error."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynckv import KeysConfig, LeaseConfig, LogConfig, PrefillRanks, PullConfig, PullError
from asynckv.core.types import Cohort, Outcome, PullId, ReplyTo, decode_params
from asynckv.core.wire import Claim, Release, encode_packet
from asynckv.edges.control.zmq import make_pair
from asynckv.keys import encode_z85, read_pair, write_pair
from asynckv.observe.setup import configure_logging
from tests.engines import Bench, Side, pass_by, until
from tests.lab.logs import Logs
from tests.lab.simulation import simulate
from tests.test_log_evidence import drops

PLANTED = "5ec2e7"
"""How every token begins."""


def planted() -> Callable[[int], str]:
    numbers = itertools.count()
    return lambda n: ((PLANTED if n == 16 else "0") * 2 * n)[: 2 * n - 8] + f"{next(numbers):08x}"


class Heard:
    """All that is written and raised."""

    def __init__(self, tmp_path: Path) -> None:
        self.stream, self.file = io.StringIO(), tmp_path / "all.jsonl"
        self.errors: list[str] = []
        configure_logging("debug", stream=self.stream)

    @property
    def config(self) -> LogConfig:
        return LogConfig(file=self.file, level="debug", slow_s=0.5, held_fraction=0.05)

    @property
    def text(self) -> str:
        return "\n".join((self.stream.getvalue(), self.file.read_text(), *self.errors))

    async def failing(self, call: Any) -> None:
        try:
            await call if asyncio.iscoroutine(call) or isinstance(call, asyncio.Task) else call()
        except Exception as exc:
            self.errors += [str(exc), repr(exc), repr(getattr(exc, "__dict__", ""))]


@pytest.fixture
def heard(tmp_path: Path) -> Heard:
    return Heard(tmp_path)


def spellings(secret: bytes) -> set[str]:
    out = {secret.hex()[:24], base64.b64encode(secret).decode()[:16], repr(secret)[2:20], str(list(secret))[1:40]}
    return {text for text in out if len(text) >= 8}


def test_a_key_does_not_tell_its_token() -> None:
    group = PrefillRanks("p", [_endpoint()], token_hex=planted())
    params = decode_params(group.make_params("r", [(0, [1])], 16))
    assert params.key.token.startswith(PLANTED)
    for shown in (repr(params), str(params.key), f"{params.key!r}", repr(KeyError(params.key)), repr([params])):
        assert "sequence=0" in shown
        assert PLANTED not in shown


def _endpoint() -> Any:
    from asynckv.core.types import Endpoint

    return Endpoint(0, "tcp://127.0.0.1:1", "0" * 32)


async def test_no_token_is_in_logs_or_errors_whatever_fails(sim: Bench, heard: Heard) -> None:
    config = {"log": heard.config, "pull": PullConfig(release_timeout_s=3.0), "lease": LeaseConfig(parked_s=4.0)}
    async with sim.pair(**config) as (prefill, decode, _):
        group = PrefillRanks("prefill", [prefill.engine.endpoint], token_hex=planted())
        lend, pull, core = prefill.engine.lend, decode.engine.pull, prefill.engine._driver.core

        def made(name: str, block: int, **more: Any) -> dict[str, Any]:
            return dict(group.make_params(name, [(0, [block])], 16, **more))

        good = made("good", 0, written=True)
        lent = lend(good)
        await pull("good", [(0, [0])], good)
        await lent.wait_released()
        await heard.failing(lambda: lend(good))  # twice
        await heard.failing(pull("late", [(0, [1])], good))
        expired = made("expired", 1, written=True)
        lend(expired)
        decode.engine.cancel("other-id", {**expired, "request_id": "other"})
        await heard.failing(pull("differs", [(0, [2])], {**expired, "num_tokens": 15}))
        await heard.failing(lambda: decode.engine.announce("x", {**expired, "key": {"token": PLANTED}}))
        await heard.failing(lambda: decode.engine.announce("x", {**expired, "key": [PLANTED, 0, 0, PLANTED * 40]}))
        early = made("early", 3)
        waiting = asyncio.create_task(pull("early", [(0, [3])], early, timeout_s=1.0))
        await until(lambda: prefill.engine.statistics().gauges["parked"])
        sim.clock.advance(1.1)
        await heard.failing(waiting)
        decode.engine.announce("early", early)
        await heard.failing(lambda: decode.engine.announce("early", {**early, "num_tokens": 3}))
        revoked = lend(made("revoked", 4, written=True))
        revoked.withdraw()
        prefill.engine.withdraw(made("withdrawn", 5))
        stranger = decode_params(lend(made("stranger", 6, written=True)) and group.make_params("n", [(0, [9])], 16))
        claim = Claim(stranger.key, "n", Cohort("s"), "p", 1, bytes(16), 1.0)
        release = Release(decode_params(expired).key, "wrong", Cohort("s"), PullId("p"), Outcome.COMPLETE)
        for target in ("", "9" * 32):
            core.receive(ReplyTo(b"1"), encode_packet("8" * 32, target, [claim, release]), sim.clock.now())
        # Bugs of ours, which are logged with what was raised.
        held = next(iter(core.prefill.leases))
        lease = core.prefill.leases.pop(held)
        prefill.engine._driver.safely(core.prefill.leases.__getitem__, held)
        await heard.failing(prefill.engine.check_integrity)
        core.prefill.leases[held] = lease
        lost = made("lost", 9, written=True)
        lend(lost)
        sim.network.fate = drops(Release)
        await pull("lost", [(0, [9])], lost)
        await pass_by(sim, 4, 0.25)
        sim.network.fate = lambda sender, to, packet: "deliver"
        decode.data.deferred = True
        reading = made("reading", 8, written=True)
        lend(reading)
        task = asyncio.create_task(pull("reading", [(0, [8])], reading, timeout_s=20.0))
        await until(lambda: decode.data.running)
        sim.network.fate = lambda sender, to, packet: "drop"
        await pass_by(sim, 25, 0.25)
        await heard.failing(task)
        decode.data.finish()
        await pass_by(sim, 20, 0.25)
        heard.errors += [repr(x) for side in (prefill, decode) for x in (side.engine.holds(), side.engine.requests())]
        sim.network.fate = lambda sender, to, packet: "deliver"
    text = heard.text
    events = {json.loads(line)["event"] for line in heard.file.read_text().splitlines()}
    assert {"internal_error", "release_refused", "reader_refused", "lease_held", "pull_held", "pull_ended"} <= events
    assert {"lease_transition", "pull_transition", "release_unanswered", "blocks_returned", "lease_ended"} <= events
    assert len(heard.errors) > 20
    assert "holds blocks without a lease, pull or job" in text
    assert PLANTED not in text, text[text.index(PLANTED) - 300 :][:500]


def test_no_token_is_in_what_simulated_services_log() -> None:
    """Whatever looks like a token there is the start of a process."""
    logs = Logs("debug")
    assert simulate(3, logs=logs).violation == ""
    text = "\n".join(logs.files().values())
    starts = set(re.findall(r'"(?:peer_|reader_)?incarnation": "([0-9a-f]+)"', text))
    assert set(re.findall(r"\b[0-9a-f]{32}\b", text)) <= starts


@pytest.mark.nixl
@pytest.mark.slow
async def test_no_secret_is_in_what_real_engines_log(tmp_path: Path, heard: Heard) -> None:
    directory = tmp_path / "keys"
    rings = {}
    for name in ("prefill", "decode", "stranger"):
        secret, _ = write_pair(directory if name != "stranger" else tmp_path / "strangers", name, make_pair())
        rings[name] = KeysConfig(secret=secret, authorized=directory)
    bench = Bench(True)
    sides: list[Side] = []
    for seed, (name, keys) in enumerate(rings.items()):
        more = {"pull": PullConfig(handshake_s=0.4, release_timeout_s=0.5)}
        sides.append(bench.side(name, seed, keys=keys, log=heard.config, lease=LeaseConfig(lease_s=2.0), **more))
    prefill, decode, stranger = (side.engine for side in sides)
    async with prefill, decode, stranger:
        group = PrefillRanks("prefill", [prefill.endpoint], lease=LeaseConfig(lease_s=2.0), token_hex=planted())
        params = group.make_params("r", [(0, [1])], 16, written=True)
        lent = prefill.lend(params)
        await decode.pull("d", [(0, [6])], params)
        await lent.wait_released()
        params = group.make_params("s", [(0, [2])], 16, written=True)
        lent = prefill.lend(params)
        with pytest.raises(PullError) as caught:
            await stranger.pull("s", [(0, [6])], params)
        heard.errors.append(str(caught.value))
        await lent.wait_released()
        engines = [x._driver for x in (prefill, decode, stranger)]
        metadata = [d.core.identity.metadata for d in engines]
        assert not any(str(d.core.identity.metadata) in repr(d.core.identity) for d in engines)
    text = heard.text
    assert '"refused"' in text
    assert '"expired"' in text
    secrets = [read_pair(Path(keys.secret)).secret for keys in rings.values()]
    forbidden = {PLANTED} | {encode_z85(x)[:20] for x in secrets}
    for each in (*secrets, *metadata):
        forbidden |= spellings(each) | spellings(each[len(each) // 2 :])
    for side in sides:
        for array in side.arrays:
            base = array.ctypes.data
            forbidden |= {str(base), f"{base:x}"}
    for spelling in forbidden:
        assert spelling not in text, spelling


@pytest.mark.parametrize("form", ["json", "console", "standard"])
async def test_what_comes_from_outside_cannot_forge_a_line(
    sim: Bench, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    forged = 'r\n{"event": "lease_ended", "cause": "forged"}\r\x1b[2J\x85\u2028lease_ended cause=forged "\\'
    stream = io.StringIO()
    if form != "standard":
        configure_logging("debug", form=form, stream=stream)  # type: ignore[arg-type]
    else:
        caplog.set_level("DEBUG", logger="asynckv")
    async with sim.pair() as (prefill, decode, group):
        params, _ = prefill.lent(group, forged, [1], written=True)
        decode.engine.announce(forged, {**params, "request_id": forged + "other"}, wait_s=1.0)
        core, key = prefill.engine._driver.core, decode_params(params).key
        release = Release(key, forged, Cohort(forged[:200]), PullId(forged[:120]), Outcome.COMPLETE)
        core.receive(ReplyTo(b"1"), encode_packet(forged[:60], "", [release]), sim.clock.now())
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 1)
        prefill.engine._driver.on_refused("handshake_auth", forged)
        sim.clock.advance(40.0)
        await until(lambda: not decode.engine.statistics().gauges["pulls_waiting"])
    if form == "json":
        lines = stream.getvalue().split("\n")[:-1]
        assert all("event" in json.loads(line) for line in lines)
        assert not any(json.loads(line).get("cause") == "forged" for line in lines)
    elif form == "console":
        lines = [re.sub(r"\x1b\[\d+m", "", line) for line in stream.getvalue().split("\n")[:-1]]  # its colours
    else:
        lines = [record.getMessage() for record in caplog.records if record.name == "asynckv"]
    assert any("forged" in line for line in lines)
    for line in lines:
        assert line.isprintable(), line
