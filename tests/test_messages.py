"""Bytes from outside are hostile: a value or `RemoteProtocolError`, never anything else."""

from __future__ import annotations

import gc
import hashlib
import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.account.values import Account, encode_account
from asynckv.core import wire as m
from asynckv.core.outbox import Outbox
from asynckv.core.types import (
    MAX_HASHES,
    MAX_ID,
    Cohort,
    Endpoint,
    Key,
    KVTransferParams,
    Outcome,
    Reason,
    ReplyTo,
    decode_params,
    sendable,
)
from asynckv.errors import ConfigError, LayoutError, RemoteProtocolError
from asynckv.geometry.blocks import runs_of
from asynckv.geometry.bounds import MAX_RANKS, MAX_RUNS
from asynckv.geometry.check import decode_layout
from asynckv.geometry.gather import Packing, Recipe
from asynckv.scheduler import PrefillRanks
from tests.world import World, make_layout, opened

KEY = Key("epoch", 0, 7, "0" * 32)
COHORT = Cohort("decode:0,\n", 2, 1)
ALL: list[m.Message] = [
    m.Hello(1, 1, 0, "prefill", 0, COHORT),
    m.Welcome(
        1,
        1,
        0,
        "prefill",
        "agent",
        b"metadata",
        hashlib.sha256(b"metadata").digest(),
        msgspec.Raw(msgspec.msgpack.encode(make_layout())),
        Packing(1 << 40, 16),
    ),
    m.Unwelcome(1, Reason.WRONG_TARGET, "detail"),
    m.Claim(KEY, "req:1,\n\x00é", COHORT, "pull", 5, b"d" * 16, 30.0),
    m.Renew(KEY, "pull", 6, 30.0),
    m.Granted(KEY, "pull", 5, 10.0, 0.5),
    m.NotYet(KEY, "pull", 5),
    m.Refused(KEY, "pull", 5, Reason.CONSUMED, ""),
    m.Release(KEY, "req", COHORT, "pull", Outcome.COMPLETE),
    m.Ack(KEY, "pull"),
    m.Ping(1),
    m.Pong(1),
    m.StatusRequest(1, 256, "7", "req:1,\n\x00é", bytes(8)),
    m.Status(1, "prefill", 0, 1, {"leases": 3}, encode_account(Account(rank="prefill/tp0@0a1b2c3d"))),
    m.Goodbye(),
    m.Draining(),
    m.Pack(KEY, "pull", 7, Recipe(0, ((256, ((4, 2048), (16, 4096))), (64, ())), ((0, 128, 1), (1, 0, 0)), ((1, 3),))),
    m.Packed(KEY, "pull", 7, 5),
    m.Unpack(KEY, "pull", 7),
    m.Follow("0123456789abcdef" * 2, 5, COHORT),
    m.Unfollow("0123456789abcdef" * 2, 6),
    m.Offered("0123456789abcdef" * 2, 5, reason=Reason.WITHDRAWN),
]
PACKET = m.encode_packet("source", "target", ALL)


def test_every_message_survives_the_wire() -> None:
    assert set(map(type, ALL)) == set(m.Message.__args__)
    assert m.decode_packet(PACKET) == m.Packet(m.MAJOR, "source", "target", tuple(ALL))


@given(st.data())
@settings(max_examples=300)
def test_a_core_survives_mutated_packets(data: st.DataObject) -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "req", [1, 2])
    pull = world.pull(decode, "d-req", [3, 4], params)
    while world.letters:
        letter = world.letters[0]
        raw = bytearray(letter.data)
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        letter.data = bytes(raw)
        world.deliver()
        world.check()
    world.complete_all()
    for _ in range(60):
        world.deliver_all()
        world.complete_all()
        world.advance(1.0)
    assert pull.reason is not None
    assert prefill.core.is_idle
    assert decode.core.is_idle


LONGEST = m.Claim(
    Key("\U0001f511" * 64, 1 << 53, 1 << 53, "\U0001f511" * 64),
    "\U0001f511" * MAX_ID,
    Cohort("\U0001f511" * 512, MAX_RANKS, MAX_RANKS - 1, MAX_RANKS, MAX_RANKS - 1),
    "\U0001f511" * 128,
    (1 << 63) - 1,
    b"d" * 16,
    1e5 / 3,
)


def packets(messages: list[m.Message]) -> list[bytes]:
    outbox = Outbox("i" * 64)
    for message in messages:
        outbox.send(ReplyTo(b"route"), "\U0001f511" * 64, message)
    return [data for _, data in outbox.take_packets()]


