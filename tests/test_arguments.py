"""Arguments are taken or refused by a typed error, before anything happens; no caller meets a TypeError."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch

import asynckv
from asynckv import (
    AsyncKVError,
    ConfigError,
    Endpoint,
    Engine,
    EngineConfig,
    InspectConfig,
    KeysConfig,
    KVTransferParams,
    LayoutError,
    LeaseConfig,
    LimitsConfig,
    LocalProtocolError,
    LogConfig,
    NixlConfig,
    PlanRefused,
    PrefillRanks,
    PullConfig,
    Registration,
    RemoteProtocolError,
    configure_logging,
    embed,
    layout,
    offload,
    register_tensors,
    shard,
    synchronize,
)
from asynckv.core import wire as messages
from asynckv.core.types import FollowParams, decode_follow, decode_params
from asynckv.layout import (
    Dim,
    Group,
    Layout,
    Memory,
    Part,
    TensorPart,
    View,
    attention_view,
    dense_part,
    register_memory,
    register_parts,
)
from asynckv.offload import Offload, OffloadConfig
from asynckv.offload.eviction import policy_named
from asynckv.tiers.offload import Pin
from tests.engines import Bench, memory, pass_by, passing, turn_loop, until
from tests.lab.offload_audit import check as check_offload
from tests.lab.tiers import SimCopies
from tests.offloads import SIZE, Rank, chain, layout_of

HOSTILE: dict[str, Any] = {
    "none": None,
    "true": True,
    "1.5": 1.5,
    "nan": math.nan,
    "inf": math.inf,
    "-1": -1,
    "2^70": 1 << 70,
    "10^400": 10**400,
    "text": "3",
    "empty text": "",
    "long text": "x" * 100_000,
    "bytes": b"3",
    "lone surrogate": "a\ud800",
    "list": [],
    "list of integers": [0, 1],
    "list of a bool": [(0, [True])],
    "dict": {},
    "object": object(),
    "numpy integer": np.int64(3),
    "numpy float": np.float32(1.5),
    "numpy bool": np.True_,
    "numpy array": np.array([[1, 2], [3, 4]]),
    "tensor": torch.zeros(2),
    "function": len,
}
CODE = {"data", "control", "clock", "token_hex", "copies", "records", "serve", "leftovers"}
"""Parameters that take code of the caller's, not values."""

CLASSES = {
    "EngineConfig",
    "InspectConfig",
    "KeysConfig",
    "LeaseConfig",
    "LimitsConfig",
    "LogConfig",
    "NixlConfig",
    "PullConfig",
    "Engine",
    "Offload",
    "OffloadConfig",
    "PrefillRanks",
    "PieceSizes",  # in tests/test_head_start.py
    "Metrics",  # these in tests/test_metrics.py and tests/test_tracing.py
    "MetricsEndpoint",
    "Tracing",
}
FUNCTIONS = {
    "attention_view",
    "configure_logging",
    "dense_part",
    "register_memory",
    "register_parts",
    "register_tensors",
    "shard",
    "shared_memory",
    "shared_tensor",
    "token_hashes",  # in tests/test_hashes.py
    "trace_context",
    "synchronize",
}
VALUES = {
    "Dim",
    "Endpoint",
    "FollowParams",
    "Group",
    "KVTransferParams",
    "Layout",
    "Memory",
    "Part",
    "Registration",
    "TokenShard",
    "TensorPart",
    "View",
}
"""Written down by callers, and checked by the function that gets them."""
RESULTS = {
    "Evicted",
    "Found",
    "HeldBlocks",
    "LeaseEnd",
    "LentRequest",
    "Loaded",
    "Observer",
    "PullResult",
    "RankStatus",
    "Reading",
    "RequestStatus",
    "Statistics",
    "Stored",
    "ONE_PER_REQUEST",
}
"""Made by the library."""


def test_every_public_name_is_tried_here() -> None:
    """Or in `tests/test_embed.py`, which hands all that it is given to an engine."""
    errors = {n for n in asynckv._HOME if isinstance(e := getattr(asynckv, n), type) and issubclass(e, Exception)}
    public = {*asynckv._HOME, *layout.__all__, *offload.__all__}
    embedded = set(embed.__all__)
    assert public == CLASSES | FUNCTIONS | VALUES | RESULTS | embedded | errors


def parameters(call: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name not in CODE | {"self"}]


