"""Record this version's messages and public names, so that tests can hold later versions to both.

It writes into `tests/data/wire/VERSION/`:

- `packets.json`: every kind of message, every reason and every outcome, as bytes in hex and as their values;
- `bounds.json`: messages and params at the bounds of their types, as recipes (`scripts/wire_bounds.py`);
- `params.json`: params as a router carries them, each with the digest of its blocks;
- `layout.json`: a layout as a file;
- `names.json`, `reports.json`: public names, and keys of JSON reports (`scripts/public_names.py`).

`tests/test_compatibility.py` reads the folders of all versions. A folder may be recorded again until its version is
released. `--release` records it for the last time, and writes its digest into `released.json`. Then this script never
writes into that folder again, and a test compares it with the digest.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Raw, Struct

from asynckv.account.inspect import HeldBlocks, RankStatus, RequestStatus
from asynckv.account.values import Account, Facts, Lag, PeerStatus, PhaseCount, decode_account, encode_account
from asynckv.core import wire
from asynckv.core.types import Cohort, Endpoint, Key, KVTransferParams, Outcome, decode_params
from asynckv.errors import ConfigError
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.check import check_layout, decode_layout
from asynckv.geometry.gather import Packing, Recipe
from asynckv.geometry.layout import ONE_PER_REQUEST, Dim, Group, Layout, Memory, Part, TokenShard, View
from asynckv.scheduler import PrefillRanks
from asynckv.told import StepWait
from asynckv.tools.plan.layout_file import dump_layouts
from asynckv.version import VERSION
from scripts import command, public_names, wire_bounds

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "tests" / "data" / "wire"
RELEASED = "released.json"
"""File next to the folders, with the digest of each released folder by its version."""

KEY = Key("5f0c9a2be1d34c7788aa00ff12345678", 3, 41, "00112233445566778899aabbccddeeff")
COHORT = Cohort("decode:0,é", 2, 1, 4, 3)
LAYOUT = Layout(
    schema=2,
    model="model",
    tp_rank=1,
    tp_size=2,
    pp_stage=1,
    pp_size=2,
    memories=(Memory(1 << 32, 1 << 20), Memory(1 << 40, 1 << 20, "cuda", 1)),
    groups=(
        Group("attention", 16, 8, ratio=2, window=64, null_block=0),
        Group("states", ONE_PER_REQUEST, 4, kind="state"),
        Group("latents", 16, 4),
    ),
    views=(
        View(
            0,
            0,
            "layers.0",
            4096,
            2048,
            (
                Part(
                    "k",
                    "float16",
                    2,
                    0,
                    (Dim("token", 8, 128), Dim("head", 4, 32), Dim("dim", 16, 2)),
                    "head",
                    (4, 8),
                    8,
                ),
                Part("k_scale", "float32", 4, 1024, (Dim("token", 1, 4),), tokens_per_entry=8),
            ),
        ),
        View(
            1, 1, "layers.1", 0, 64, (Part("ssm", "float32", 4, 0, (Dim("channel", 16, 4),), "channel", (16, 32), 32),)
        ),
        View(1, 2, "layers.3", 4096, 128, (Part("kv", "float16", 2, 0, (Dim("token", 8, 16), Dim("dim", 8, 2))),)),
    ),
    aliases=(("layers.2", "layers.0"),),
    slotted=True,
    guessed_axis="head",
    token_shards=(TokenShard(2, 2, 1, 4),),
)
"""A layout in which no field has its default."""

PARAMS = KVTransferParams(
    engine_id="prefill",
    request_id="req:1,\n\x00é",
    key=KEY,
    tp_size=2,
    pp_size=2,
    endpoints=tuple(
        Endpoint(rank, f"tcp://10.0.{stage}.{rank}:5600", f"{stage}{rank}" * 16, stage)
        for stage in (0, 1)
        for rank in (0, 1)
    ),
    groups=(BlockRuns(0, ((0, 3), (17, 1))), BlockRuns(16, ((5, 2),))),
    num_tokens=63,
    lease_s=20.0,
    renew_s=2.5,
    written=True,
    hashes=("hash of 16 tokens", "of 32", "of 48"),
    hash_tokens=16,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    tracestate="vendor=1",
    num_token_shards=2,
    recall=True,
)
LEAST_PARAMS = KVTransferParams(
    engine_id="p",
    request_id="r",
    key=KEY,
    endpoints=(Endpoint(0, "tcp://h:1", "a"),),
    groups=(BlockRuns(0, ((1, 1),)),),
    num_tokens=1,
)


NO_BLOCKS = msgspec.structs.replace(
    PARAMS, groups=(BlockRuns(0, ((-1, 3), (17, 1))), BlockRuns(0, ())), num_tokens=0, written=False
)
"""Params with placeholders, a group without blocks, and no tokens."""


def minted() -> dict[str, Any]:
    """Return KVTransferParams as a scheduler makes them, but without random parts."""
    group = PrefillRanks("prefill", PARAMS.endpoints[:1], token_hex=lambda n: "7f" * n)
    return group.make_params("req", [(0, [0, 1, 2, 17]), (16, [None, 5, 6])], 63, written=True)


def account() -> Account:
    """Return an account of an engine with every field set."""
    rank = RankStatus("decode/tp0@5c3acdd9", "granted", "tcp://h:1", "pull", 9.5, 0.25, 4096, 8192, 2)
    request = RequestStatus(
        "lease", "req", "p-req", "granted", 1.5, 0.5, 9.5, 4, "decode/tp0", (rank,), "pull", 2, 41,
        refused=((0.5, "claim", "consumed", "decode/tp1@5c3acdd9", "in words"),), history=((0.0, "lent"),), warn_s=10.0,
    )  # fmt: skip
    facts = Facts(
        version="0.2.0", host="host", pid=7, address="tcp://h:1", life="running", uptime_s=60.5,
        planes={"nixl": "1.5.1"}, counters={"sent.ping": 3},
        lag=Lag(last_s=0.25, most_s=0.5, was_away=1, counts={"0.001": 5, "inf": 1}),
        retrying=(request,), num_retrying=1,
    )  # fmt: skip
    peer = PeerStatus(
        rank="prefill/tp0@0a1b2c3d", address="tcp://h:2", state="ready", heard_s=0.5, pulls=1, follows=1,
        transfers=1, bytes_in_flight=4096, is_draining=True, is_orderly=True, failures=1, cause="timeout",
    )  # fmt: skip
    return Account(
        refused="too often", retry_s=0.5, engine_id="prefill", rank="prefill/tp1@0a1b2c3d", incarnation="0a1b2c3d" * 4,
        tp_rank=1, tp_size=2, pp_stage=1, pp_size=2, token_shards=(TokenShard(2, 2, 1, 4),), memory_epoch=3,
        closed_as="draining", facts=facts,
        counts=(PhaseCount(kind="lease", phase="granted", number=1, oldest_s=1.5),), counted_s=0.5, requests=(request,),
        holds=(HeldBlocks("req", "lent", {0: (1, 2)}, 1.5, 9.5, ("decode/tp0",), "pull"),), after="0x1.8p+1 l7",
        num_peers={"ready": 1}, peers=(peer,), num_readers=1, budgets={"parked": (0, 4096)},
        waits_for_step={"claim": StepWait(2, 7.5)}, step_s=7.5,
    )  # fmt: skip


def messages() -> dict[str, wire.Message]:
    """Return every kind of message, without defaults, and with every reason and outcome that it can have."""
    metadata = b"metadata of NIXL"
    made: list[wire.Message] = [
        wire.Hello(1, wire.MAJOR, wire.MINOR, "prefill", 1, COHORT, 1),
        wire.Welcome(
            1, wire.MAJOR, wire.MINOR, "prefill", "prefill-0a1b2c3d", metadata, hashlib.sha256(metadata).digest(),
            Raw(msgspec.msgpack.encode(LAYOUT)), Packing(1 << 40, 16, 1 << 20),
        ),
        wire.Claim(KEY, "req:1,\n\x00é", COHORT, "pull", 5, b"d" * 16, 30.0),
        wire.Renew(KEY, "pull", 6, 30.0),
        wire.Granted(KEY, "pull", 5, 10.0, 0.5),
        wire.NotYet(KEY, "pull", 5), wire.Ack(KEY, "pull"),
        wire.Ping(1), wire.Pong((1 << 63) - 1),
        wire.StatusRequest(1, 256, "0x1.8p+1 l7", "req", bytes(8)),
        wire.Status(1, "prefill", 1, 2, {"leases": 3}, encode_account(account())),
        wire.Goodbye(), wire.Draining(), wire.Packed(KEY, "pull", 7, 5), wire.Unpack(KEY, "pull", 7),
        wire.Follow("0123456789abcdef" * 2, 5, COHORT, 4096), wire.Unfollow("0123456789abcdef" * 2, 6),
        wire.Offered("0123456789abcdef" * 2, 5, wire.encode_offer(PARAMS), is_piece=True),
        wire.Pack(KEY, "pull", 7, Recipe(1, ((64, ((4, 9), (2, 2048))), (8, ())), ((0, 128, 1), (1, 0, 0)), ((1, 3),))),
    ]  # fmt: skip
    named = {type(message).__name__: message for message in made}
    named |= {f"Unwelcome, {x}": wire.Unwelcome(1, x, "in words") for x in sorted(wire.UNWELCOME)}
    named |= {f"Offered, {x}": wire.Offered("0" * 32, 5, reason=x, detail="in words") for x in sorted(wire.NOT_OFFERED)}
    named |= {f"Refused, {x}": wire.Refused(KEY, "pull", 5, x, "in words") for x in sorted(wire.REFUSED)}
    return named | {f"Release, {x}": wire.Release(KEY, "req", COHORT, "pull", x) for x in Outcome}


def plain(value: object) -> Any:
    """Return a value as JSON by the names of its fields, with nested encoded values decoded."""
    match value:
        case Struct() | Account() | HeldBlocks() | RankStatus() | RequestStatus():
            return {
                "is": type(value).__name__,
                **{name: plain(getattr(value, name)) for name in fields(value)},
            } | nested(value)
        case enum.Enum():
            return value.value
        case Raw() | bytes():
            return bytes(value).hex()
        case Mapping():
            return {str(key): plain(x) for key, x in value.items()}
        case list() | tuple():
            return [plain(x) for x in value]
        case msgspec.UNSET:
            return None
        case _:
            return value


def fields(value: Any) -> list[str]:
    """Return the field names of a struct or a dataclass."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(value.__struct_fields__)


