"""The two halves of the benchmark: what they agree on, what they do not believe, and how they end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv.core.types import ReplyTo
from asynckv.errors import ConfigError
from asynckv.tools.bench import remote
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.options import Options
from asynckv.tools.bench.protocol import Connect, Measure, Open, Opened, Serve, encode
from asynckv.tools.bench.remote import HALF, Half, Link
from asynckv.tools.bench.workers import WorkerLost, setups
from asynckv.tools.bench.workload import Workload
from asynckv.tools.plan.models import Heads, Model

MODEL = Model("tiny", (Heads(4, 16),) * 2)
SMALL = ["bench", "--layers", "2", "--prompt-tokens", "64:300", "--concurrency", "4", "--lease-s", "3"]


def experiment(**changes: Any) -> Experiment:
    return Experiment(Options(**changes), MODEL, Workload("fixed 32", (32, 32)))


def waiting() -> Half:
    return Half(Options(role="prefill", bind="127.0.0.1:9"))


# -- what they agree on --------------------------------------------------------------------------------


def test_equal_halves_agree() -> None:
    assert remote.difference(remote.facts(experiment()), remote.facts(experiment()), "prefill", "decode") == ""


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"seed": 7}, "differ in --seed: 0 on the prefill half, 7 on the decode half; give both the same"),
        ({"verify": "off"}, "differ in --verify: full on the prefill half, off on the decode half"),
        ({"cancel": 0.5}, "differ in --cancel: 0 within 0.05 s on the prefill half, 0.5 within 0.05 s"),
    ],
)
def test_a_difference_names_both_values(theirs: dict[str, Any], says: str) -> None:
    assert says in remote.difference(
        remote.facts(experiment()), remote.facts(experiment(**theirs)), "prefill", "decode"
    )


def test_another_version_or_workload_of_the_same_name_is_a_difference() -> None:
    mine = remote.facts(experiment())
    assert "differ in version" in remote.difference(mine, mine | {"version": "0.0.1"}, "prefill", "decode")
    assert "differ in workload" in remote.difference(
        mine, remote.facts(Experiment(Options(), MODEL, Workload("fixed 32", (32, 33)))), "prefill", "decode"
    )
    assert "differ in extra: nothing on the" in remote.difference(mine, mine | {"extra": "1"}, "prefill", "decode")


def test_a_key_may_be_named_by_its_file(tmp_path: Path) -> None:
    from asynckv.edges.zmq import make_pair
    from asynckv.keys import write_pair

    pair = make_pair()
    write_pair(tmp_path, "prefill-0", pair)
    half: dict[str, Any] = {"role": "decode", "secret": "x", "authorized": str(tmp_path)}
    named = Half(Options(connect="10.0.0.1:9000#prefill-0", **half))
    assert named.target() == Half(Options(connect=f"10.0.0.1:9000#{pair.public.hex()}", **half)).target()
    for key, says in (("", "names no key"), ("#none", "cannot be read"), ("#../prefill-0", "neither a key nor a name")):
        with pytest.raises(ConfigError, match=says):
            Half(Options(connect=f"10.0.0.1:9000{key}", **half)).target()


# -- what they do not believe --------------------------------------------------------------------------


class Wire:
    """Keeps what is sent, as far as there is room."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.sent: list[bytes] = []
        self.room = room
        self.has_six = asyncio.Event()

    def send(self, packet: bytes) -> bool:
        if len(self.sent) >= self.room:
            return False
        self.sent.append(packet)
        if len(self.sent) == 6:
            self.has_six.set()
        return True


def pieces(stream: str, data: bytes) -> list[remote.Piece]:
    wire = Wire()
    Link(wire.send).write(stream, data)
    return [remote._pieces.decode(packet) for packet in wire.sent]


def said(message: remote.Message) -> remote.Piece:
    (piece,) = pieces(HALF, msgspec.json.encode(message) + b"\n")
    return piece


LONG = bytes(range(32, 128)) * 5000 + b"\n"


@pytest.mark.anyio
async def test_a_long_line_arrives_whole_and_in_small_pieces() -> None:
    cut = pieces("prefill/tp0", LONG)
    assert len(cut) == 5
    listener = Link(Wire().send)
    lines = listener.open("prefill/tp0")
    for piece in cut:
        listener.take(piece)
    assert await asyncio.wait_for(lines.readline(), 5) == LONG


def nested(depth: int = 50_000) -> bytes:
    """MessagePack of a list in a list in a list."""
    return b"\x91" * depth + b"\x00"


DEEP_JSON = b'{"type":"Stop","z":' + b"[" * 200_000 + b"\n"