def methods(kind: type) -> list[str]:
    """Those that take anything."""
    return sorted(
        name
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and len(inspect.signature(method).parameters) > 1
    )


def tried(kind: type[AsyncKVError], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    error: AsyncKVError | None = None
    try:
        return call(*args, **kwargs)
    except kind as exc:
        error = exc
    str(error).encode()
    assert 10 < len(str(error)) < 2000
    return error


# -- what is called without an engine ----------------------------------------------------------------------

CONFIGS: list[tuple[type, dict[str, Any]]] = [
    (LeaseConfig, {}),
    (PullConfig, {}),
    (LimitsConfig, {}),
    (NixlConfig, {}),
    (LogConfig, {}),
    (InspectConfig, {}),
    (KeysConfig, {"secret": "s", "authorized": "a"}),
    (EngineConfig, {"engine_id": "e"}),
    (OffloadConfig, {"model": "m", "hash_tokens": 16, "host_bytes": 1 << 20}),
]
ONE_CONFIG = [(kind, given, name) for kind, given in CONFIGS for name in parameters(kind)]


@pytest.mark.parametrize(("kind", "given", "name"), ONE_CONFIG, ids=[f"{k.__name__}-{n}" for k, _, n in ONE_CONFIG])
def test_a_configuration_is_made_or_refused(kind: type, given: dict[str, Any], name: str) -> None:
    taken = set()
    for what, value in HOSTILE.items():
        made = tried(ConfigError, kind, **{**given, name: value})
        if not isinstance(made, ConfigError):
            taken.add(what)
            assert type(getattr(made, name)) in (int, float, bool, str, dict, type(None)), what
    assert not taken & {"nan", "inf", "-1", "bytes", "lone surrogate", "object", "tensor", "10^400", "list"}


ENDPOINT = Endpoint(0, "tcp://127.0.0.1:5555", "abc")


def test_a_group_is_made_or_refused() -> None:
    given: dict[str, Any] = {"engine_id": "p", "endpoints": [ENDPOINT]}
    for name in parameters(PrefillRanks):
        for what, value in HOSTILE.items():
            made = tried(ConfigError, PrefillRanks, **{**given, name: value})
            assert isinstance(made, ConfigError) or name != "endpoints", what
    for name in Endpoint.__struct_fields__:
        for what, value in HOSTILE.items():
            made = tried(ConfigError, PrefillRanks, "p", [msgspec.structs.replace(ENDPOINT, **{name: value})])
            is_text = isinstance(value, str) and name in ("address", "incarnation")
            assert isinstance(made, ConfigError) or is_text, (name, what)
    with pytest.raises(ConfigError, match="pp_size is 1208925819614629174706176"):
        PrefillRanks("p", [ENDPOINT], pp_size=1 << 80)


@pytest.mark.parametrize("name", parameters(PrefillRanks.make_params))
def test_params_are_made_or_refused_and_no_key_is_minted(name: str) -> None:
    group = PrefillRanks("p", [ENDPOINT])
    given: dict[str, Any] = {
        "request_id": "r",
        "groups": [(0, [1, 2])],
        "num_tokens": 20,
        "hashes": ["a"],
        "hash_tokens": 16,
    }
    minted = group.make_params(**given)["key"][2]
    for what, value in HOSTILE.items():
        params = tried(ConfigError, group.make_params, **{**given, name: value})
        if not isinstance(params, ConfigError):
            minted += 1
            assert decode_params(params).key.sequence == minted, what
            msgspec.json.encode(params)
    assert group.make_params(**given)["key"][2] == minted + 1


def test_numpy_integers_make_the_same_params_as_pythons() -> None:
    group = PrefillRanks("p", [ENDPOINT], token_hex=lambda n: "0" * 2 * n)
    plain = group.make_params("r", [(16, [1, 2])], 40, lease_s=4.0, hashes=["a"], hash_tokens=16)
    numbers = group.make_params(
        "r",
        [(np.int32(16), [np.int64(1), np.int32(2)])],  # type: ignore[list-item]
        np.int64(40),  # type: ignore[arg-type]
        lease_s=np.float32(4.0),  # type: ignore[arg-type]
        hashes=np.array(["a"]),  # type: ignore[arg-type]
        hash_tokens=np.uint8(16),  # type: ignore[arg-type]
    )
    assert {**numbers, "key": 0} == {**plain, "key": 0}


def test_what_was_described_can_be_decoded_or_was_not_described() -> None:
    group = PrefillRanks("p", [ENDPOINT])
    with pytest.raises(ConfigError, match=r"request_id is 'a\\ud800' .*without lone surrogates"):
        group.make_params("a\ud800", [(0, [1])], 16)
    with pytest.raises(ConfigError, match="groups is None; give one"):
        group.make_params("r", None, 16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lease_s is '3'; it must be a positive, finite number of seconds"):
        group.make_params("r", [(0, [1])], 16, lease_s="3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_tokens is True; it must be an integer from 0"):
        group.make_params("r", [(0, [1])], True)


LAYOUT = memory(1)[0].layout
[GROUP] = LAYOUT.groups
VIEW = LAYOUT.views[0]


def with_field(kind: type, name: str, value: Any) -> Layout:
    """A layout in which one field of one of its parts is something else."""
    change = {name: value}
    if kind is Layout:
        return msgspec.structs.replace(LAYOUT, **change)
    if kind is Memory:
        return msgspec.structs.replace(
            LAYOUT, memories=(msgspec.structs.replace(LAYOUT.memories[0], **change), *LAYOUT.memories[1:])
        )
    if kind is Group:
        return msgspec.structs.replace(LAYOUT, groups=(msgspec.structs.replace(GROUP, **change),))
    view = VIEW
    if kind is View:
        view = msgspec.structs.replace(view, **change)
    else:
        part = view.parts[0]
        if kind is Part:
            part = msgspec.structs.replace(part, **change)
        else:
            dims = (msgspec.structs.replace(part.dims[0], **change), *part.dims[1:])
            part = msgspec.structs.replace(part, dims=dims)
        view = msgspec.structs.replace(view, parts=(part, *view.parts[1:]))
    return msgspec.structs.replace(LAYOUT, views=(view, *LAYOUT.views[1:]))


@pytest.mark.parametrize("kind", [Layout, Memory, Group, View, Part, Dim])
def test_a_layout_is_registered_or_refused(kind: Any) -> None:
    for name in kind.__struct_fields__:
        for what, value in HOSTILE.items():
            made = tried(LayoutError, register_memory, with_field(kind, name, value))
            if not isinstance(made, LayoutError):
                # Whatever was taken can be sent to peers.
                assert msgspec.msgpack.decode(msgspec.msgpack.encode(made.layout), type=Layout) == made.layout
                assert what not in ("nan", "bytes", "lone surrogate", "object", "10^400"), (name, what)


def test_memory_is_registered_or_refused() -> None:
    for what, value in HOSTILE.items():
        assert isinstance(tried(LayoutError, register_memory, value), LayoutError), what
        tried(LayoutError, register_memory, LAYOUT, value)


TENSORS: dict[str, Any] = {
    "tensors": {"layers.0": torch.zeros(2, 4, 16, 2, 8)},
    "order": ("kv", "block", "token", "head", "dim"),
    "block_size": 16,
    "num_blocks": 4,
    "heads": (0, 2),
    "num_heads": 2,
}
STATE = torch.zeros(4, 16, 2, 8)
PART: dict[str, Any] = {
    "layer": "layers.0",
    "name": "k",
    "tensor": STATE,
    "order": ("block", "token", "head", "dim"),
    "axis": "head",
    "held": (0, 2),
    "extent": 2,
}
PARTS: dict[str, Any] = {"parts": [TensorPart(**PART)], "groups": [Group("attention", 16, 4)]}
VIEWS: dict[str, Any] = {
    "layer": "layers.0",
    "order": ("kv", "block", "token", "head", "dim"),
    "sizes": {"kv": 2, "block": 4, "token": 16, "head": 2, "dim": 8},
    "dtype": "float16",
    "heads": (0, 2),
    "num_heads": 2,
    "strides": {"kv": 8192, "block": 1024, "token": 64, "head": 32, "dim": 2},
}
ALONE: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (register_tensors, TENSORS),
    (register_parts, PARTS),
    (attention_view, VIEWS),
    (dense_part, {"name": "k", "dtype": "float16", "dims": [("token", 16), ("dim", 8)]}),
    (shard, {"extent": 8, "tp_rank": 0, "tp_size": 2}),
]


@pytest.mark.parametrize(("call", "given"), ALONE, ids=[call.__name__ for call, _ in ALONE])
def test_a_declaration_is_taken_or_refused(call: Callable[..., Any], given: dict[str, Any]) -> None:
    call(**given)
    for name in parameters(call):
        for value in HOSTILE.values():
            tried(LayoutError, call, **{**given, name: value})
            keyed = {value: 1} if isinstance(value, Hashable) else {}
            for nested in (keyed, {"kv": value}, {"layers.0": value}, [value], (value, value), [("k", value)]):
                tried(LayoutError, call, **{**given, name: nested})


def test_parts_of_tensors_are_taken_or_refused() -> None:
    for name in parameters(TensorPart):
        for value in HOSTILE.values():
            tried(LayoutError, register_parts, [TensorPart(**{**PART, name: value})], groups=PARTS["groups"])
    for name in Group.__struct_fields__:
        for value in HOSTILE.values():
            group = msgspec.structs.replace(PARTS["groups"][0], **{name: value})
            tried(LayoutError, register_parts, PARTS["parts"], groups=[group])


def test_tensors_that_are_none_are_named() -> None:
    with pytest.raises(LayoutError, match="block_size is '4'; it must be an integer from 1"):
        register_tensors(**{**TENSORS, "block_size": "4"})
    with pytest.raises(LayoutError, match=r"layer 'layers.0': is \[1, 2\]; give a torch.Tensor"):
        register_tensors(**{**TENSORS, "tensors": {"layers.0": [1, 2]}})
    with pytest.raises(LayoutError, match=r"a layer's name is b'layers\.0'; it must be a str"):
        register_tensors(**{**TENSORS, "tensors": {b"layers.0": STATE}})


async def test_events_are_waited_for_or_refused() -> None:
    for value in HOSTILE.values():
        with pytest.raises(LocalProtocolError, match="is not an event"):
            await synchronize(value)


def test_logging_is_configured_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some are names of files
    for name in parameters(configure_logging):
        for value in HOSTILE.values():
            tried(ConfigError, configure_logging, **{name: value})


def test_an_engine_is_made_or_refused() -> None:
    registration = memory(1)[0]
    bad = msgspec.structs.replace(LAYOUT, groups=5)
    for value in (*HOSTILE.values(), Registration(None), Registration(bad)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="config is"):
            Engine(value, registration)
        with pytest.raises(ConfigError, match="registration is"):
            Engine(EngineConfig(engine_id="e"), value)


# -- an engine ---------------------------------------------------------------------------------------------


async def pumped(bench: Bench | Rank, call: Callable[[], Any]) -> Any:
    """Await a call while time passes, if it is to be awaited."""
    found = call()
    if not inspect.isawaitable(found):
        return found
    task = asyncio.ensure_future(_awaited(found))
    await turn_loop(20)
    return await passing(bench, task, 0.05)


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


def quiet(engine: Engine) -> tuple[Any, ...]:
    engine.check_integrity()
    statistics, core = engine.statistics(), engine._driver.core
    gauges = {k: v for k, v in statistics.gauges.items() if k != "peers"}
    return (gauges, engine.holds(), core.requests, core.prefill.closed_as, engine._ending._suspending)


def arguments(params: dict[str, Any], number: int) -> dict[str, dict[str, Any]]:
    """A good call of every method that takes anything."""
    return {
        "drain": {"timeout_s": 0.1},
        "aclose": {"timeout_s": 0.1},
        "suspend": {"timeout_s": 0.1},
        "resume": {"registration": None},
        "lend": {"params": params, "num_readers": 1, "ticket": f"{number:032x}"},
        "withdraw": {"params": params},
        "withdraw_ticket": {"ticket": "f" * 32},
        "lend_piece": {"params": params | {"written": True, "recall": True}, "ticket": f"{number:032x}"},
        "end_pieces": {"ticket": "f" * 32},
        "is_followed": {"ticket": "f" * 32},
        "recall": {"requests": [params]},
        "reclaim": {"num_blocks": 1},
        "follow": {
            "request_id": f"d{number}",
            "follow": {"ticket": f"{number:032x}"} | {x: params.get(x) for x in ("engine_id", "endpoints")},
            "wait_s": 5.0,
            "cohort_id": "",
            "groups": [(0, [2])],
            "hashes": None,
        },
        "announce": {"request_id": f"d{number}", "params": params, "wait_s": 5.0, "cohort_id": ""},
        "pull": {
            "request_id": f"d{number}",
            "groups": [(0, [2])],
            "params": params,
            "timeout_s": 5.0,
            "cohort_id": "",
            "hashes": None,
            "num_tokens": 16,
            "is_last": True,
            "priority": 0,
            "retries": 1,
        },
        "cancel": {"request_id": f"d{number}", "params": params, "cohort_id": "", "follows_on": False},
        "returned": {"request_id": f"d{number}"},
        "forget_peer": {"address": "sim://99"},
    }


def to_an_offload(number: int) -> dict[str, dict[str, Any]]:
    """The same of an offload."""
    hashes: dict[str, Any] = {"hashes": chain("p", 2)}
    moved = {"request_id": f"r{number}", "groups": [(0, [3, 4])], **hashes}
    asked = hashes | {"num_tokens": 2 * SIZE}
    return {
        "aclose": {"timeout_s": 0.1},
        "cancel": {"request_id": "a"},
        "evict": hashes,
        "lend": {"request_id": f"r{number}", **asked, "lease_s": 20.0, "num_readers": 1},
        "load": {**moved, "num_tokens": 2 * SIZE, "timeout_s": 5.0},
        "lookup": asked,
        "pin": asked,
        "returned": {"request_id": "a"},
        "store": moved,
        "touch": asked,
        "would_wait": asked,
    }


ONE_ARGUMENT = [(name, p) for name in methods(Engine) for p in parameters(getattr(Engine, name))]
ONE_OF_AN_OFFLOAD = [(name, p) for name in methods(Offload) for p in parameters(getattr(Offload, name))]


@pytest.mark.parametrize(("kind", "calls"), [(Engine, arguments({}, 0)), (Offload, to_an_offload(0))])
def test_every_method_that_takes_anything_is_tried_here(kind: type, calls: dict[str, dict[str, Any]]) -> None:
    assert {name: sorted(given) for name, given in calls.items()} == {
        name: sorted(parameters(getattr(kind, name))) for name in methods(kind)
    }


@pytest.mark.parametrize(("method", "name"), ONE_ARGUMENT, ids=[f"{m}-{p}" for m, p in ONE_ARGUMENT])
async def test_an_argument_is_taken_or_refused_before_anything_happens(sim: Bench, method: str, name: str) -> None:
    async with sim.pair() as (prefill, decode, group):
        taken = set()
        for number, (what, value) in enumerate(HOSTILE.items()):
            params = group.make_params(f"r{number}", [(0, [1])], 16, written=True)
            role = prefill if method == "lend" else decode
            if method == "resume":
                await pumped(sim, decode.engine.suspend)
            lent = prefill.engine.lend(params, ticket=f"{number:032x}") if method != "lend" else None
            await turn_loop(3)
            before = quiet(role.engine)
            given = {**arguments(params, number)[method], name: value}
            found, error = None, None
            try:
                found = await pumped(sim, partial(getattr(role.engine, method), **given))
            except (LocalProtocolError, PlanRefused, RemoteProtocolError) as exc:
                error = exc
            if error is not None:
                str(error).encode()
                assert quiet(role.engine) == before, f"{what}: {error}"
                if method == "resume":
                    await decode.engine.resume()
            else:
                taken.add(what)
                lent = found if method == "lend" else lent
                if method == "suspend":
                    await decode.engine.resume()
            for request_id in (f"d{number}", value):
                if isinstance(request_id, str) and len(request_id) < 100 and request_id.isascii():
                    decode.engine.cancel(request_id)
            if lent is not None:
                lent.withdraw()
                await pumped(sim, lent.wait_released)
        assert not {"lone surrogate", "bytes", "object", "nan", "10^400"} & taken
        if method in ("drain", "aclose"):
            return  # it takes nothing new any more
        # And then everything works.
        params, _ = prefill.lent(group, "last", [1], written=True)
        await pumped(sim, lambda: decode.engine.pull("last", [(0, [3])], params))
        assert decode.blocks([3]) == prefill.blocks([1])
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 0)


