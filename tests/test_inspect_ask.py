"""Asking running engines over the network and over a socket of the host; reports about engines that do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import zmq
from rich.console import Console

from asynckv import (
    BackendError,
    ConfigError,
    Engine,
    EngineConfig,
    EngineThread,
    InspectConfig,
    KeysConfig,
    NixlConfig,
    PrefillRanks,
)
from asynckv.account import survey
from asynckv.account.values import MAX_ACCOUNT, Account, PeerStatus, encode_account
from asynckv.core.types import Address, ReplyTo
from asynckv.core.wire import MAJOR, MAX_TOLD, Ping, Status, StatusRequest, decode_packet, encode_packet
from asynckv.edges.control.local import (
    MAX_GUESTS,
    LocalDoor,
    is_left_behind,
    rank_of,
    read_packet,
    socket_name,
    write_packet,
)
from asynckv.edges.control.zmq import ZmqPlane
from asynckv.testing import SimData, SimNetwork
from asynckv.tools.diagnose import ask
from asynckv.tools.diagnose.ask import Answer, Trouble, ask_all, targets
from asynckv.tools.diagnose.findings import Seen, find
from asynckv.tools.diagnose.reading import Looking
from asynckv.tools.diagnose.timeline_model import Story
from asynckv.tools.diagnose.why_report import report
from asynckv.tools.diagnose.why_text import show_findings
from tests.engines import memory, turn_loop, until
from tests.test_doctor_peer import Keys

SHORT_S = 0.15
"""Seconds for which those are waited for that never answer."""

LOOPBACK = "tcp://127.0.0.1:0"


@asynccontextmanager
async def pair(**config: Any) -> AsyncIterator[tuple[Engine, Engine, PrefillRanks]]:
    """A prefill and a decode engine, on real sockets and without NIXL."""
    network = SimNetwork()
    engines = [
        Engine(EngineConfig(engine_id=name, **config), memory(seed)[0], data=SimData(network, name))
        for seed, name in enumerate(("prefill", "decode"))
    ]
    async with engines[0] as prefill, engines[1] as decode:
        yield prefill, decode, PrefillRanks("prefill", [prefill.endpoint])
        await asyncio.gather(*(engine.aclose(timeout_s=0) for engine in engines))


def lend(engine: Engine, group: PrefillRanks, number: int) -> list[dict[str, Any]]:
    params = [group.make_params(f"p{n}", [(0, [n % 32])], 16) for n in range(number)]
    for each in params:
        engine.lend(each)
    return params


async def one(address: str, timeout_s: float = 5.0, **wanted: Any) -> Answer:
    (answer,) = await ask_all([address], None, timeout_s, **wanted)
    return answer


async def check_unanswered(address: str, cause: str, keys: KeysConfig | None = None) -> Trouble:
    """Ask an engine that gives no answer, for longer if the cause is not known by then, as on a busy machine."""
    for timeout_s in (SHORT_S, 1.0, 10.0):
        (answer,) = await ask_all([address], keys, timeout_s)
        if cause in answer.error:
            break
    assert cause in answer.error
    return answer.trouble


# -- engines that answer -----------------------------------------------------------------------------------


async def test_engines_say_what_they_hold() -> None:
    async with pair() as (prefill, decode, group):
        params = lend(prefill, group, 3)
        decode.announce("d0", params[0])
        found = await ask_all([prefill.endpoint.address, decode.endpoint.address])
        assert [answer.error for answer in found] == ["", ""]
        lends, reads = found
        assert (lends.account.engine_id, lends.account.facts.life) == ("prefill", "running")
        assert [each.request_id for each in lends.requests] == ["p0", "p1", "p2"]
        assert [hold.blocks for hold in lends.account.holds] == [{0: (0,)}, {0: (1,)}, {0: (2,)}]
        assert (lends.gauges["leases"], lends.gauges["blocks_lent"]) == (3, 3)
        assert lends.account.facts.pid == os.getpid()
        assert lends.account.facts.counters["leases.lent"] == 3
        assert "control.packets_in" in lends.account.facts.counters
        assert [each.prefill_request_id for each in reads.requests] == ["p0"]
        assert reads.account.peers[0].address == prefill.endpoint.address


async def test_what_does_not_fit_one_page_comes_in_several() -> None:
    async with pair() as (prefill, _, group):
        lend(prefill, group, 700)
        whole = await one(prefill.endpoint.address, most=10_000)
        assert [each.request_id for each in whole.requests] == [f"p{n}" for n in range(700)]
        assert (len(whole.account.holds), whole.account.after) == (700, "")
        some = await one(prefill.endpoint.address, most=300)
        assert (len(some.requests), bool(some.account.after)) == (300, True)
        assert [(x.phase, x.number) for x in some.account.counts] == [("unclaimed", 700)]


async def test_a_suspended_engine_says_so() -> None:
    async with pair() as (prefill, _, group):
        lend(prefill, group, 1)
        await prefill.suspend()
        answer = await one(prefill.endpoint.address)
        assert (answer.account.facts.life, answer.account.closed_as) == ("suspended", "suspended")
        assert answer.requests == ()
        await prefill.resume()
        again = await one(prefill.endpoint.address)
        assert (again.account.facts.life, again.account.memory_epoch) == ("running", 1)
        assert again.rank != answer.rank


async def test_a_refusal_is_shown() -> None:
    async with pair(inspect=InspectConfig(enabled=False)) as (prefill, _, _):
        answer = await one(prefill.endpoint.address)
        assert answer.error == "it refuses to answer: inspection is turned off here (InspectConfig.enabled)"


@pytest.mark.slow
async def test_many_who_ask_at_once_are_all_answered() -> None:
    """An asker that comes too often is told to wait, and waits."""
    async with pair() as (prefill, _, group):
        lend(prefill, group, 1)
        found = await ask_all([prefill.endpoint.address] * 20, None, 20.0)
        assert {answer.error for answer in found} == {""}


@pytest.mark.slow
async def test_keys_are_asked_for_and_taken(tmp_path: Path) -> None:
    keys = Keys(tmp_path, ("engine", "operator", "stranger"))
    operator, stranger = (keys.of(name, "engine") for name in ("operator", "stranger"))
    async with pair(keys=keys.of("engine", "engine", "operator")) as (prefill, _, _):
        address = prefill.endpoint.address
        (answer,) = await ask_all([address], operator)
        assert answer.account.engine_id == "prefill"
        place = address.partition("#")[0]
        for to, given, cause in (
            (address, stranger, "may not know ours"),
            (place, None, "it wants keys: give --keys and --authorized"),
            (address, None, "it has keys, as its address says"),
            (place, operator, "an address ends in the engine's own"),
            (place + "#" + "1" * 64, operator, "put the engine's .key file there"),
        ):
            await check_unanswered(to, cause, given)


# -- engines that do not --------------------------------------------------------------------------------------


@asynccontextmanager
async def listener(answer: Callable[[StatusRequest], bytes | None], host: str = "127.0.0.1") -> AsyncIterator[str]:
    """A peer that speaks ZMQ and answers questions with bytes of its own."""
    plane = ZmqPlane(f"tcp://{host}:0", advertise=LOOPBACK, allow_insecure=True)

    def on_packet(origin: Address | ReplyTo, data: bytes, principal: str) -> None:
        for message in decode_packet(data).messages:
            if isinstance(message, StatusRequest) and (said := answer(message)) is not None:
                plane.send(origin, said)

    await plane.start(on_packet)
    try:
        yield plane.address
    finally:
        await plane.aclose()


async def test_an_older_engine_is_told_to_be_one() -> None:
    def older(asked: StatusRequest) -> bytes:
        return msgspec.msgpack.encode([MAJOR, "x", "", [[14, asked.nonce, "prefill", 3, 4, {"leases": 7}]]])

    async with listener(older) as address:
        answer = await one(address)
        assert "it is of an older version" in answer.error


@pytest.mark.parametrize(
    "account", [b"\x80\xff", b"\xc1", bytes(MAX_ACCOUNT + 1), b"\xdd" + b"\xff" * 4, b"\x93" * 99_999]
)
async def test_an_account_that_is_none_is_no_answer(account: bytes) -> None:
    async with listener(lambda x: encode_packet("x", "", [Status(x.nonce, "e", 0, 1, {}, account)])) as address:
        answer = await one(address)
        assert answer.error.startswith("its answer cannot be read: ")
        assert answer.requests == ()


async def test_pages_that_never_end_do() -> None:
    same = encode_account(Account(after="0x1p+0 l1"))
    async with listener(lambda x: encode_packet("x", "", [Status(x.nonce, "e", 0, 1, {}, same)])) as address:
        assert (await one(address, most=10_000)).account.after


async def test_who_is_asked_by_a_socket_is_not_waited_for_again_at_the_address_that_others_name(
    short_path: Path,
) -> None:
    ranks = ("prefill/tp0@01234567", "other/tp0@89abcdef", "strange/tp0@0")
    addresses = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://nonsense")
    peers = tuple(PeerStatus(rank=x, address=y, state="suspect") for x, y in zip(ranks, addresses, strict=True))
    account = encode_account(Account(rank="decode/tp0@11111111", incarnation="1" * 32, peers=peers))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path := str(short_path / socket_name("prefill", 0, 0, "01234567")))
        silent.listen(1)
        async with listener(lambda x: encode_packet("x", "", [Status(x.nonce, "e", 0, 1, {}, account)])) as address:
            found = await ask_all([path, address], None, 1.0, with_peers=True)
    assert [(x.address, bool(x.error)) for x in found] == [(path, True), (address, False), (addresses[1], True)]
    # All at once: only one of them was waited for.
    assert max(x.took_s for x in found) < 2.0


async def test_an_answer_to_another_question_is_none() -> None:
    async with listener(lambda x: encode_packet("x", "", [Status(x.nonce ^ 1, "e", 0, 1, {})])) as address:
        assert "no answer within" in (await one(address, SHORT_S)).error


async def test_no_process_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        cause = "no process listens there (TCP connection refused)"
        await check_unanswered(f"tcp://127.0.0.1:{taken.getsockname()[1]}", cause)


@pytest.mark.slow
async def test_a_process_is_stopped_or_is_no_engine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cause = "TCP connects, but nothing greets: its process is stopped, or it is no engine"
        await check_unanswered(f"tcp://127.0.0.1:{silent.getsockname()[1]}", cause)


async def test_an_event_loop_is_away() -> None:
    async with listener(lambda asked: None) as address:
        cause = "its process lives but its event loop is away"
        assert await check_unanswered(address, cause) is Trouble.AWAY


async def test_an_engine_of_another_major_version_says_so() -> None:
    other = msgspec.msgpack.encode([MAJOR + 1, "whatever", {"else": 1}])
    async with listener(lambda asked: other) as address:
        answer = await one(address)
    assert answer.error == f"it lives, but protocol version {MAJOR + 1} is not {MAJOR}: ask it with its own asynckv"


@pytest.mark.parametrize("address", ["tcp://x", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "udp://h:1", "1.2.3.4:99999"])
async def test_an_address_that_is_none_is_bad_input(address: str) -> None:
    with pytest.raises(ConfigError):
        targets([address])


async def test_a_file_is_no_socket(short_path: Path) -> None:
    (short_path / "file").touch()
    for name, says in (("file", "it is no socket"), ("none", "cannot be used: No such file"), ("x" * 300, "cannot")):
        assert says in (await one(str(short_path / name))).error
    assert targets([str(short_path)]) == ([str(short_path)], [])


# -- the socket of the host ----------------------------------------------------------------------------------


async def test_a_rank_answers_on_its_socket_and_takes_it_away(short_path: Path) -> None:
    directory = short_path / "new"
    async with pair(inspect=InspectConfig(directory=directory)) as (prefill, decode, group):
        params = lend(prefill, group, 300)
        decode.announce("d0", params[0])
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        found = targets([str(directory)])[1]
        assert [Path(each).name for each in found] == [
            f"decode.pp0.tp0.{decode.incarnation[:8]}.sock",
            f"prefill.pp0.tp0.{prefill.incarnation[:8]}.sock",
        ]
        assert {stat.S_IMODE(os.stat(each).st_mode) for each in found} == {0o600}
        reads, lends = await ask_all(found, most=1000)
        assert [each.request_id for each in reads.requests] == ["d0"]
        assert len(lends.requests) == 300
    assert list(directory.iterdir()) == []


async def test_nothing_else_is_taken_over_it(short_path: Path) -> None:
    async with pair(inspect=InspectConfig(directory=short_path)) as (prefill, _, _):
        path = next(each for each in targets([str(short_path)])[1] if "prefill" in each)
        for data in (
            encode_packet("x", "", [Ping(1)]),
            encode_packet("x", "", [StatusRequest(1, 1), StatusRequest(2, 1)]),
            encode_packet("x", "", []),
            b"rubbish",
            bytes(1 << 20),
        ):
            reader, writer = await asyncio.open_unix_connection(path)
            write_packet(writer, data)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert "received.ping" not in prefill.statistics().counters
        assert (await one(path)).account.engine_id == "prefill"


async def test_no_more_guests_than_there_is_room_for(short_path: Path) -> None:
    async with pair(inspect=InspectConfig(directory=short_path)) as (_, _, _):
        path = targets([str(short_path)])[1][0]
        question = encode_packet("x", "", [StatusRequest(1)])
        guests = []
        for _ in range(MAX_GUESTS):
            reader, writer = await asyncio.open_unix_connection(path)
            write_packet(writer, question)
            assert await read_packet(reader, 1 << 20)
            guests.append(writer)
        assert "too many ask it" in (await one(path)).error
        for writer in guests:
            writer.close()
            await writer.wait_closed()
        assert not (await one(path)).error


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
async def test_a_directory_that_others_may_write_to_is_refused(short_path: Path, mode: int) -> None:
    directory = short_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    engine = Engine(
        EngineConfig(engine_id="e", inspect=InspectConfig(directory=directory)),
        memory(1)[0],
        data=SimData(SimNetwork(), "e"),
    )
    with pytest.raises(BackendError, match=f"with mode 0{mode:o}; it must belong to this user"):
        await engine.start()
    assert list(directory.iterdir()) == []


async def test_a_path_that_the_system_has_no_room_for_is_refused(short_path: Path) -> None:
    door = LocalDoor(short_path / ("x" * 90), lambda peer, asked, answer: None)
    with pytest.raises(BackendError, match="has room for 107; choose a shorter"):
        await door.open(socket_name("engine", 0, 0, "0123456789abcdef"), "i")


async def test_what_a_dead_process_left_is_known_and_taken_away_by_the_next(short_path: Path) -> None:
    left = short_path / socket_name("decode", 1, 2, "0123456789abcdef")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    assert is_left_behind(left)
    answer = await one(str(left))
    assert (answer.trouble, answer.rank) == (Trouble.GONE, "decode/pp1/tp2@01234567")
    assert answer.made_at == left.stat().st_mtime
    assert "its process has ended without taking the socket away" in answer.error
    async with pair(inspect=InspectConfig(directory=short_path)) as (_, _, _):
        assert not left.exists()
        assert len(targets([str(short_path)])[1]) == 2


async def test_what_others_keep_in_the_directory_is_theirs(short_path: Path) -> None:
    """A socket without a listener yet is no ruin: another program's, or another engine's that is being made."""
    theirs = (short_path / "postgres.sock", short_path / ".prefill.pp0.tp1.01234567.sock")
    left = short_path / "decode.pp0.tp0.89abcdef.sock"
    with contextlib.ExitStack() as stack:
        for path in (*theirs, left):
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(os.fspath(path))
        door = LocalDoor(short_path, lambda peer, asked, answer: None)
        await door.open(socket_name("e", 0, 0, "c" * 32), "c" * 32)
        await door.close()
        assert sorted(os.listdir(short_path)) == sorted(path.name for path in theirs)


async def test_a_question_that_is_never_answered_takes_no_place_for_ever(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = LocalDoor(short_path, lambda peer, asked, answer: None)
    await door.open(socket_name("e", 0, 0, "c" * 32), "c" * 32)
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(door.close)
        for _ in range(2):
            streams = [await asyncio.open_unix_connection(f"{door.path}") for _ in range(MAX_GUESTS)]
            for _, writer in streams:
                opened.callback(writer.close)
            await until(lambda: len(door._guests) == MAX_GUESTS)
            with monkeypatch.context() as patch:  # all wait for a question by now: this is the time for its answer
                patch.setattr("asynckv.edges.control.local.IDLE_S", SHORT_S)
                for _, writer in streams:
                    write_packet(writer, encode_packet("s", "", [StatusRequest(1, 1)]))
                ends = await asyncio.gather(*(reader.read() for reader, _ in streams))
            assert ends == [b""] * MAX_GUESTS


@pytest.mark.parametrize("turns", range(5))
async def test_a_guest_that_comes_as_the_door_is_closed_is_not_left_waiting(short_path: Path, turns: int) -> None:
    door = LocalDoor(short_path, lambda peer, asked, answer: None)
    await door.open(socket_name("e", 0, 0, "c" * 32), "c" * 32)
    with socket.socket(socket.AF_UNIX) as guest, contextlib.suppress(ConnectionResetError):
        guest.settimeout(5.0)
        guest.connect(str(door.path))
        await turn_loop(turns)
        await door.close()
        assert await asyncio.to_thread(guest.recv, 1) == b""


@pytest.mark.parametrize("name", ["a.sock", "e.pp0.tp0.x", "e.ppx.tp0.x.sock", "e.pp0.tp0..sock"])
async def test_a_socket_of_another_name_is_nobodys(name: str) -> None:
    assert rank_of(Path(name)) == ""


async def test_of_who_is_silent_behind_a_socket_the_process_is_told(short_path: Path) -> None:
    path = str(short_path / "x.sock")
    with socket.socket(socket.AF_UNIX) as silent, contextlib.ExitStack() as others:
        silent.bind(path)
        silent.listen(1)
        answer = await one(path, SHORT_S)
        assert (answer.pid, answer.trouble) == (os.getpid(), Trouble.AWAY)
        assert f"no answer within {SHORT_S:g} s: pid {os.getpid()} " in answer.error
        # The connections are not accepted, until no more fit.
        with contextlib.suppress(BlockingIOError):
            while True:
                other = others.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                other.connect(path)
        answer = await one(path, SHORT_S)
        assert (answer.pid, answer.trouble is Trouble.AWAY, "no more fit" in answer.error) == (0, True, True)


async def test_an_engine_that_closes_hangs_up(short_path: Path) -> None:
    async with pair(inspect=InspectConfig(directory=short_path)) as (prefill, _, _):
        path = next(each for each in targets([str(short_path)])[1] if "prefill" in each)
        reader, writer = await asyncio.open_unix_connection(path)
        await prefill.aclose()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        assert path not in targets([str(short_path)])[1]


@pytest.mark.nixl
@pytest.mark.slow
async def test_an_engine_on_a_thread_answers_as_well(short_path: Path) -> None:
    config = EngineConfig(
        engine_id="prefill", inspect=InspectConfig(directory=short_path), nixl=NixlConfig(posting_threads=0)
    )
    thread = EngineThread(config, memory(1)[0])
    await asyncio.to_thread(thread.start)
    try:
        found = await ask_all([thread.engine.endpoint.address, *targets([str(short_path)])[1]])
        assert [answer.account.engine_id for answer in found] == ["prefill", "prefill"]
        assert "nixl" in found[0].account.facts.planes
    finally:
        await asyncio.to_thread(thread.close)
    assert targets([str(short_path)])[1] == []


async def test_an_asker_that_never_reads_keeps_no_other_from_its_answer() -> None:
    async with pair() as (prefill, _, group):
        lend(prefill, group, 20)
        with zmq.Context() as context, context.socket(zmq.DEALER) as silent:
            silent.connect(prefill.endpoint.address)
            for n in range(survey.BURST):
                silent.send(encode_packet("x", "", [StatusRequest(n, MAX_TOLD)]))
            await until(lambda: prefill.statistics().counters.get("received.statusrequest", 0) >= survey.BURST)
            assert len((await one(prefill.endpoint.address)).requests) == 20


# -- the command, with engines -------------------------------------------------------------------------------------


def looking(address: str, wanted: str | None) -> tuple[Seen, list[Story]]:
    """Look as the command does, in a thread of its own: it has an event loop of its own."""
    look = Looking([address], wanted, None, None, 5.0)
    seen = look.look()
    return seen, look.stories(seen) if wanted is not None else []


@pytest.mark.parametrize(("wanted", "name"), [("p1", "p1"), ("sre-7", "sre-7-12"), ("#2", "sre-7-12")])
async def test_a_request_is_found_by_the_beginning_of_its_id(wanted: str, name: str) -> None:
    async with pair() as (prefill, _, group):
        lend(prefill, group, 2)
        prefill.lend(group.make_params("sre-7-12", [(0, [3])], 16))
        seen, (story,) = await anyio.to_thread.run_sync(looking, prefill.endpoint.address, wanted)
        assert (story.name, story.lease) == (name, "lent")
        assert seen.answers[0].account.facts.address == prefill.endpoint.address
        assert seen.late == [], "what is young is not late"
        _, several = await anyio.to_thread.run_sync(looking, prefill.endpoint.address, "p")
        assert [x.name for x in several] == ["p0", "p1"]
        with pytest.raises(ConfigError, match="no such request among 3"):
            await anyio.to_thread.run_sync(looking, prefill.endpoint.address, "none")


async def test_engines_that_are_read_from_are_asked_as_well() -> None:
    async with pair() as (prefill, decode, group):
        [params] = lend(prefill, group, 1)
        decode.announce("d0", params)
        await until(lambda: decode.requests()[0].ranks[0].state == "granted")
        seen, _ = await anyio.to_thread.run_sync(looking, decode.endpoint.address, None)
        assert {x.account.engine_id for x in seen.answers} == {prefill.config.engine_id, decode.config.engine_id}


@pytest.mark.parametrize("named", [3000, survey.MAX_PEERS])
async def test_of_the_engines_that_one_answer_names_the_first_are_asked_and_the_others_are_counted(
    named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer may be made up; and an engine names no more than those, however many it has met."""
    monkeypatch.setattr(ask, "MAX_PEERS", 8)
    asked: list[StatusRequest] = []

    def names(question: StatusRequest) -> bytes:
        asked.append(question)
        peers = [
            PeerStatus(rank=f"p{n}/tp0@0", address=f"tcp://127.1.{n // 250}.{n % 250 + 1}:{port}", state="ready")
            for n in range(named)
        ]
        gone = PeerStatus(rank="gone/tp0@0", address=f"tcp://127.2.0.1:{port}", state="gone")
        account = Account(rank="d/tp0@1", num_peers={"ready": 3000, "gone": 5}, peers=(gone, *peers))
        return encode_packet("x", "", [Status(question.nonce, "d", 0, 1, {}, encode_account(account))])

    async with listener(names, "0.0.0.0") as address:
        port = address.rpartition(":")[2]
        seen, _ = await anyio.to_thread.run_sync(looking, address, None)
    assert len(asked) == 1 + 8
    assert seen.answers[0].peers_left_out == 2992
    document = report(find(seen), seen)
    assert document["engines"][0]["peers_left_out"] == 2992
    out = io.StringIO()
    show_findings(document, Console(file=out, width=100))
    assert "2,992 engines that d/tp0@1 reads from were not asked" in out.getvalue()
    assert "All is well:" not in out.getvalue()