def nested(value: object) -> dict[str, Any]:
    """Return the parts of a message that it carries encoded, because they are large."""
    match value:
        case wire.Welcome():
            return {"layout": plain(decode_layout(bytes(value.layout)))}
        case wire.Offered() if value.reason is None:
            return {"params": plain(wire.decode_offer(value))}
        case wire.Status() if value.account:
            return {"account": plain(decode_account(value.account))}
        case _:
            return {}


def digest_of(params: object) -> str:
    """Return the digest by which owner and reader know that they mean the same blocks."""
    return wire.blocks_digest(decode_params(params)).hex()


def made() -> dict[str, str]:
    """Return the files that this version writes, by name."""
    check_layout(LAYOUT)
    unwritten = msgspec.structs.replace(PARAMS, written=False)
    packets = []
    for name, message in messages().items():
        data = wire.encode_packet("0a1b2c3d" * 4, "5c3acdd9" * 4, [message])
        packets.append({"name": name, "bytes": data.hex(), "means": plain(wire.decode_packet(data))})
    written = {
        "packets.json": {"major": wire.MAJOR, "minor": wire.MINOR, "packets": packets},
        "params.json": [
            {"params": params, "digest": digest_of(params)}
            for params in (*map(msgspec.to_builtins, (PARAMS, unwritten, LEAST_PARAMS, NO_BLOCKS)), minted())
        ],
        "bounds.json": {
            "limits": wire_bounds.limits(),
            "packets": wire_bounds.packets(messages()),
            "params": wire_bounds.params(PARAMS),
        },
    }
    files = {name: json.dumps(value, indent=1, ensure_ascii=True) + "\n" for name, value in written.items()}
    return files | {"layout.json": dump_layouts([LAYOUT])}