def quiet_too(offload: Offload) -> tuple[Any, ...]:
    check_offload(offload)
    said, own = offload.statistics(), offload._own.catalogue
    held = {name: len(job.todo) for name, job in own.jobs.items()}, {name: len(x) for name, x in own.pins.items()}
    return said.counters, said.gauges, held, quiet(offload.engine), offload._tiers._closing


@pytest.mark.parametrize(("method", "name"), ONE_OF_AN_OFFLOAD, ids=[f"{m}-{p}" for m, p in ONE_OF_AN_OFFLOAD])
async def test_what_an_offload_is_given_is_taken_or_refused_before_anything_happens(method: str, name: str) -> None:
    rank, taken = Rank(layout_of(), network_=EngineConfig(engine_id="worker-host")), set()
    async with rank.running() as offload:
        await offload.store("a", [(0, [1, 2])], chain("p", 2))
        for number, (what, value) in enumerate(HOSTILE.items()):
            before = quiet_too(offload)
            call = partial(getattr(offload, method), **{**to_an_offload(number)[method], name: value})
            error = None
            try:
                found = await pumped(rank, call)
            except (LocalProtocolError, PlanRefused) as exc:
                error = exc
            if error is not None:
                str(error).encode()
                assert quiet_too(offload) == before, f"{what}: {error}"
                continue
            taken.add(what)
            if isinstance(found, Pin):
                found.release()
            if method == "aclose":
                offload = Offload(offload.config, rank.engine, copies=SimCopies(), serve=rank._serve)
                await offload.start()
            if method in ("aclose", "evict"):
                await offload.store("a", [(0, [1, 2])], chain("p", 2))
        assert not {"lone surrogate", "bytes", "object", "nan", "10^400"} & taken
        assert (await offload.load("last", [(0, [5, 6])], chain("p", 2), num_tokens=2 * SIZE)).num_tokens == 2 * SIZE