@pytest.mark.anyio
async def test_what_is_nested_too_deep_ends_the_conversation_and_nothing_else() -> None:
    listener = Link(Wire().send)
    for piece in pieces(HALF, DEEP_JSON):
        listener.take(piece)
    with pytest.raises(remote.Broken, match="a message is malformed"):
        await listener.hear(5)


@pytest.mark.anyio
async def test_a_strangers_nested_packet_is_dropped_and_a_hello_still_heard() -> None:
    follower = remote._Follower(experiment(), waiting(), lambda *a: True, lambda text: None)
    good = msgspec.msgpack.encode([0, HALF, b""])
    follower.on_packet(ReplyTo(b"x"), b"\x94" + good[1:] + nested())
    piece = said(remote.Hello({}, "decode"))
    deep = msgspec.structs.replace(piece, data=b'{"type":"hello","x":' + b"[" * 90_000)
    follower.on_packet(ReplyTo(b"x"), msgspec.msgpack.encode(deep))
    assert not follower._came.done()
    follower.on_packet(ReplyTo(b"y"), msgspec.msgpack.encode(piece))
    assert (await asyncio.wait_for(follower._came, 5)).role == "decode"


@pytest.mark.anyio
async def test_a_nested_command_or_answer_is_a_broken_half_not_a_traceback() -> None:
    with pytest.raises(remote.Broken, match="a command is malformed"):
        remote._admitted(DEEP_JSON)
    link = Link(Wire().send)
    worker = remote.Remote("prefill/tp0", link)
    for piece in pieces("prefill/tp0", DEEP_JSON):
        link.take(piece)
    with pytest.raises(WorkerLost, match="cannot be understood"):
        await worker.hear(Opened, 5)
    assert worker.is_lost


@pytest.mark.anyio
async def test_empty_pieces_are_signs_of_life_and_pile_up_nowhere() -> None:
    listener = Link(Wire().send)
    for number in range(1000):
        listener.take(remote.Piece(number, f"nobody {number}", b""))
    assert list(listener._streams) == [HALF]
    listener.take(msgspec.structs.replace(said(remote.Interrupted()), number=1000))
    assert await listener.hear(5) == remote.Interrupted()


@pytest.mark.anyio
async def test_a_line_for_nobody_ends_the_conversation() -> None:
    listener = Link(Wire().send)
    listener.take(remote.Piece(0, "prefill/tp7", b"{}\n"))
    with pytest.raises(remote.Broken, match="it speaks to 'prefill/tp7', which is not there"):
        await listener.hear(5)


@pytest.mark.anyio
async def test_who_is_gone_is_lost_once_and_says_how() -> None:
    link = Link(Wire().send)
    worker = remote.Remote("prefill/tp0", link)
    worker.gone("prefill/tp0 was killed")
    worker.gone("the other half is gone")
    with pytest.raises(WorkerLost, match="prefill/tp0 was killed"):
        await worker.hear(Opened, 5)
    worker.tell(Open())
    link.end()


@pytest.mark.anyio
async def test_what_finds_no_room_goes_when_there_is_some() -> None:
    wire = Wire(room=2)
    talk = Link(wire.send)
    talk.write("prefill/tp0", bytes(500_000))
    assert len(wire.sent) == 2
    wire.room = 100
    await asyncio.wait_for(wire.has_six.wait(), 5)
    assert [remote._pieces.decode(p).number for p in wire.sent] == list(range(6))
    talk.end()


@pytest.mark.anyio
@pytest.mark.parametrize("lost", [0, 3])
async def test_a_lost_piece_ends_the_conversation(lost: int) -> None:
    cut = pieces("prefill/tp0", LONG)
    listener = Link(Wire().send)
    listener.open("prefill/tp0")
    for piece in cut[:lost] + cut[lost + 1 :]:
        listener.take(piece)
    for _ in range(2):  # and it stays so
        with pytest.raises(remote.Broken, match=f"piece {lost} of the conversation was lost"):
            await listener.hear(5)


@pytest.mark.anyio
async def test_mutated_messages_break_the_conversation_or_are_messages() -> None:
    rng = random.Random(0)
    samples: list[remote.Message] = [
        remote.Hello(remote.facts(experiment()), "decode"),
        remote.Begin({"prefill": [5, 6], "decode": [7]}),
        remote.Gone("prefill/tp0", "was killed"),
        remote.Bye(0, "all good"),
    ]
    broken = 0
    for _ in range(3000):
        data = bytearray(msgspec.json.encode(rng.choice(samples)))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        listener = Link(Wire().send)
        listener.take(remote.Piece(0, HALF, bytes(data) + b"\n"))
        try:
            await listener.hear(5)
        except remote.Broken:
            broken += 1
    assert broken > 500


