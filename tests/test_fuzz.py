"""Every decoder of what comes from outside, by mutation of valid input: a value, or the one documented error."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asynckv import ConfigError, KeysConfig, LayoutError, LeaseConfig, PrefillRanks, RemoteProtocolError
from asynckv.account.inspect import HeldBlocks, RankStatus, RequestStatus
from asynckv.account.values import Account, Facts, Lag, PeerStatus, PhaseCount, decode_account, encode_account
from asynckv.core import wire as m
from asynckv.core.types import Address, Cohort, KVTransferParams, decode_params
from asynckv.edges.control.zmq import ZmqPlane, make_pair
from asynckv.geometry.check import check_layout
from asynckv.geometry.gather import PACK_BYTES, Packing, Ranges, Recipe, check_recipe
from asynckv.geometry.layout import Layout
from asynckv.keys import AllowList, _parse, decode_z85, encode_z85, read_pair, read_public, write_pair
from asynckv.told import StepWait
from asynckv.tools.bench import workload
from asynckv.tools.plan.layout_file import dump_layouts, load_layouts
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import PRESETS, read_hf_config
from tests.lab.strangers import every_message, mutate
from tests.test_messages import ALL

LAYOUT = model_layout(PRESETS["nemotron-h-8b"].resized(layers=4), tp_rank=0, tp_size=2, num_blocks=8)
LAYOUT_TEXT = dump_layouts([LAYOUT])
LAYOUT_BYTES = msgspec.msgpack.encode(LAYOUT)
LAYOUT_DECODER: msgspec.msgpack.Decoder[Layout] = msgspec.msgpack.Decoder(Layout)
ENDPOINTS = [
    {"tp_rank": r, "address": f"tcp://[::1]:{5000 + r}#{'0' * 64}", "incarnation": "i" * 32, "pp_stage": 0}
    for r in range(2)
]
GROUP = PrefillRanks("prefill", ENDPOINTS, lease=LeaseConfig())
PARAMS = GROUP.make_params(
    "req:1,\n\u00e9", [(0, [1, 2, 3, None, 9]), (16, [4])], 70, hashes=["a", "b"], hash_tokens=16
)
OF_PARAMS = decode_params(PARAMS)
KEYS = 8 * 16_384  # bytes of the keys of all blocks, behind which the values lie
RECIPE = Recipe(1, ((256, ((16, 1024),)), (8, ())), ((3, 256, 0), (3, KEYS + 512, 0), (3, 7, 1)), ((1, 3), (5, 1)))
SAID = [
    *ALL,
    *every_message(OF_PARAMS, LAYOUT, Cohort("decode")),
    m.Welcome(7, m.MAJOR, m.MINOR, "x", "agent", b"", bytes(32), msgspec.Raw(LAYOUT_BYTES), Packing(1 << 40, 16)),
    m.Pack(OF_PARAMS.key, "decode-1", 7, RECIPE),
]
PACKETS = [m.encode_packet("source", "target", x) for x in (*([y] for y in SAID), SAID)]
HF = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 512,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
    "text_config": None,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 64,
}

WILD: list[Callable[[random.Random], Any]] = [
    lambda rng: None,
    lambda rng: rng.random() < 0.5,
    lambda rng: rng.choice((-1, 0, 1, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 10**400)),
    lambda rng: rng.choice((float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 0.5)),
    lambda rng: rng.choice(("", "x" * 100_000, "\ud800", "\0", "\u202e", "tcp://x:1", "1", "nan")),
    lambda rng: rng.choice(([], {}, [[]], {"": {}}, [None] * 1000, {"a": 1})),
    lambda rng: nested(rng.choice((10, 500, 5000))),
]


def as_json(value: Any) -> bytes:
    """Encode what Python's encoder takes; else, nest as deep as it does not."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b'{"x": [' * 20_000 + b"0" + b"]}" * 20_000


def nested(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    return value


def spoil(rng: random.Random, value: Any) -> Any:
    """Change one place of a tree, or a few: other values and types, missing, unknown and repeated entries."""
    if isinstance(value, dict) and value and rng.random() < 0.93:
        name = rng.choice(list(value))
        match rng.randrange(12):
            case 0:
                return {k: v for k, v in value.items() if k != name}
            case 1:
                return value | {rng.choice(("x", "", "schema", "\ud800")): value[name]}
            case _:
                return value | {name: spoil(rng, value[name])}
    if isinstance(value, list | tuple) and value and rng.random() < 0.93:
        at = rng.randrange(len(value))
        match rng.randrange(12):
            case 0:
                return [*value[:at], *value[at + 1 :]]
            case 1:
                return [*value, value[at]] * rng.choice((1, 2, 100))
            case _:
                return [*value[:at], spoil(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and rng.random() < 0.5:
        return mutate(rng, value.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogateescape")
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 1 << 31, 1 << 62))
    return rng.choice(WILD)(rng)


# -- one function per decoder: it returns a value or raises the one error -----------------------------


def packet(rng: random.Random, path: Path) -> object:
    data = rng.choice(PACKETS)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        data = mutate(rng, data)
    match rng.randrange(40):
        case 0:
            data = rng.choice((b"\x91", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x81\x00")) * 20_000 + data
        case 1 if data:  # a length that is never there
            at = rng.randrange(len(data))
            data = data[:at] + rng.choice((b"\xc6", b"\xdb", b"\xdd", b"\xdf")) + b"\xff" * 4 + data[at:]
        case _:
            pass
    return m.decode_packet(data)


def packet_tree(rng: random.Random, path: Path) -> object:
    tree = msgspec.msgpack.decode(rng.choice(PACKETS))
    try:
        data = msgspec.msgpack.encode(spoil(rng, tree))
    except (UnicodeEncodeError, OverflowError, RecursionError):
        data = b""
    return m.decode_packet(data)


RANGES = Ranges(LAYOUT)
LENT = np.array([1, 2, 3, 5])
RECIPES: msgspec.msgpack.Decoder[Recipe] = msgspec.msgpack.Decoder(Recipe)


def recipe_of_a_reader(rng: random.Random, path: Path) -> object:
    tree = msgspec.to_builtins(RECIPE)
    for _ in range(rng.choice((1, 1, 2, 4))):
        tree = spoil(rng, tree)
    try:
        asked = RECIPES.decode(msgspec.msgpack.encode(tree))
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, RecursionError):
        return None  # the packet was refused
    gathered = check_recipe(asked, RANGES, LENT, PACK_BYTES)
    assert gathered.num_bytes <= PACK_BYTES
    assert set(gathered.blocks.tolist()) <= set(LENT.tolist())
    for memory, offset, stride, piece, shape, strides in gathered.rows:
        end = piece + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        assert (LAYOUT.views[memory].group, LAYOUT.views[memory].stride) == (asked.group, stride)
        assert (offset % KEYS if asked.group else offset) + end <= stride, "a byte of another block"
    return gathered


def layout_of_a_peer(rng: random.Random, path: Path) -> object:
    tree = msgspec.msgpack.decode(LAYOUT_BYTES)
    try:
        layout = LAYOUT_DECODER.decode(msgspec.msgpack.encode(spoil(rng, tree)))
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, RecursionError):
        return None  # the packet was refused
    check_layout(layout)
    return layout


ACCOUNT = Account(
    rank="p/tp0@0a1b2c3d",
    facts=Facts(version="0.2.0", planes={"nixl": "1"}, counters={"sent.ping": 3}, lag=Lag(counts={"inf": 0})),
    counts=(PhaseCount(kind="lease", phase="granted", number=1, oldest_s=0.5),),
    requests=(
        RequestStatus("lease", "r", "r", "lent", 1.0, 1.0, None, 2, "w", (RankStatus("d/tp0", "granted"),), "p", 1, 7),
    ),
    holds=(HeldBlocks("r", "lent", {0: (1, 2)}, 1.0, math.inf, ("d/tp0",)),),
    num_peers={"ready": 1},
    peers=(PeerStatus(rank="x", address="tcp://x:1", state="ready"),),
    budgets={"parked": (0, 4096)},
    waits_for_step={"claim": StepWait(1, 2.0)},
)
ACCOUNT_BYTES = encode_account(ACCOUNT)


def account(rng: random.Random, path: Path) -> object:
    if rng.random() < 0.5:
        return decode_account(mutate(rng, ACCOUNT_BYTES))
    try:
        data = msgspec.msgpack.encode(spoil(rng, msgspec.msgpack.decode(ACCOUNT_BYTES, strict=False)))
    except (UnicodeEncodeError, OverflowError, RecursionError, TypeError):
        data = b""
    return decode_account(data)


def params(rng: random.Random, path: Path) -> object:
    found = decode_params(spoil(rng, PARAMS))
    assert isinstance(found, KVTransferParams)
    return found


def endpoints(rng: random.Random, path: Path) -> object:
    endpoints = spoil(rng, ENDPOINTS)
    # What is no list of objects the type checker and the caller see to.
    endpoints = endpoints if isinstance(endpoints, list) else [endpoints]
    return PrefillRanks("prefill", endpoints, tp_size=rng.choice((None, 2)))


def layout_file(rng: random.Random, path: Path) -> object:
    text = LAYOUT_TEXT
    if rng.random() < 0.5:
        path.write_bytes(mutate(rng, text.encode()))
    else:
        path.write_bytes(as_json(spoil(rng, json.loads(text))))
    return load_layouts(path)


def hf_config(rng: random.Random, path: Path) -> object:
    if rng.random() < 0.3:
        path.write_bytes(mutate(rng, json.dumps(HF).encode()))
    else:
        path.write_bytes(as_json(spoil(rng, HF)))
    return read_hf_config(path)


def trace(rng: random.Random, path: Path) -> object:
    lines = b"".join(as_json(spoil(rng, {"input_length": 9, "x": [1]})) + b"\n" for _ in range(3))
    path.write_bytes(mutate(rng, lines) if rng.random() < 0.5 else lines)
    return workload.traced(path, rng.choice((None, 2)))


PAIR = make_pair()
KEY_FILE = (
    f'# a comment\nmetadata\n    x = y\ncurve\n    public-key = "{encode_z85(PAIR.public)}"\n'
    f'    secret-key = "{encode_z85(PAIR.secret)}"\n'
).encode()


def key_file(rng: random.Random, path: Path) -> object:
    path.write_bytes(mutate(rng, KEY_FILE))
    path.chmod(0o600)
    return read_pair(path) if rng.random() < 0.5 else read_public(path)


def key_lines(rng: random.Random, path: Path) -> object:
    return _parse(path, mutate(rng, KEY_FILE))


def key_text(rng: random.Random, path: Path) -> object:
    return decode_z85(mutate(rng, encode_z85(PAIR.public).encode()))


def allow_list(rng: random.Random, path: Path) -> object:
    directory = path.with_suffix("")
    directory.mkdir(exist_ok=True)
    (directory / "a.key").write_bytes(mutate(rng, KEY_FILE[:96] + b"\n"))
    return AllowList(directory)


def own_address(rng: random.Random, path: Path) -> object:
    text = rng.choice(("tcp://127.0.0.1:0", "tcp://[::1]:5555", "tcp://host.example:80", "tcp://*:*"))
    text = mutate(rng, text.encode()).decode("utf-8", "surrogateescape")
    return ZmqPlane(text, rng.choice(("", text)), allow_insecure=True)


DECODERS: dict[Callable[[random.Random, Path], object], tuple[type[Exception], int]] = {
    packet: (RemoteProtocolError, 8_000),
    packet_tree: (RemoteProtocolError, 2_000),
    recipe_of_a_reader: (LayoutError, 1_000),
    layout_of_a_peer: (LayoutError, 500),
    account: (RemoteProtocolError, 4_000),
    params: (RemoteProtocolError, 3_000),
    endpoints: (ConfigError, 2_000),
    layout_file: (ConfigError, 60),
    hf_config: (ConfigError, 60),
    trace: (ConfigError, 60),
    key_file: (ConfigError, 60),
    key_lines: (ConfigError, 5_000),
    key_text: (ValueError, 3_000),
    allow_list: (ConfigError, 40),
    own_address: (ConfigError, 2_000),
}


def fuzz(work: Callable[[random.Random, Path], object], number: int, seed: int, path: Path) -> Counter[str]:
    """Decode so many mutations; anything but the documented error ends it with the seed of the case."""
    error, counts, rng = DECODERS[work][0], Counter[str](), random.Random()
    for case in range(number):
        rng.seed(f"{work.__name__} {seed} {case}")
        try:
            work(rng, path)
            counts["values"] += 1
        except error:
            counts["refused"] += 1
        except Exception as exc:
            raise AssertionError(f"{work.__name__}: seed {seed}, case {case}: {exc!r:.500}") from exc
    return counts


@pytest.mark.parametrize("work", DECODERS, ids=lambda x: x.__name__)
def test_a_decoder_returns_a_value_or_its_one_error(
    work: Callable[[random.Random, Path], object], tmp_path: Path
) -> None:
    counts = fuzz(work, DECODERS[work][1], 0, tmp_path / "file.json")
    assert min(counts["values"], counts["refused"]) > 0  # the mutations are neither harmless nor noise


async def test_a_plane_says_nothing_to_any_mutation_of_an_address(tmp_path: Path) -> None:
    secret, _ = write_pair(tmp_path, "a", PAIR)
    plane, rng = ZmqPlane("tcp://127.0.0.1:0", keys=KeysConfig(secret=secret, authorized=tmp_path)), random.Random(2)
    await plane.start(lambda origin, data, principal: None)
    try:
        for _ in range(3_000):
            text = "tcp://127.0.0.1:5555" + f"#{'1' * 64}" * rng.randrange(2)
            text = mutate(rng, text.encode()).decode("utf-8", "surrogateescape")
            assert not plane.send(Address(text), b"secret")
        counts = plane.statistics()
        assert counts["links"] == 0
        assert min(counts[x] for x in ("bad_address", "refused.no_key", "refused.unlisted_listener")) > 0
    finally:
        await plane.aclose()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("work", [packet, params], ids=lambda x: x.__name__)
def test_very_many_mutations(work: Callable[[random.Random, Path], object], tmp_path: Path) -> None:
    """By default a tenth of the million that was run before a release: it takes more than a minute."""
    number = int(os.environ.get("ASYNCKV_FUZZ", "100000"))
    assert sum(fuzz(work, number, 1, tmp_path / "file.json").values()) == number
