"""Messages of earlier versions are read; those of later ones are read, or refused as docs/compatibility.md promises.

`tests/data/wire/` has a folder per version, recorded by that version (`python -m scripts.record_wire`). Folders of
versions that were released never change: `released.json` has their digests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import NODEFAULT, Struct

from asynckv.account.values import decode_account
from asynckv.core import wire
from asynckv.core.lease import Lease, Lent
from asynckv.core.types import Cohort, RequestId, decode_params
from asynckv.core.wire import Claim, Granted, Refused
from asynckv.errors import PullError, RemoteProtocolError
from asynckv.geometry.check import decode_layout
from asynckv.geometry.layout import Group, Layout, Memory, Part, View
from asynckv.tools.plan.layout_file import load_layouts
from asynckv.version import VERSION
from scripts import public_names, record_wire, wire_bounds
from tests.world import World, make_layout

VERSIONS = sorted(path.name for path in record_wire.TARGET.iterdir() if path.is_dir())
HERE = record_wire.TARGET / VERSION
PUBLIC = ("names.json", "reports.json")
"""Files that later names may be added to; all other files of this version are as it writes them now."""


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


def recorded(version: str, name: str) -> Any:
    """A file of one version's folder."""
    return json.loads((record_wire.TARGET / version / name).read_text())


PARAMS = [
    (version, each["params"], each["digest"]) for version in VERSIONS for each in recorded(version, "params.json")
]


@pytest.mark.parametrize(("version", "text", "digest"), PARAMS)
def test_recorded_params_mean_what_they_meant(version: str, text: Any, digest: str) -> None:
    assert list(differences(text, json.loads(msgspec.json.encode(decode_params(text))))) == []


@pytest.mark.parametrize(("version", "text", "digest"), PARAMS)
def test_owner_and_reader_make_the_digest_that_every_version_makes(version: str, text: Any, digest: str) -> None:
    """Otherwise one refuses every claim of the other: `blocks_differ`."""
    params, said = decode_params(text), bytes.fromhex(digest)
    lent = Lent(
        key=params.key, request_id=RequestId(params.request_id), groups=params.groups, num_tokens=params.num_tokens,
        lease_s=params.lease_s,
        grant_s=3.0, max_lease_s=600.0, readers=1, tp_rank=0, tp_size=1, recall=bool(params.recall),
    )  # fmt: skip
    for claimed, answer in ((said, Granted), (said[::-1], Refused)):
        claim = Claim(params.key, params.request_id, Cohort("decode"), "pull", 1, claimed, 5.0)
        assert type(Lease(lent, 0.0, wire.blocks_digest(params)).receive(claim, "reader", 0.0).answer) is answer

    reader = World().add("d", make_layout())
    pull = reader.core.announce("r", params, "", 30.0, 0.0)
    assert pull.digest == said


def test_a_request_that_is_never_recalled_is_said_as_before_there_were_recalls() -> None:
    assert packets("0.5.0") == packets("0.4.0")
    for version, text, digest in PARAMS:
        params = decode_params(text)
        assert ("recall" in text) == (version >= "0.5.0" and params.recall is True)
        if "recall" not in text:
            assert b"recall" not in msgspec.json.encode(params)
            other = msgspec.structs.replace(params, recall=True)
            assert wire.blocks_digest(params).hex() == digest != wire.blocks_digest(other).hex()


def test_a_request_without_a_ticket_is_said_as_before_there_were_tickets() -> None:
    here, before = ({name: data for name, data, _ in packets(version)} for version in ("0.6.0", "0.5.0"))
    changed = {name for name, data in before.items() if here[name] != data}
    assert changed == {"Hello", "Welcome", "Status"}  # the minor version, and accounts
    assert {name.partition(",")[0] for name in here.keys() - before} == {"Follow", "Unfollow", "Offered"}
    assert recorded("0.6.0", "params.json") == recorded("0.5.0", "params.json")


def begins(said: Any, read: Any) -> bool:
    match said, read:
        case dict(), dict():
            return said.keys() <= read.keys() and all(begins(value, read[name]) for name, value in said.items())
        case list(), list() if said != read:
            return len(said) <= len(read) and all(map(begins, said, read))
    return bool(said == read)


@pytest.mark.parametrize("version", VERSIONS)
def test_messages_at_their_bounds_are_read(version: str) -> None:
    found = recorded(version, "bounds.json")
    for name, recipe in found["packets"].items():
        said = wire_bounds.expand(recipe)
        data = msgspec.msgpack.encode(said)
        read = wire.encode_packet(said[1], said[2], wire.decode_packet(data).messages)
        assert data == read or begins(msgspec.msgpack.decode(data), msgspec.msgpack.decode(read)), name
    here = wire_bounds.limits()
    assert [name for name, limit in found["limits"].items() if here[name] < limit] == []


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_params_at_their_bounds_are_read(version: str) -> None:
    for name, recipe in recorded(version, "bounds.json")["params"].items():
        said = wire_bounds.expand(recipe)
        assert begins(said, json.loads(msgspec.json.encode(decode_params(said)))), name