@pytest.mark.parametrize("field", KVTransferParams.__struct_fields__)
async def test_params_that_a_caller_made_are_checked_as_those_that_were_sent(sim: Bench, field: str) -> None:
    async with sim.pair() as (prefill, decode, group):
        good = decode_params(group.make_params("r", [(0, [1])], 16, written=True))
        before = quiet(prefill.engine), quiet(decode.engine)
        for what, value in HOSTILE.items():
            bad = msgspec.structs.replace(good, **{field: value})
            for call in (
                partial(prefill.engine.lend, bad),
                partial(decode.engine.announce, "d", bad),
                partial(decode.engine.pull, "d", [(0, [2])], bad, timeout_s=0.5),
            ):
                with contextlib.suppress(AsyncKVError):
                    found = await pumped(sim, call)
                    if isinstance(found, asynckv.LentRequest):
                        found.withdraw()
                    assert what not in ("lone surrogate", "bytes", "object", "nan", "10^400"), what
            decode.engine.cancel("d")
            await pass_by(sim, 20.0, 1.0)
        await until(lambda: not decode.engine.statistics().gauges["pulls"])
        await until(lambda: not prefill.engine.statistics().gauges["leases"])
        assert [quiet(e)[:4] for e in (prefill.engine, decode.engine)] == [b[:4] for b in before]