@pytest.mark.anyio
async def test_a_stranger_is_not_heard_and_a_second_half_is_told_so() -> None:
    wire = Wire()
    follower = remote._Follower(experiment(), waiting(), lambda to, packet: wire.send(packet), lambda text: None)
    for data in (b"", b"\xff" * 50, remote._encoder.encode(remote.Piece(0, HALF, b"junk"))):
        follower.on_packet(ReplyTo(b"a"), data)
    for piece in (said(remote.Bye(0, "")), *pieces("prefill/tp0", b"{}\n")):
        follower.on_packet(ReplyTo(b"a"), remote._encoder.encode(piece))
    assert not follower._came.done()
    assert wire.sent == []
    hello = said(remote.Hello(remote.facts(experiment()), "decode"))
    follower.on_packet(ReplyTo(b"b"), remote._encoder.encode(hello))
    assert follower._came.done()
    follower.on_packet(ReplyTo(b"c"), remote._encoder.encode(hello))
    (answer,) = wire.sent
    assert remote._messages.decode(remote._pieces.decode(answer).data) == remote.Bye(
        2, "it serves somebody else already"
    )


def test_the_waiting_half_lets_nobody_set_its_workers_up() -> None:
    ((_, _, setup),) = setups(experiment(), ("prefill",), {"prefill": [4], "decode": [4]})
    stranger = msgspec.structs.replace(setup, options=Options(log="/etc/passwd"), bind="tcp://0.0.0.0:1")
    for line, says in ((encode(stranger), "tried to set a worker up"), (b"{", "malformed"), (b"\xff", "malformed")):
        with pytest.raises(remote.Broken, match=says):
            remote._admitted(line)


def test_the_waiting_half_measures_no_floor() -> None:
    # Those commands read the memory of whatever process they name.
    opened = Opened(1, "agent", b"", experiment().layout("prefill", 0, 0))
    for command in (Open(), Connect(opened), Serve(True), Measure(["process_vm_readv"], 1)):
        with pytest.raises(remote.Broken, match="the floor, which is for one machine"):
            remote._admitted(encode(command))


@pytest.mark.anyio
async def test_what_is_not_admitted_ends_the_conversation() -> None:
    link = Link(Wire().send)
    half = remote._Follower(experiment(), waiting(), lambda *a: True, lambda text: None)
    lines = asyncio.StreamReader()
    lines.feed_data(encode(Open()))
    await half._pass_down(link, remote.Remote("prefill/tp0", link), lines)
    with pytest.raises(remote.Broken, match="the floor, which is for one machine"):
        await link.hear(5)


# -- real halves ---------------------------------------------------------------------------------------