@pytest.mark.parametrize("version", VERSIONS)
def test_a_recorded_layout_file_is_what_was_sent_to_a_peer(version: str) -> None:
    (layout,) = load_layouts(record_wire.TARGET / version / "layout.json")
    (means,) = (means for name, _, means in packets(version) if name == "Welcome")
    assert list(differences(means["messages"][0]["layout"], record_wire.plain(layout))) == []


def test_this_version_is_recorded_and_writes_the_same_bytes() -> None:
    found = {path.name: path.read_text() for path in HERE.iterdir() if path.name not in PUBLIC}
    assert found == record_wire.made(), (
        "what this version says has changed: if it is not in tests/data/wire/released.json, run python -m "
        "scripts.record_wire; if it is, set a new one in asynckv/version.py first (docs/compatibility.md)"
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
    by_kind = {kind: [at_default(x) for x in sent if type(x) is kind] for kind in wire.Message.__args__}
    assert {kind: found for kind, some in by_kind.items() if (found := set.intersection(*some))} == {}
    assert {x.reason for x in sent if isinstance(x, wire.Refused)} == wire.REFUSED
    assert {x.reason for x in sent if isinstance(x, wire.Offered)} == {None, *wire.NOT_OFFERED}
    assert {x.reason for x in sent if isinstance(x, wire.Unwelcome)} == wire.UNWELCOME

    (status,) = (x for x in sent if isinstance(x, wire.Status))
    account = decode_account(status.account)
    values = [account, account.facts, account.facts.lag, *account.peers, *account.counts]
    assert {type(x).__name__: at_default(x) for x in values if at_default(x)} == {}

    whole = decode_params(recorded(HERE.name, "params.json")[0]["params"])
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


Parameters = dict[str, str]


def broken(then: Parameters, now: Parameters, where: str) -> Iterator[str]:
    """Which calls fail now. Only parameters with defaults may be added, and none before one that has a place."""
    for name, kind in then.items():
        if now.get(name) != kind:
            yield f"{where}({name}): was {kind}, is {now.get(name, 'gone')}"
    yield from (f"{where}({x}) is new and {now[x]}" for x in now if x not in then and not has_default(now[x]))
    places, here = ([x for x, kind in each.items() if kind.startswith("positional")] for each in (then, now))
    if here[: len(places)] != places:
        yield f"{where}: by position were {places}, are {here}"


def has_default(kind: str) -> bool:
    return kind.startswith("variadic") or kind.endswith(public_names.DEFAULT)


def lost(then: Any, now: Any, where: str = "") -> Iterator[str]:
    match then, now:
        case dict(), dict() if then and all(isinstance(x, str) for x in (*then.values(), *now.values())):
            yield from broken(then, now, where)
        case dict(), dict() if all(isinstance(x, str) for x in now.values()):
            yield from broken({}, now, where)
        case dict(), dict():
            for name, value in then.items():
                yield from lost(value, now[name], f"{where} {name}") if name in now else [f"{where} {name}"]
        case list(), list():
            yield from (f"{where} {name}" for name in sorted(set(then) - set(now)))
        case _:
            if then != now:
                yield f"{where}: was {then}, is {now}"


ADVICE = (
    "a later version has to keep these (docs/compatibility.md); if this one is not in tests/data/wire/released.json, "
    "run python -m scripts.record_wire"
)
SAME_LINE = [x for x in VERSIONS if line(x) == line(HERE.name)]


@pytest.mark.parametrize("version", SAME_LINE)
def test_names_of_this_line_of_versions_are_still_there(version: str) -> None:
    assert list(lost(recorded(version, "names.json"), public_names.names())) == [], ADVICE


def test_what_an_error_carries_is_recorded_and_what_it_can_be_caught_as() -> None:
    found = recorded(HERE.name, "names.json")["python"]["PullTimeout"]
    assert {x for x in vars(PullError("text")) if not x.startswith("_")} | {"returned"} < found.keys()
    assert {"PullError", "AsyncKVError"} < set(found["is a"])


def missing(now: dict[str, list[str]]) -> dict[str, list[str]]:
    """Which keys of these schemas are gone, by any version: a schema outlives lines of versions."""
    found: dict[str, list[str]] = {}
    for version in VERSIONS:
        then = {schema: keys for schema, keys in recorded(version, "reports.json").items() if schema in now}
        found |= {version: gone} if (gone := list(lost(then, now))) else {}
    return found


def test_keys_of_json_reports_are_still_there() -> None:
    assert missing(public_names.reports(record_wire.account())) == {}, ADVICE


@pytest.mark.parametrize("name", public_names.COMMANDS)
def test_keys_of_what_commands_write_are_still_there(name: str) -> None:
    assert missing(public_names.commanded(name)) == {}, ADVICE


def test_every_promised_schema_is_recorded_or_said_not_to_be() -> None:
    page = (record_wire.ROOT / "docs" / "compatibility.md").read_text()
    (unchecked,) = re.findall(r"\*Not checked\*: the fields of (.*?)\.\n", page, re.DOTALL)
    for version in SAME_LINE:
        assert recorded(version, "reports.json").keys() <= recorded(HERE.name, "reports.json").keys()
    promised = set(re.findall(r"`(asynckv\.[a-z._]+/\d+)`", page))
    assert promised == set(recorded(HERE.name, "reports.json")) | set(re.findall(r"`(asynckv\.[^`]+)`", unchecked))


ONE = "positional or keyword"
KEYWORD = "keyword-only"
DEFAULT = public_names.DEFAULT


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ({"a": ONE, "b": ONE, "k": KEYWORD}, []),
        ({"a": ONE, "b": ONE, "c": ONE + DEFAULT, "j": KEYWORD + DEFAULT, "k": KEYWORD}, []),
        ({"a": ONE, "b": ONE, "k": KEYWORD, "more": "variadic keyword"}, []),
        ({"b": ONE, "a": ONE, "k": KEYWORD}, ["f: by position were ['a', 'b'], are ['b', 'a']"]),
        ({"a": ONE, "b": ONE}, ["f(k): was keyword-only, is gone"]),
        ({"a": ONE, "b": ONE, "k": KEYWORD, "j": KEYWORD}, ["f(j) is new and keyword-only"]),
    ],
)
def test_which_changes_of_parameters_break_whoever_calls(now: Parameters, says: list[str]) -> None:
    assert list(lost({"f": {"a": ONE, "b": ONE, "k": KEYWORD}}, {"f": now})) == [" " + x for x in says]