def test_whatever_a_reader_may_say_fits_a_listeners_cap() -> None:
    (alone,) = packets([LONGEST])
    assert 64 * 1024 < len(alone) < m.MAX_REQUEST_PACKET
    many = packets([LONGEST] * 5)
    assert max(map(len, many)) < m.MAX_REQUEST_PACKET
    assert [x for data in many for x in m.decode_packet(data).messages] == [LONGEST] * 5


def test_no_message_is_followed_by_the_garbage_collector() -> None:
    """Thousands wait at a time, and none can lead to itself: to look at them again and again costs for nothing."""
    assert [type(message).__name__ for message in ALL if gc.is_tracked(message)] == []


@pytest.mark.parametrize("length", [m.MAX_DETAIL - 1, m.MAX_DETAIL, m.MAX_DETAIL + 1, 3 * m.MAX_DETAIL])
def test_a_detail_that_is_too_long_is_cut_to_what_may_be_said(length: int) -> None:
    whole = "x" * length
    (packet,) = packets([m.Refused(KEY, "pull", 1, Reason.WRONG_COHORT, whole)])
    (said,) = m.decode_packet(packet).messages
    assert isinstance(said, m.Refused)
    assert len(said.detail) == min(length, m.MAX_DETAIL)
    assert said.detail == whole if length <= m.MAX_DETAIL else said.detail.endswith("xxx ...")


@given(st.lists(st.integers(1, MAX_ID), min_size=1, max_size=40))
@settings(max_examples=50)
def test_long_packets_are_cut_in_order_and_short_ones_are_not(sizes: list[int]) -> None:
    said: list[m.Message] = [m.Release(KEY, "x" * n, COHORT, str(i), Outcome.FAILED) for i, n in enumerate(sizes)]
    found = packets(said)
    assert [x for data in found for x in m.decode_packet(data).messages] == said
    assert all(len(data) <= m.SOFT_PACKET for data in found)
    if sum(sizes) < 32_000:
        assert len(found) == 1


def test_a_packet_that_speaks_of_versions_is_not_of_another_one() -> None:
    """What is wrong with a packet is told in its own words too: they decide nothing."""
    world, prefill, decode = opened()
    pull = world.pull(decode, "d-req", [3, 4], world.params([prefill], "req", [1, 2], 8))
    (hello,) = m.decode_packet(world.letters[0].data).messages
    assert isinstance(hello, m.Hello)
    said = [m.MAJOR, prefill.core.identity.incarnation, "", [[3, hello.nonce, "protocol version", ""]]]
    data = msgspec.msgpack.encode(said)
    with pytest.raises(RemoteProtocolError, match="protocol version"):
        m.decode_packet(data)
    decode.core.receive(prefill.address, data, world.time(decode))
    assert pull.failure is None
    decode.core.receive(prefill.address, msgspec.msgpack.encode([m.MAJOR + 1, *said[1:]]), world.time(decode))
    assert pull.failure is not None
    assert pull.failure[0] is Reason.PROTOCOL


def test_questions_for_the_status_of_older_versions_are_read_as_they_were_meant() -> None:
    """Packets as asynckv of minor version 2 sent them, byte by byte."""
    asked = bytes.fromhex("9401a7737472616e6765a091920d07")
    assert m.decode_packet(asked).messages == (m.StatusRequest(7),)
    said = bytes.fromhex("9401a173a17491960e07a770726566696c6c000181a66c656173657303")
    assert m.decode_packet(said).messages == (m.Status(7, "prefill", 0, 1, {"leases": 3}),)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e9])
def test_absurd_durations_are_refused(seconds: float) -> None:
    data = m.encode_packet("s", "t", [m.Renew(KEY, "pull", 1, seconds)])
    with pytest.raises(RemoteProtocolError):
        m.decode_packet(data)


def test_params_are_validated() -> None:
    world = World()
    params = world.params([world.add("p", make_layout())], "req", [1], 4)
    plain = msgspec.to_builtins(params)
    assert decode_params(plain) == params
    assert decode_params(msgspec.json.decode(msgspec.json.encode(plain))) == params
    for field, value in [("num_tokens", -1), ("endpoints", []), ("lease_s", math.nan), ("groups", [[0, [[-2, 2]]]])]:
        with pytest.raises(RemoteProtocolError, match=field):
            decode_params({**plain, field: value})
    assert isinstance(params, KVTransferParams)