class Running:
    """One half as a process; its stderr is read as it comes."""

    def __init__(self, *argv: str, before: tuple[str, ...] = ()) -> None:
        command = [*before, sys.executable, "-m", "asynckv.tools.cli", *argv]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.said = ""

    def until(self, is_there: Callable[[str], bool], what: str) -> str:
        """Read stderr until something is there."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + 40
        while not is_there(self.said):
            ready, _, _ = select.select([self.process.stderr], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self.process.stderr.fileno(), 1 << 16) if ready else b""
            assert data, f"{what} was not said, but: {self.said}"
            self.said += data.decode()
        return self.said

    def end(self) -> int:
        """Wait for the end, and return the exit status."""
        assert self.process.stderr is not None
        self.said += self.process.stderr.read().decode()
        status = self.process.wait(40)
        assert "Traceback" not in self.said
        return status


@contextmanager
def halves(
    follow: list[str], lead: list[str], *, host: str = "127.0.0.1", spaces: tuple[str, str] | None = None
) -> Iterator[tuple[Running, Running]]:
    """Start the prefill half on a port from the system, and the decode half once it listens."""
    inside: list[tuple[str, ...]] = [("ip", "netns", "exec", s) for s in spaces or ()] or [(), ()]
    first = Running(*SMALL, *follow, "--role", "prefill", "--bind", f"{host}:0", before=inside[0])
    started = [first]
    try:
        said = first.until(lambda text: "--connect " in text and text.endswith("\n"), "where it listens")
        where = said.split("--connect ")[1].split()[0]
        started.append(Running(*SMALL, *lead, "--role", "decode", "--connect", where, before=inside[1]))
        yield first, started[1]
    finally:
        for each in started:
            if each.process.poll() is None:
                each.process.kill()
                each.process.wait()
            if each.process.stderr is not None:
                each.process.stderr.close()


def children_of(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 40
    for pid in pids:
        while os.path.exists(f"/proc/{pid}"):
            assert time.monotonic() < deadline, f"process {pid} is still there"
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            select.select([handle], [], [], 1)
            os.close(handle)


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: 10.231.7.1 at `akv0`, 10.231.7.2 at `akv1`."""
    names = f"akv{os.getpid()}a", f"akv{os.getpid()}b"

    def ip(*argv: str) -> None:
        subprocess.run(["ip", *argv], check=True, capture_output=True, timeout=20)

    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", "akv0", "netns", names[0], "type", "veth", "peer", "name", "akv1", "netns", names[1])
            for i, name in enumerate(names):
                ip("-n", name, "addr", "add", f"10.231.7.{i + 1}/24", "dev", f"akv{i}")
                ip("-n", name, "link", "set", f"akv{i}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as exc:
            why = exc.stderr.decode().strip() if isinstance(exc, subprocess.CalledProcessError) else str(exc)
            pytest.skip(f"network namespaces cannot be made here: {why}")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.mark.nixl
@pytest.mark.slow
def test_two_halves_in_two_networks_move_every_byte(tmp_path: Path) -> None:
    for name in ("prefill", "decode"):
        argv = [sys.executable, "-m", "asynckv.tools.cli", "keygen", name, "--dir", str(tmp_path / "keys")]
        subprocess.run(argv, check=True, capture_output=True, timeout=30)
    (tmp_path / "authorized").mkdir()
    for path in (tmp_path / "keys").glob("*.key"):
        path.rename(tmp_path / "authorized" / path.name)
    report = tmp_path / "report.json"
    common = ["--requests", "30", "--transport", "tcp", "--both-ways", "--authorized", str(tmp_path / "authorized")]
    ways = [
        [*common, "--net-device", f"akv{i}", "--secret", str(tmp_path / f"keys/{name}.key_secret")]
        for i, name in enumerate(("prefill", "decode"))
    ]
    with (
        namespaces() as spaces,
        halves(ways[0], [*ways[1], "--json", str(report)], host="10.231.7.1", spaces=spaces) as (first, second),
    ):
        assert (second.end(), first.end()) == (0, 0), first.said + second.said
    found = json.loads(report.read_text())
    assert found["requests"] == {"submitted": 30, "completed": 30, "read_nothing": 0, "failed": 0, "cancelled": 0}
    assert found["bytes"]["verified"] == found["bytes"]["wanted"] > 0
    assert found["bytes"]["wrong"] == 0
    assert not any(found["blocks"].values())
    assert found["environment"]["ucx_transports"].startswith("tcp/akv1")


@pytest.mark.nixl
@pytest.mark.slow
def test_other_options_are_refused_on_both_sides() -> None:
    with halves(["--seed", "1"], ["--seed", "2"]) as (first, second):
        assert (second.end(), first.end()) == (2, 2)
    for each in (first, second):
        assert "differ in --seed: 1 on the prefill half, 2 on the decode half" in each.said


@pytest.mark.nixl
@pytest.mark.slow
def test_the_death_of_one_half_is_the_end_of_the_other(tmp_path: Path) -> None:
    with long_run(tmp_path / "0") as headless, long_run(tmp_path / "1") as tailless:
        workers = [pid for each in (*headless, *tailless) for pid in children_of(each.process.pid)]
        assert len(workers) == 4
        headless[1].process.kill()
        tailless[0].process.kill()
        assert [each.end() for each in (*headless, *tailless)] == [1, -signal.SIGKILL, -signal.SIGKILL, 1]
        wait_until_gone(workers)
    assert "the decode half is gone: it has said nothing for 6 s; ended this half's workers" in headless[0].said


@pytest.mark.nixl
@pytest.mark.slow
def test_ctrl_c_on_the_half_that_follows_ends_both_in_order(tmp_path: Path) -> None:
    with long_run(tmp_path / "0") as (first, second):
        workers = [pid for each in (first, second) for pid in children_of(each.process.pid)]
        first.process.send_signal(signal.SIGINT)
        assert (first.end(), second.end()) == (130, 130)
        wait_until_gone(workers)
    assert "interrupted; the other half ends the run" in first.said
    assert "the decode half has ended the run: interrupted" in first.said


@contextmanager
def long_run(log: Path) -> Iterator[tuple[Running, Running]]:
    """Both halves of a run that is under way, and far from its end."""
    long = ["--requests", "100000"]
    with halves(long, [*long, "--log", str(log)]) as (first, second):
        first.until(lambda text: "half is here" in text, "that the other half came")
        wait_for_a_pull(log, second)
        yield first, second


def wait_for_a_pull(log: Path, half: Running) -> None:
    """Wait until a request was logged, so that the run is under way."""
    while half.process.poll() is None:
        if log.exists() and '"pull_ended"' in log.read_text():
            return
        try:
            half.process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"the decode half ended too early: {half.end()} {half.said}")