def test_what_else_breaks_whoever_names_it() -> None:
    assert list(lost({"f": {}}, {"f": {"a": ONE}})) == [" f(a) is new and positional or keyword"]
    assert list(lost({"value": None}, {"value": {}})) == [" value: was None, is {}"]
    assert list(lost({"reports": {"x/1": [".a", ".b"]}}, {"reports": {"x/1": [".a", ".c"]}})) == [" reports x/1 .b"]


# -- folders of versions that were released ---------------------------------------------------------------------------


def test_folders_of_released_versions_do_not_change() -> None:
    """Every version but this one was released, and this one is as soon as it was sealed."""
    digests = {x: record_wire.folder_digest(record_wire.TARGET / x) for x in VERSIONS}
    sealed = record_wire.released()
    assert sealed.items() <= digests.items(), "git checkout the folder: what a released version said does not change"
    assert set(VERSIONS) - {HERE.name} <= sealed.keys(), "seal it from its tag: python -m scripts.record_wire --release"


def test_a_released_folder_is_never_recorded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record_wire, "TARGET", tmp_path)
    monkeypatch.setattr(public_names, "names", dict)
    monkeypatch.setattr(public_names, "reports", lambda account: {})
    monkeypatch.setattr(public_names, "COMMANDS", {})
    monkeypatch.setattr(record_wire, "made", lambda: {"packets.json": "1"})
    (tmp_path / record_wire.RELEASED).write_text("{}")
    file = tmp_path / HERE.name / "packets.json"
    assert record_wire.main([]) == record_wire.main([]) == 0
    file.write_text("2")
    assert record_wire.main(["--release"]) == 0
    assert file.read_text() == "1"
    assert record_wire.released() == {HERE.name: record_wire.folder_digest(file.parent)}
    file.write_text("3")
    for argv in ([], ["--release"]):
        assert record_wire.main(argv) == 2
        assert "was released" in capsys.readouterr().err
    assert file.read_text() == "3"
    assert record_wire.folder_digest(file.parent) not in record_wire.released().values()


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
    data = wire.encode_packet(read.sender, read.target, read.messages)  # with the fields that came since
    assert wire.decode_packet(later(data, lambda body: body[3][0].append([1, "later"]))) == read
    body = msgspec.msgpack.decode(data)
    for field in body[3][0]:
        if isinstance(field, list):  # a key, a cohort
            field.append("later")
    assert wire.decode_packet(msgspec.msgpack.encode(body)) == read


@pytest.mark.parametrize("kind", [0, 20, 99, 1 << 40])
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