@pytest.mark.parametrize("groups", [1, 2, 64])
def test_params_are_counted_before_they_are_looked_at(groups: int) -> None:
    """13 MiB of runs took 250 ms of a scheduler's thread: here they are junk, and only their number is told."""
    plain = msgspec.to_builtins(World().params([World().add("p", make_layout())], "req", [1], 4))
    runs: list[Any] = [["junk"]] * (MAX_RUNS // groups)
    with pytest.raises(RemoteProtocolError, match="Expected `array` of length 2"):
        decode_params({**plain, "groups": [[0, runs]] * groups})
    with pytest.raises(RemoteProtocolError, match=f"{MAX_RUNS + groups} runs of block ids; at most {MAX_RUNS}"):
        decode_params({**plain, "groups": [[0, [*runs, ["junk"]]]] * groups})
    for field, value in (("hashes", [0] * (MAX_HASHES + 1)), ("groups", [0] * 65), ("endpoints", [0] * 65_537)):
        with pytest.raises(RemoteProtocolError, match=rf"length .*\$.{field}"):
            decode_params({**plain, field: value})


@pytest.mark.parametrize("groups", [1, 2])
def test_params_with_more_runs_than_are_taken_are_not_made(groups: int) -> None:
    group = PrefillRanks("p", [Endpoint(0, "tcp://h:1", "0" * 32)])
    ids = np.arange(MAX_RUNS // groups) * 2
    decode_params(group.make_params("r", [(0, ids)] * groups, 16))
    with pytest.raises(ConfigError, match=f"{MAX_RUNS + 1} runs of block ids; at most {MAX_RUNS} can be sent in all"):
        group.make_params("r", [(0, ids)] * groups + [(0, [1])], 16)


@given(
    st.lists(
        st.tuples(st.integers(0, 99), st.lists(st.none() | st.integers(0, 20), max_size=80), st.booleans()), max_size=3
    ),
    st.integers(-1, 3),
)
def test_params_are_made_as_their_type_would_be_written(
    groups: list[tuple[int, list[int | None], bool]], null_block: int
) -> None:
    group = PrefillRanks(
        "p", [Endpoint(0, "tcp://h:1", "0" * 32), Endpoint(1, "tcp://h:2", "1" * 32)], null_block=null_block
    )
    given_ids: list[Any] = [
        (first, np.array(ids, np.int64) if as_array and None not in ids else ids) for first, ids, as_array in groups
    ]
    plain = group.make_params("r", given_ids, 16, hashes=["a"], hash_tokens=4)
    found = decode_params(plain)
    assert plain == msgspec.to_builtins(found)
    assert decode_params(json.loads(json.dumps(plain))) == found
    for (first, ids, _), lent in zip(groups, found.groups, strict=True):
        assert lent.first_token == first
        assert lent.runs == runs_of([None if b == null_block else b for b in ids])


@pytest.mark.parametrize("field", ["engine_id", "request_id", "endpoints", "key", "hashes"])
def test_text_that_cannot_be_sent_is_refused_wherever_params_have_some(field: str) -> None:
    group = PrefillRanks("p", [Endpoint(0, "tcp://h:1", "0" * 32)])
    plain = json.loads(json.dumps(group.make_params("r", [(0, [1])], 16, hashes=["a"], hash_tokens=16)))
    bad = "\ud800" * 16
    for value in {
        "endpoints": [[{**plain["endpoints"][0], name: bad}] for name in ("address", "incarnation")],
        "key": [[bad, *plain["key"][1:]], [*plain["key"][:3], bad]],
        "hashes": [["a", bad]],
    }.get(field, [bad]):
        with pytest.raises(RemoteProtocolError, match="not valid Unicode"):
            decode_params({**plain, field: value})


def test_the_digest_tells_blocks_apart() -> None:
    group = PrefillRanks("p", [Endpoint(0, "tcp://h:1", "0" * 32)])

    def digest(ids: list[int], num_tokens: int, written: bool) -> bytes:
        return m.blocks_digest(decode_params(group.make_params("r", [(0, ids)], num_tokens, written=written)))

    assert digest([1, 2], 3, True) == digest([1, 2], 3, True)
    assert len({digest(ids, n, w) for ids in ([1, 2], [1, 2, 3]) for n in (3, 4) for w in (True, False)}) == 8


def welcome(layout: bytes) -> m.Welcome:
    digest = hashlib.sha256(b"metadata").digest()
    return m.Welcome(1, m.MAJOR, m.MINOR, "prefill", "agent", b"metadata", digest, msgspec.Raw(layout))


def test_a_layout_is_no_more_than_bytes_until_its_length_is_known() -> None:
    # An array that says it has a million entries, in a packet that is well formed.
    huge = b"\xdd" + (1 << 20).to_bytes(4, "big") + bytes(1 << 20)
    [taken] = m.decode_packet(m.encode_packet("s", "t", [welcome(huge)])).messages
    assert isinstance(taken, m.Welcome)
    assert bytes(taken.layout) == huge
    with pytest.raises(LayoutError, match="1048581 bytes long, and at most 262144"):
        decode_layout(memoryview(taken.layout))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "x" * 300_000}, "at most 262144 are taken"),
        ({"groups": [["a", 4, 0]]}, "group 'a' num_blocks is 0: expected `int` >= 1"),
        ({"memories": [[0, 1]] * 4000}, "memories is of 4000 entries: expected `array` of length <= 2048"),
        ({"groups": None}, "groups is None: expected `array`"),
    ],
)
def test_a_reader_refuses_a_layout_for_good_and_says_why(change: dict[str, object], message: str) -> None:
    world, prefill, decode = opened()
    prefill.core.readers._layout = msgspec.Raw(msgspec.msgpack.encode({**msgspec.to_builtins(make_layout()), **change}))
    params, _ = world.lent(prefill, "req", [3], written=True)
    pull = world.pull(decode, "d", [5], params)
    world.run()
    assert pull.reason is Reason.GEOMETRY
    assert message in pull.detail
    assert "its layout cannot be used" in pull.detail