@pytest.mark.parametrize("field", FollowParams.__struct_fields__)
def test_what_is_followed_is_checked_and_no_error_shows_its_ticket(field: str) -> None:
    good = decode_follow({"ticket": "0a" * 16, "engine_id": "p", "endpoints": [msgspec.to_builtins(ENDPOINT)]})
    for what, value in HOSTILE.items():
        for bad in (msgspec.structs.replace(good, **{field: value}), msgspec.to_builtins(good) | {field: value}):
            made = tried(RemoteProtocolError, decode_follow, bad)
            is_taken = not isinstance(made, RemoteProtocolError)
            assert not is_taken or (field in ("engine_id", "num_token_shards") and what in ("text", "none")), what
            assert "0a" * 8 not in str(made)


async def test_a_pull_that_is_refused_has_not_consumed_its_request(bench: Bench) -> None:
    async with bench.pair() as (prefill, decode, group):
        params, lent = prefill.lent(group, "r", [1, 4], num_tokens=20, written=True)
        for bad in (
            {"num_tokens": 20.5},
            {"num_tokens": True},
            {"num_tokens": "3"},
            {"cohort_id": 5},
            {"groups": None, "retries": 1},
            {"groups": 5, "retries": 1},
            {"groups": [0, 1], "retries": 1},
            {"retries": True},
        ):
            with pytest.raises((LocalProtocolError, PlanRefused), match=next(iter(bad))):
                await decode.engine.pull("d", **{"groups": [(0, [2, 3])], "params": params, **bad})  # type: ignore[arg-type]
        assert not decode.engine.holds()
        result = await decode.engine.pull("d", [(0, [2, 3])], params, num_tokens=np.int64(20))  # type: ignore[arg-type]
        assert type(result.num_tokens) is int
        with anyio.fail_after(10):
            assert (await lent.wait_released()).cause == "released"


