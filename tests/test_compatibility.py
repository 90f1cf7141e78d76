"""What earlier versions said is read; what later ones will say is read, or refused as docs/compatibility.md promises.

`tests/data/wire/` has a folder per version, recorded by that version (`python -m scripts.record_wire`). Folders of
versions that were released never change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
from msgspec import NODEFAULT, Struct

from asynckv.core import wire
from asynckv.core.account import decode_account
from asynckv.core.types import decode_params
from asynckv.errors import RemoteProtocolError
from asynckv.geometry.check import decode_layout
from asynckv.geometry.layout import Group, Layout, Memory, Part, View
from asynckv.tools.layout_file import load_layouts
from asynckv.version import VERSION
from scripts import record_wire

VERSIONS = sorted(path.name for path in record_wire.TARGET.iterdir())
HERE = record_wire.TARGET / VERSION


def packets(version: str) -> list[tuple[str, bytes, Any]]:
    """Of one version: names, bytes, and what they mean."""
    found = json.loads((record_wire.TARGET / version / "packets.json").read_text())
    return [(each["name"], bytes.fromhex(each["bytes"]), each["means"]) for each in found["packets"]]


RECORDED = [(f"{version}, {name}", data, means) for version in VERSIONS for name, data, means in packets(version)]
NAMES = [name for name, _, _ in RECORDED]


def differences(recorded: Any, found: Any, where: str = "") -> Iterator[str]:
    """Where a value is not what was recorded. A field that came later may be there as well."""
    match recorded, found:
        case Mapping(), Mapping():
            for name, value in recorded.items():
                yield from differences(value, found.get(name), f"{where}.{name}")
        case list(), list() if len(recorded) == len(found):
            for i, (a, b) in enumerate(zip(recorded, found, strict=True)):
                yield from differences(a, b, f"{where}[{i}]")
        case _:
            if recorded != found:
                yield f"{where}: {recorded!r} was recorded, {found!r} is read"


@pytest.mark.parametrize(("name", "data", "means"), RECORDED, ids=NAMES)
def test_a_recorded_packet_means_what_it_meant(name: str, data: bytes, means: Any) -> None:
    assert list(differences(means, record_wire.plain(wire.decode_packet(data)))) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_params_mean_what_they_meant(version: str) -> None:
    for text in json.loads((record_wire.TARGET / version / "params.json").read_text()):
        assert list(differences(text, json.loads(msgspec.json.encode(decode_params(text))))) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_recorded_layout_file_is_what_was_sent_to_a_peer(version: str) -> None:
    (layout,) = load_layouts(record_wire.TARGET / version / "layout.json")
    (means,) = (means for name, _, means in packets(version) if name == "Welcome")
    assert list(differences(means["messages"][0]["layout"], record_wire.plain(layout))) == []


def test_this_version_is_recorded_and_writes_the_same_bytes() -> None:
    found = {path.name: path.read_text() for path in HERE.iterdir() if path.name != "names.json"}
    assert found == record_wire.made(), (
        "what this version says has changed: if it was not released yet, run python -m scripts.record_wire; if it was, "
        "a new version says so (docs/compatibility.md)"
    )


def at_default(value: Struct) -> set[str]:
    return {
        field.name
        for field in msgspec.structs.fields(type(value))
        if field.default is not NODEFAULT and getattr(value, field.name) == field.default
    }


def test_the_record_has_every_kind_of_message_and_every_field() -> None:
    sent = [x for _, data, _ in packets(HERE.name) for x in wire.decode_packet(data).messages]
    assert {type(x) for x in sent} == set(wire.Message.__args__)
    assert {type(x).__name__: at_default(x) for x in sent if at_default(x)} == {}
    assert {x.reason for x in sent if isinstance(x, wire.Refused)} == wire.REFUSED
    assert {x.reason for x in sent if isinstance(x, wire.Unwelcome)} == wire.UNWELCOME

    (status,) = (x for x in sent if isinstance(x, wire.Status))
    account = decode_account(status.account)
    values = [account, account.facts, account.facts.lag, *account.peers, *account.counts]
    assert {type(x).__name__: at_default(x) for x in values if at_default(x)} == {}

    whole = decode_params(json.loads((HERE / "params.json").read_text())[0])
    assert at_default(whole) == {"schema"}
    (layout,) = load_layouts(HERE / "layout.json")
    parts = [part for view in layout.views for part in view.parts]
    made: list[Struct] = [layout, *layout.memories, *layout.groups, *layout.views, *parts]
    for kind in (Layout, Memory, Group, View, Part):
        assert set.intersection(*(at_default(x) for x in made if type(x) is kind)) <= {"schema"}, kind


def line(version: str) -> list[str]:
    """Versions of one line keep their names: 0.2.0 and 0.2.1, 1.0.0 and 1.1.0."""
    major, minor, _ = version.split(".")
    return [major, minor] if major == "0" else [major]


@pytest.mark.parametrize("version", [x for x in VERSIONS if line(x) == line(HERE.name)])
def test_names_of_this_line_of_versions_are_still_there(version: str) -> None:
    """Whatever may be named: what came later may be there as well."""

    def lost(recorded: Any, found: Any, where: str) -> Iterator[str]:
        if isinstance(recorded, dict):
            for name, value in recorded.items():
                yield from lost(value, found[name], f"{where} {name}") if name in found else [f"{where} {name}"]
        else:
            yield from (f"{where} {name}" for name in sorted(set(recorded) - set(found)))

    recorded = json.loads((record_wire.TARGET / version / "names.json").read_text())
    assert list(lost(recorded, record_wire.names(), "")) == [], (
        "a later version has to keep these (docs/compatibility.md); if this one was not released yet, run "
        "python -m scripts.record_wire"
    )


# -- what a later minor version may say ------------------------------------------------------------------------------


def later(data: bytes, change: Callable[[list[Any]], None]) -> bytes:
    """A packet, changed as a later version would."""
    body = msgspec.msgpack.decode(data)
    change(body)
    return msgspec.msgpack.encode(body)


@pytest.mark.parametrize(("name", "data", "means"), RECORDED, ids=NAMES)
def test_fields_that_came_later_are_passed_over(name: str, data: bytes, means: Any) -> None:
    read = wire.decode_packet(data)
    assert wire.decode_packet(later(data, lambda body: body.append({"came": "later"}))) == read
    assert wire.decode_packet(later(data, lambda body: body[3][0].append([1, "later"]))) == read
    body = msgspec.msgpack.decode(data)
    for field in body[3][0]:
        if isinstance(field, list):  # a key, a cohort
            field.append("later")
    assert wire.decode_packet(msgspec.msgpack.encode(body)) == read


@pytest.mark.parametrize("kind", [0, 17, 99, 1 << 40])
def test_a_kind_of_message_that_came_later_loses_its_packet_and_is_an_error_of_this_protocol(kind: int) -> None:
    data = msgspec.msgpack.encode([wire.MAJOR, "s", "t", [[11, 1], [kind, 1]]])
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_packet(data)
    assert not isinstance(caught.value, wire.OtherVersion)


def test_a_reason_that_came_later_is_an_error_of_this_protocol() -> None:
    (data,) = (data for name, data, _ in packets(HERE.name) if name == "Refused, consumed")
    with pytest.raises(RemoteProtocolError, match="came_later"):
        wire.decode_packet(data.replace(b"\xa8consumed", b"\xaacame_later"))


@pytest.mark.parametrize("body", [[], ["s", "t", [[11, 1]]], [{"anything": 1}, b"else"]])
@pytest.mark.parametrize("major", [0, wire.MAJOR + 1, 60_000])
def test_whatever_another_major_version_says_is_named_as_such(major: int, body: list[Any]) -> None:
    with pytest.raises(wire.OtherVersion, match=f"protocol version {major} is not {wire.MAJOR}"):
        wire.decode_packet(msgspec.msgpack.encode([major, *body]))


def test_params_may_have_fields_that_came_later_but_no_other_schema() -> None:
    text = json.loads(msgspec.json.encode(record_wire.PARAMS))
    assert decode_params(text | {"came": "later"}) == record_wire.PARAMS
    with pytest.raises(RemoteProtocolError, match="schema"):
        decode_params(text | {"schema": 2})


def test_layouts_of_peers_and_accounts_may_have_fields_that_came_later() -> None:
    layout = msgspec.msgpack.decode(msgspec.msgpack.encode(record_wire.LAYOUT)) | {"came": "later"}
    assert decode_layout(msgspec.msgpack.encode(layout)) == record_wire.LAYOUT
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(record_wire.account())) | {"came": "later"}
    assert decode_account(msgspec.msgpack.encode(said)) == record_wire.account()