def unchecked(message: m.Refused | m.Unwelcome, reason: Reason) -> m.Refused | m.Unwelcome:
    """A message with a reason that none of ours would give."""
    msgspec.structs.force_setattr(message, "reason", reason)
    return message


@pytest.mark.parametrize("reason", Reason)
def test_a_peer_refuses_only_for_what_is_a_peers_to_say(reason: Reason) -> None:
    """That an attempt is complete, was cancelled or ran out of time, say, is for its own side to find out."""
    world, prefill, decode = opened()
    pull = world.pull(decode, "d-req", [3, 4], world.params([prefill], "req", [1, 2], 8))

    def answer(message: m.Refused | m.Unwelcome) -> None:
        data = m.encode_packet(prefill.core.identity.incarnation, "", [unchecked(message, reason)])
        decode.core.receive(prefill.address, data, world.time(decode))
        world.settle(decode)

    welcomes = {Reason.PROTOCOL, Reason.WRONG_TARGET, Reason.RESTARTED, Reason.ENGINE_CLOSED}
    if reason not in welcomes:
        (hello,) = m.decode_packet(world.letters[0].data).messages
        assert isinstance(hello, m.Hello)
        answer(m.Unwelcome(hello.nonce, Reason.PROTOCOL, ""))
        assert pull.failure is None
    world.deliver_all()
    (source,) = pull.sources
    answer(m.Refused(pull.params.key, pull.pull_id, next(iter(source.nonces)), Reason.UNKNOWN))
    own = {Reason.COMPLETE, Reason.CANCELLED, Reason.TIMEOUT, Reason.NOT_LENT_YET, Reason.GEOMETRY, Reason.UNPLANNABLE}
    own |= {Reason.DISCHARGED, Reason.DIFFERS, Reason.NO_OFFER}
    own |= {Reason.REMOTE_TOO_SHORT, Reason.UNREACHABLE, Reason.PEER_LOST, Reason.READ_FAILED, Reason.LEASE_LOST}
    own |= {Reason.STANDSTILL, Reason.QUEUE_FULL, Reason.PROTOCOL, Reason.WRONG_TARGET, Reason.RELEASED}
    assert (pull.failure is None) is (reason in own)
    assert decode.core.outbox.counters["dropped.malformed"] == (reason in own) + (reason not in welcomes)
    world.lend(prefill, pull.params)
    world.run(3.0)
    assert (pull.reason is Reason.COMPLETE) is (reason in own)


@pytest.mark.parametrize("reason", Reason)
def test_a_follower_is_refused_only_for_what_its_rank_can_know(reason: Reason) -> None:
    said = m.Offered("0" * 32, 1)
    msgspec.structs.force_setattr(said, "reason", reason)
    data = m.encode_packet("s", "t", [said])
    if reason in m.NOT_OFFERED:
        assert m.decode_packet(data).messages == (said,)
    else:
        with pytest.raises(RemoteProtocolError, match="reason"):
            m.decode_packet(data)


@pytest.mark.parametrize("ticket", ["", "0" * 31, "0" * 33, "A" * 32, "g" * 32, "0" * 32 + "\n", "\uff10" * 32])
def test_a_ticket_has_one_form_and_a_refusal_does_not_show_it(ticket: str) -> None:
    data = m.encode_packet("s", "t", [m.Unfollow(ticket, 1)])
    with pytest.raises(RemoteProtocolError) as raised:
        m.decode_packet(data)
    assert not ticket or ticket not in str(raised.value)


def test_what_is_wrong_with_a_value_is_said_in_full_unless_it_is_long() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"^Invalid enum value 'nobody'$"):
        sendable("nobody", Reason)
    with pytest.raises(msgspec.ValidationError, match=r"^Invalid enum value 'a+ \.\.\. b+'$") as caught:
        sendable("a" * 500 + "b" * 500, Reason)
    assert len(str(caught.value)) == 405