def released() -> dict[str, str]:
    """Return the released versions with the digests of their folders."""
    found: dict[str, str] = json.loads((TARGET / RELEASED).read_text())
    return found


def folder_digest(folder: Path) -> str:
    """Return a digest of all files of a folder and their names."""
    files = sorted(folder.iterdir())
    return hashlib.sha256(
        b"".join(hashlib.sha256(x.name.encode() + b"\0" + x.read_bytes()).digest() for x in files)
    ).hexdigest()


def record(
    release: Annotated[
        bool, typer.Option("--release", help="This version is released now: seal the folder for ever.")
    ] = False,
) -> None:
    """Write this version's messages and public names into tests/data/wire/VERSION.

    Run this after a change of the protocol or of public names. With --release, run it right before the tag.
    """
    sealed = released()
    if VERSION in sealed:
        raise ConfigError(f"{VERSION} was released, and its folder never changes: set a new one in asynckv/version.py")
    reports = public_names.reports(account())
    for name in public_names.COMMANDS:
        reports |= public_names.commanded(name)
    public = {"names.json": public_names.names(), "reports.json": reports}
    files = made() | {name: json.dumps(value, indent=1) + "\n" for name, value in public.items()}
    folder = TARGET / VERSION
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files:  # recorded earlier, but no longer made
            path.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)
    if release:
        sealed[VERSION] = folder_digest(folder)
        (TARGET / RELEASED).write_text(json.dumps(sealed, indent=1) + "\n")


main = command.script(record, "[bold]Exit status[/bold]  0 written, 2 released already, or bad input")


if __name__ == "__main__":
    sys.exit(main())