async def test_lists_that_can_be_read_once_serve_every_attempt(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        params, _ = prefill.lent(group, "r", [1], written=True)
        once = ((first, ids) for first, ids in [(0, [2])])
        await pumped(sim, lambda: decode.engine.pull("d", once, params, retries=1))  # type: ignore[arg-type]
        assert decode.blocks([2]) == prefill.blocks([1])


async def test_a_lend_that_is_refused_leaves_the_memorys_epoch(sim: Bench) -> None:
    async with sim.pair() as (prefill, _, _):
        newer = PrefillRanks("prefill", [prefill.engine.endpoint], memory_epoch=3)
        with pytest.raises(PlanRefused, match="block id 500"):
            prefill.engine.lend(newer.make_params("r", [(0, [500])], 16))
        assert prefill.engine.memory_epoch == 0
        prefill.engine.lend(newer.make_params("r", [(0, [1])], 16)).withdraw()
        assert prefill.engine.memory_epoch == 3


@pytest.mark.parametrize("value", [None, True, 0, 1.5, "3", [], np.float32(1), torch.zeros(()), 1 << 70])
def test_shared_memory_takes_a_number_of_bytes(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_bytes is .*; it must be an integer from 1"):
        asynckv.shared_memory(value)


def test_an_engine_may_have_as_long_a_name_as_is_said_and_one_of_numpys() -> None:
    assert type(EngineConfig(engine_id=np.str_("prefill")).engine_id) is str
    welcome = msgspec.msgpack.encode(
        messages.Welcome(1, 1, 1, "e" * 512, f"{'e' * 512}-0-{'f' * 32}-12", b"m", bytes(32), msgspec.Raw(b"\x80"))
    )
    assert msgspec.msgpack.decode(welcome, type=messages.Welcome).agent_name.endswith("-12")


def test_params_that_hold_numpys_text_are_refused_by_name() -> None:
    params = asynckv.PrefillRanks("p", [asynckv.Endpoint(0, "tcp://127.0.0.1:1", "i")]).make_params("r", [(0, [1])], 16)
    with pytest.raises(asynckv.RemoteProtocolError, match="a value cannot be sent"):
        decode_params(params | {"engine_id": np.str_("p")})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "h", "remote_port": 5600, "tp_size": 1},
            r"those of vLLM's NixlConnector \(remote_engine_id, remote_host, remote_port\); run AsyncKVConnector",
        ),
        ({"remote_block_ids": [[1]]}, r"NixlConnector \(remote_block_ids\)"),
        ({"do_remote_prefill": True, "remote_host": "h", "asynckv": {}}, "give the entry 'asynckv' of them"),
        ({"tp_size": 1}, "Object missing required field"),
    ],
)
def test_params_of_vllm_are_called_that(given: Any, says: str) -> None:
    with pytest.raises(asynckv.RemoteProtocolError, match=f"params are malformed: .*{says}"):
        decode_params(given)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LogConfig(level="wanring"), "did you mean 'warning'"),  # type: ignore[arg-type]
        (lambda: LogConfig(file="/tmp/{engine}.jsonl"), "did you mean 'engine_id'"),
        (lambda: NixlConfig(process="serve"), "did you mean 'serving'"),  # type: ignore[arg-type]
        (lambda: layout.dense_part("k", "bfloat61", [("token", 4)]), "did you mean 'bfloat16'"),
        (lambda: policy_named("s3fifo"), "did you mean 's3-fifo'"),
        (
            lambda: attention_view(layer="a", order=("block", "token", "dmi"), sizes={}, dtype="int8"),
            "did you mean 'dim'",
        ),
    ],
)
def test_a_mistyped_name_is_told_the_nearest_one(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_name_that_is_like_none_is_told_none_however_long_it_is() -> None:
    with pytest.raises(ConfigError, match=r"'(q+)\.\.\.q+'; it must be 'debug', 'info', 'warning' or 'error'$"):
        LogConfig(level="q" * (1 << 20))  # type: ignore[arg-type]
