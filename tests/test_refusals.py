"""Keys and addresses that do not fit: both sides say so in words, at once where they can know."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv import KeysConfig, PeerUnreachable, PrefillRanks, PullConfig
from asynckv.edges.control.zmq import make_pair
from asynckv.engine import ending
from asynckv.keys import write_pair
from tests.engines import Bench, Side

pytestmark = pytest.mark.nixl


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "GRACE_S", 0.1)


@contextlib.asynccontextmanager
async def pair(tmp_path: Path, *, there: bool = True, here: bool = True) -> AsyncIterator[tuple[Side, Side]]:
    """A prefill and a decode engine with keys; each lists the other, or only itself."""
    lists = {
        "prefill": ["prefill", *(["decode"] if there else [])],
        "decode": ["decode", *(["prefill"] if here else [])],
    }
    for name in lists:
        write_pair(tmp_path / "secret", name, make_pair())
    for name, listed in lists.items():
        (tmp_path / name).mkdir()
        for each in listed:
            (tmp_path / name / f"{each}.key").write_bytes((tmp_path / "secret" / f"{each}.key").read_bytes())
    # Who is turned away has so long for it; who is not is answered within milliseconds.
    quick = PullConfig(handshake_s=3.0 if there else 1.5)
    sides = [
        Bench(True).side(
            name,
            i,
            pull=quick,
            keys=KeysConfig(secret=tmp_path / "secret" / f"{name}.key_secret", authorized=tmp_path / name),
        )
        for i, name in enumerate(lists)
    ]
    async with sides[0].engine, sides[1].engine:
        yield sides[0], sides[1]


def params(prefill: Side, address: str = "") -> dict[str, Any]:
    endpoint = prefill.engine.endpoint
    if address:
        endpoint = msgspec.structs.replace(endpoint, address=address)
    return PrefillRanks("prefill", [endpoint]).make_params("r", [(0, [1])], 16, written=True)


async def test_engines_that_list_each_other_read(tmp_path: Path) -> None:
    async with pair(tmp_path) as (prefill, decode):
        wanted = params(prefill)
        prefill.engine.lend(wanted)
        await decode.engine.pull("d", [(0, [6])], wanted)
        assert decode.blocks([6]) == prefill.blocks([1])


async def test_a_listener_that_is_not_listed_here_is_named_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path, here=False) as (prefill, decode):
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerUnreachable, match="key is not in this engine's directory of authorized keys: copy"):
            await decode.engine.pull("d", [(0, [6])], params(prefill))
        assert asyncio.get_running_loop().time() - began < 0.5
        with pytest.raises(PeerUnreachable, match="names no key, and this engine has keys"):
            await decode.engine.pull(
                "e", [(0, [6])], params(prefill, prefill.engine.endpoint.address.partition("#")[0])
            )
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("refused")]
    assert any("unlisted_listener" in line for line in said)
    assert any("no_key" in line for line in said)
    ended = [r.getMessage() for r in caplog.records if r.getMessage().startswith("pull_ended")]
    assert ["how=unlisted_listener" in ended[0], "how=no_key" in ended[-1]] == [True, True]


async def test_a_reader_that_is_not_listed_there_is_named_by_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "asynckv")
    async with pair(tmp_path, there=False) as (prefill, decode):
        with pytest.raises(
            PeerUnreachable, match=r"did not answer within 1\.5 s; it seems to turn our connection away"
        ):
            await decode.engine.pull("d", [(0, [6])], params(prefill), timeout_s=12.0)
        key = decode.engine.endpoint.address.partition("#")[2]
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("refused")]
    assert any("unlisted_key" in line and key in line and "engine_id=prefill" in line for line in said)
    assert any("how=turned_away" in r.getMessage() for r in caplog.records if r.getMessage().startswith("pull_ended"))


async def test_an_address_with_a_key_needs_keys_here(tmp_path: Path) -> None:
    async with pair(tmp_path) as (prefill, _):
        side = Bench(True).side("plain", 7)
        async with side.engine:
            with pytest.raises(PeerUnreachable, match=r"and this engine has none: set EngineConfig\.keys"):
                await side.engine.pull("d", [(0, [6])], params(prefill))


async def test_an_address_that_is_none_is_named(tmp_path: Path) -> None:
    side = Bench(True).side("plain", 7)
    async with side.engine:
        endpoint = msgspec.structs.replace(side.engine.endpoint, address="nonsense", incarnation="0" * 32)
        wanted = PrefillRanks("plain", [endpoint]).make_params("r", [(0, [1])], 16)
        with pytest.raises(PeerUnreachable, match="'nonsense' is not an address such as"):
            await side.engine.pull("d", [(0, [6])], wanted)
