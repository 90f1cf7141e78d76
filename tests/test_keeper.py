"""Who keeps processes keeps two of them: one serves, one stands by; and whatever they do, the engine is told once.

The children here are real processes with the real socket between them, but small ones: they map nothing, know no NIXL,
and do what the test asks of each by its number. A remote agent's name says what becomes of it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest

from asynckv import BackendError, EngineClosed, NixlConfig, shared_memory
from asynckv.edges.survivor import keeper, taster, wire
from asynckv.edges.survivor.keeper import Keeper
from asynckv.edges.survivor.main import COLLISION
from asynckv.edges.survivor.process import ServingPlane
from asynckv.edges.survivor.taster import Taster
from asynckv.geometry.layout import Memory
from asynckv.ports import AgentInfo, AgentLost, AgentReplaced
from asynckv.testing import SimData, SimNetwork
from tests.engines import open_files, until

CHILD = r"""
import json, os, signal, socket, sys, time
from msgspec import msgpack

def exactly(size):
    data = b""
    while len(data) < size:
        data += end.recv(size - len(data)) or os._exit(0)
    return data

def frame():
    return exactly(int.from_bytes(exactly(4), "little"))

def say(body):
    end.sendall(len(body).to_bytes(4, "little") + body)

def text(words):
    return bytes([0xD9, len(words)]) + words.encode()

end = socket.socket(fileno=int(sys.argv[-1]))
shares, setup = json.loads(frame()), frame()
name = setup[3:3 + (setup[2] & 31)].decode()
plan = os.environ["PLAN"].split()
number = int(name.partition("-")[2] or 1)
what, _, value = plan[min(number, len(plan)) - 1].partition("=")
with open(os.environ["SAID"] + "/" + name, "a") as log:
    print(sys.argv[1:-1], os.getpgid(0) == os.getpid(), len(shares),
          bool(shares) and os.path.exists("/proc/self/fd/%d" % shares[0][0]), file=log)
if what == "exit":
    os._exit(int(value))
if what == "kill":
    os.kill(os.getpid(), int(value))
if what == "unready":
    say(b"\x92\x02" + text("no back end " + value))
    os._exit(1)
if what == "silent":
    signal.pause()
if what == "toils":
    until = time.monotonic() + float(value)
    while time.monotonic() < until:
        pass
say(b"\x92\x01\x92" + text("agent of " + name) + b"\xc4\x00")
if what == "chats":
    say(b"\x92\x05\x81" + text("beats") + b"\x02")
if what == "deaf":
    signal.pause()
if what == "leaves":
    end.close()
    signal.pause()
while True:
    order = msgpack.decode(frame())
    with open(os.environ["SAID"] + "/" + name, "a") as log:
        print(msgpack.encode(order).hex(), file=log)
    if what == "raves":
        say(b"\xc1")
    match order:
        case [1, ["deadly", *_], _]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case [1, [agent, *_], _] if agent != "silent":
            say(msgpack.encode([3, "no such agent" if agent == "refused" else ""]))
        case [7]:
            os._exit(0)
        case [8]:
            say(msgpack.encode([5, {"beats": 1}]))
"""


class Kept:
    """A keeper, and all that it told."""

    def __init__(self, said: Path, deaths: int = keeper.DEATHS, patience_s: float = 30.0) -> None:
        self.said = said
        self.told: list[Any] = []
        self.keeper = Keeper(
            NixlConfig(process_start_s=patience_s),
            "kept",
            self.told.append,
            lambda cause, pause_s: self.told.append((cause, pause_s)),
            lambda: self.told.append(self.keeper.name),
            deaths,
        )
        self.memory = np.frombuffer(shared_memory(4096), np.uint8)

    async def started(self) -> Kept:
        await self.start()
        return self

    async def start(self) -> None:
        agent = await self.keeper.start([Memory(self.memory.ctypes.data, self.memory.nbytes)])
        assert agent.name == f"agent of {self.keeper.name}"

    def lines(self, name: str) -> list[str]:
        path = self.said / name
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def orders(self, name: str) -> list[Any]:
        """The orders that it was given."""
        return [msgspec.msgpack.decode(bytes.fromhex(line)) for line in self.lines(name)[1:]]

    async def obeys_only_the_next_order(self) -> None:
        """Check that the child that serves was ordered nothing before."""
        self.keeper.order(wire.Drop("next"))
        await until(lambda: self.orders(self.keeper.name))
        assert self.orders(self.keeper.name) == [[2, "next"]]

    def news(self) -> list[Any]:
        return [each for each in self.told if isinstance(each, str | tuple)]

    @property
    def standing_by(self) -> int:
        """Its process id."""
        assert self.keeper._next is not None
        return self.keeper._next.pid


def exists(pid: int) -> bool:
    """Whether there is such a process, waited for or not."""
    return Path(f"/proc/{pid}").exists()


Make = Callable[..., Kept]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a keeper of children that do what they are asked: the first, the second, ..., and all that follow."""
    executable = tmp_path / "child"
    executable.write_text(f"#!{sys.executable} -S\n{CHILD}")
    executable.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(executable))
    monkeypatch.setenv("SAID", str(tmp_path))
    made: list[Kept] = []

    def make(plan: str, deaths: int = keeper.DEATHS, patience_s: float = 30.0, **changed: float) -> Kept:
        monkeypatch.setenv("PLAN", plan)
        for name, value in {"SETTLE_S": 0.0, "AHEAD_S": 0.0, "CLOSE_S": 5.0, **changed}.items():
            monkeypatch.setattr(keeper, name, value)
        made.append(Kept(tmp_path, deaths, patience_s))
        return made[-1]

    yield make
    monkeypatch.setattr(keeper, "CLOSE_S", 0.0)
    for each in made:
        each.keeper.close()


# -- the start -----------------------------------------------------------------------------------------


async def test_a_child_is_given_its_memory_and_a_group_of_its_own(kept: Make) -> None:
    each = kept("serve", SETTLE_S=60.0)
    assert (each.keeper.is_serving, each.keeper.pid, each.keeper.num_processes) == (False, 0, 0)
    await each.start()
    assert each.keeper.is_serving
    assert (each.keeper.num_processes, each.keeper.stands_by(), each.keeper.is_closing) == (1, False, False)
    assert each.lines("kept") == ["['-P', '-m', 'asynckv.edges.survivor.main'] True 1 True"]
    assert each.news() == ["kept"]
    with pytest.raises(BackendError, match="serves already"):
        await each.start()


async def test_addresses_that_are_taken_cost_a_start_and_are_no_failure(kept: Make) -> None:
    each = await kept(f"exit={COLLISION} exit={COLLISION} serve", MAX_COLLISIONS=2).started()
    assert each.keeper.name == "kept-3"
    assert each.news() == ["kept-3"]


async def test_addresses_that_are_taken_again_and_again_are_one(kept: Make) -> None:
    each = kept(f"exit={COLLISION}", MAX_COLLISIONS=2)
    with pytest.raises(BackendError, match="found the addresses of the memory taken, 3 times in a row"):
        await each.start()
    assert (each.keeper.num_processes, each.news()) == (0, [])


@pytest.mark.parametrize(
    ("plan", "cause"),
    [
        ("unready=UCX", "the data plane's process no back end UCX"),
        ("exit=3", "the data plane's process exited with status 3"),
        ("kill=9", "the data plane's process was ended by SIGKILL"),
        ("kill=40", "the data plane's process was ended by signal 40"),
        ("silent", "the data plane's process did not serve, and made no progress for 0.3 s: .*process_start_s.*"),
    ],
)
async def test_a_first_child_that_does_not_serve_fails_the_start_with_its_cause(
    kept: Make, plan: str, cause: str
) -> None:
    each = kept(plan, patience_s=0.3 if plan == "silent" else 20.0, CLOSE_S=0.1)
    with pytest.raises(BackendError, match=f"^{cause}$"):
        await each.start()
    assert (each.keeper.num_processes, each.keeper.pid, each.news()) == (0, 0, [])


async def test_the_loop_turns_while_a_child_starts_and_one_that_toils_is_waited_for(kept: Make) -> None:
    each = kept("toils=1.5", patience_s=0.5, SETTLE_S=60.0)
    task, turns = asyncio.create_task(each.start()), 0
    while not task.done():
        await asyncio.sleep(0.01)
        turns += 1
    await task
    assert turns > 20
    assert each.keeper.is_serving


async def test_a_child_that_toils_for_ever_is_not_waited_for_for_ever(kept: Make) -> None:
    each = kept("toils=60", patience_s=0.1)
    with pytest.raises(BackendError, match=r"did not serve, and made no progress for 0\.1 s"):
        await each.start()
    assert each.keeper.num_processes == 0


async def test_a_child_that_starts_is_looked_at_four_times_in_the_time_it_has(
    kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, delays = asyncio.get_running_loop(), list[float]()
    later = loop.call_later

    def note(delay: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return later(delay, *args, **options)

    monkeypatch.setattr(loop, "call_later", note)
    with pytest.raises(BackendError, match="did not serve"):
        await kept("silent", patience_s=0.3, CLOSE_S=0.1).start()
    assert 0.3 / 4 in delays


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_a_start_that_is_given_up_leaves_no_child(kept: Make, how: str) -> None:
    each = kept("silent")
    task = asyncio.create_task(each.start())
    await until(lambda: each.lines("kept"))
    pid = int(each.keeper._current.pid) if each.keeper._current else 0
    if how == "closed":
        await each.keeper.quiesce()
        each.keeper.close()
    else:
        task.cancel()
    with pytest.raises((EngineClosed, asyncio.CancelledError)):
        await task
    assert not exists(pid)
    assert each.keeper.num_processes == 0


async def test_no_interpreter_is_no_process(kept: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    each = kept("serve")
    before = open_files()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BackendError, match=r"the data plane's process cannot be started: .*nowhere"):
        await each.start()
    assert open_files() <= before
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(BackendError, match="does not know its own path"):
        keeper.check_processes()


# -- deaths --------------------------------------------------------------------------------------------


async def test_the_one_that_stands_by_serves_at_once_and_another_stands_by_then(kept: Make) -> None:
    each = await kept("serve").started()
    for number in (2, 3, 4):
        await until(each.keeper.stands_by)
        assert each.keeper.num_processes == 2
        follows = each.standing_by
        each.told.clear()
        os.kill(each.keeper.pid, signal.SIGKILL)
        each.keeper.order(wire.Drop("of the child that died"))
        await until(each.news)
        assert each.news() == [("the data plane's process was ended by SIGKILL", 0.0), f"kept-{number}"]
        assert each.keeper.pid == follows
        assert each.keeper.agent.name == f"agent of kept-{number}"
        await each.obeys_only_the_next_order()


async def test_the_last_words_of_a_child_are_heard_before_its_end(kept: Make) -> None:
    each = await kept("serve", SETTLE_S=60.0).started()
    assert each.keeper._current is not None
    asyncio.get_running_loop().remove_reader(each.keeper._current.link.fileno())  # its end is noticed first
    each.keeper.order(wire.Beat())
    each.keeper.order(wire.Close())
    await until(lambda: len(each.news()) > 1)
    assert each.told[1:3] == [wire.Stats({"beats": 1}), ("the data plane's process exited with status 0", 0.0)]


async def test_without_one_that_stands_by_one_is_started(kept: Make) -> None:
    each = await kept("serve", SETTLE_S=60.0).started()
    os.kill(each.keeper.pid, signal.SIGKILL)
    await until(lambda: len(each.news()) > 1)
    assert each.news()[1:] == [("the data plane's process was ended by SIGKILL", 0.0)]
    assert (each.keeper.is_serving, each.keeper.pid, each.keeper.name) == (False, 0, "kept")
    each.keeper.order(wire.Drop("x"))  # no child is there to obey
    await until(lambda: len(each.news()) > 2)
    assert each.news()[2:] == ["kept-2"]
    await each.obeys_only_the_next_order()


async def test_the_first_to_stand_by_waits_until_the_engine_has_settled(
    kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = await kept("serve", SETTLE_S=60.0, AHEAD_S=0.0).started()
    loop = asyncio.get_running_loop()
    due = [timer.when() - loop.time() for timer in each.keeper._timers]
    assert due == [pytest.approx(60.0, abs=5)]
    os.kill(each.keeper.pid, signal.SIGKILL)
    await until(each.keeper.stands_by)  # the second time nothing else begins


async def test_the_end_of_one_that_stands_by_is_nobodys_loss(kept: Make) -> None:
    each = await kept("serve", STANDBY_S=0.0, deaths=0).started()
    for _ in range(3):
        await until(each.keeper.stands_by)
        ended = each.standing_by
        os.kill(ended, signal.SIGKILL)
        await until(lambda: each.keeper._next is None or each.standing_by != ended)  # noqa: B023
    await until(each.keeper.stands_by)
    assert each.news() == ["kept"]
    assert each.keeper.name == "kept"
    assert each.lines("kept-5")


async def test_a_child_that_stands_by_is_not_heard(kept: Make) -> None:
    each = await kept("serve chats").started()
    await until(lambda: each.keeper.frames_in == 3)  # two agents, and what the second has to say
    assert each.told == ["kept"]


async def test_one_that_collides_while_it_is_to_stand_by_is_replaced_unheard(kept: Make) -> None:
    each = await kept(f"serve exit={COLLISION} serve", STANDBY_S=60.0).started()
    await until(each.keeper.stands_by)
    assert each.lines("kept-3")
    assert each.news() == ["kept"]


async def test_more_deaths_than_are_allowed_within_their_time_make_a_pause(kept: Make) -> None:
    each = await kept("serve", deaths=2, DEATHS_S=50.0).started()
    for number in range(3):
        await until(each.keeper.stands_by)
        os.kill(each.keeper.pid, signal.SIGKILL)
        await until(lambda: sum(isinstance(one, tuple) for one in each.news()) > number)  # noqa: B023
    pauses = [one[1] for one in each.news() if isinstance(one, tuple)]
    assert pauses == [0.0, 0.0, pytest.approx(50.0, abs=10)]
    assert pauses[2] < 50.0  # when the first of them is past
    assert (each.keeper.is_serving, each.keeper.stands_by()) == (False, True)
    assert each.keeper.num_processes == 1


async def test_deaths_that_are_long_past_do_not_count(kept: Make) -> None:
    each = await kept("serve", deaths=1, DEATHS_S=0.0).started()
    for number in range(4):
        await until(each.keeper.stands_by)
        os.kill(each.keeper.pid, signal.SIGKILL)
        await until(lambda: sum(isinstance(one, tuple) for one in each.news()) > number)  # noqa: B023
    assert [one[1] for one in each.news() if isinstance(one, tuple)] == [0.0] * 4


async def test_after_the_pause_another_serves(kept: Make) -> None:
    each = await kept("serve", deaths=0, DEATHS_S=0.2, SETTLE_S=60.0).started()
    os.kill(each.keeper.pid, signal.SIGKILL)
    await until(lambda: len(each.news()) > 2)
    _, (_, pause), follows = each.news()
    assert (pause, follows) == (pytest.approx(0.1, abs=0.1001), "kept-2")


async def test_processes_that_cannot_be_started_any_more_are_told_and_tried_again(
    kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = await kept("serve", SETTLE_S=60.0, AHEAD_S=0.05).started()
    works = sys.executable
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    os.kill(each.keeper.pid, signal.SIGKILL)
    await until(lambda: len(each.news()) > 2)
    first, second = each.news()[1:3]
    assert first == ("the data plane's process was ended by SIGKILL", 0.0)
    assert second[0].startswith("the data plane's process cannot be started: ")
    assert second[1] == 0.05
    await until(lambda: len(each.news()) > 3)
    monkeypatch.setattr(sys, "executable", works)
    await until(lambda: each.keeper.is_serving)
    assert isinstance(each.news()[-1], str)


# -- what children say and do not say ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "cause"),
    [
        ("serve raves", "the data plane's process sent a message that cannot be decoded: "),
        ("serve leaves", "the data plane's process was ended by SIGKILL"),
    ],
)
async def test_one_that_raves_or_closes_its_end_is_killed(kept: Make, plan: str, cause: str) -> None:
    each = await kept(plan.split()[1] + " serve", SETTLE_S=60.0).started()
    each.keeper.order(wire.Drop("x"))
    await until(lambda: len(each.news()) > 2)
    assert each.news()[1][0].startswith(cause)
    assert each.news()[2] == "kept-2"


async def test_a_follower_that_is_too_late_is_killed_and_followed(kept: Make) -> None:
    each = await kept("serve silent serve", patience_s=1.0).started()
    await until(lambda: each.keeper.num_processes == 2)
    os.kill(each.keeper.pid, signal.SIGKILL)
    await until(lambda: each.keeper.is_serving and len(each.news()) > 3)
    assert each.news()[1:3] == [("the data plane's process was ended by SIGKILL", 0.0), (ANY, 0.0)]
    assert "process did not serve, and made no progress for 1 s" in each.news()[2][0]


async def test_who_is_watched_is_asked_and_killed_when_it_does_not_answer(
    kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = await kept("deaf serve", BEAT_S=0.05, HUNG_S=0.2, SETTLE_S=60.0).started()
    each.keeper.watch(True)
    await until(lambda: len(each.news()) > 1)
    monkeypatch.setattr(keeper, "HUNG_S", 60.0)  # on a busy machine its successor may take long to answer
    await until(lambda: len(each.news()) > 2)
    assert each.news() == ["kept", ("the data plane's process did not answer for 0.2 s", 0.0), "kept-2"]
    # Its successor is watched as well, and answers.
    await until(lambda: len(each.orders("kept-2")) > 8)
    said = each.orders("kept-2")
    assert said[0] == [6, True]
    assert said[1:] == [[8]] * (len(said) - 1)
    assert wire.Stats({"beats": 1}) in each.told
    assert len(each.news()) == 3


async def test_a_loop_that_was_away_waits_for_the_answer_anew(kept: Make) -> None:
    each = await kept("deaf", BEAT_S=60.0, HUNG_S=10.0, SETTLE_S=60.0).started()
    each.keeper.watch(True)
    process = each.keeper._current
    assert process is not None
    for away_s in (1000.0, 0.0):
        process.asked_at -= 1000.0
        each.keeper._beat_at -= away_s
        each.keeper._beat()
        assert bool(process.cause) is not bool(away_s)


async def test_who_is_not_watched_is_left_alone(kept: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    each = await kept("serve", BEAT_S=0.01, SETTLE_S=60.0).started()
    each.keeper.watch(True)
    await until(lambda: each.orders("kept"))
    each.keeper.watch(False)
    await until(lambda: [6, False] in each.orders("kept"))
    os.kill(each.keeper.pid, signal.SIGSTOP)
    monkeypatch.setattr("asynckv.edges.survivor.keeper.HUNG_S", 0.01)  # before, a busy machine might take as long
    beats, later = each.keeper.frames_out, asyncio.get_running_loop().time() + 0.2
    await until(lambda: asyncio.get_running_loop().time() > later)
    assert (each.keeper.frames_out, each.news()) == (beats, ["kept"])


async def test_orders_arrive_in_order(kept: Make) -> None:
    each = await kept("serve", SETTLE_S=60.0).started()
    for number in range(15):
        each.keeper.order(wire.Drop(str(number)))
    await until(lambda: len(each.orders("kept")) == 15)
    assert each.orders("kept") == [[2, str(number)] for number in range(15)]
    assert each.keeper.frames_out == 15


async def test_orders_that_do_not_fit_arrive_as_soon_as_they_do(kept: Make) -> None:
    each = await kept("serve", SETTLE_S=60.0).started()
    os.kill(each.keeper.pid, signal.SIGSTOP)
    size = 1 << 18
    for number in range(4):
        each.keeper.order(wire.Drop("x" * (size + number)))
        await asyncio.sleep(0)
    os.kill(each.keeper.pid, signal.SIGCONT)
    await until(lambda: len(each.orders("kept")) == 4)
    assert [len(name) for _, name in each.orders("kept")] == [size + number for number in range(4)]


# -- the end -------------------------------------------------------------------------------------------


async def test_who_serves_is_told_to_end_and_who_stands_by_is_ended(kept: Make) -> None:
    each = await kept("serve", CLOSE_S=20.0).started()
    await until(each.keeper.stands_by)
    pids = [each.keeper.pid, each.standing_by]
    each.keeper.order(wire.Drop("x"))
    await each.keeper.quiesce()
    assert (each.keeper.num_processes, each.keeper.is_serving, each.keeper.is_closing) == (0, False, True)
    each.keeper.close()
    each.keeper.close()
    assert each.orders("kept") == [[2, "x"], [7]]
    assert each.orders("kept-2") == []
    assert not any(map(exists, pids))
    assert each.news() == ["kept"]  # nothing was lost
    # It may start again, and says nothing of what was.
    await each.start()
    assert each.keeper.name == "kept-3"
    assert each.keeper.is_serving


async def test_who_does_not_end_in_time_is_killed(kept: Make) -> None:
    each = await kept("deaf", CLOSE_S=0.2).started()
    await until(each.keeper.stands_by)
    pids = [each.keeper.pid, each.standing_by]
    each.keeper.close()
    assert not any(map(exists, pids))
    assert (each.keeper.num_processes, each.news()) == (0, ["kept"])


@pytest.mark.parametrize("plan", ["deaf", "serve"])
async def test_closing_raises_and_keeps_the_memory_while_the_child_that_served_lives(
    kept: Make, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """A process that is stuck in the kernel ends neither by an order nor by a signal."""
    each = await kept(plan, SETTLE_S=60.0, CLOSE_S=0.0, KILL_S=0.0).started()
    os.kill(each.keeper.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(keeper._Process, "kill", lambda _: None)
        await each.keeper.quiesce()
        for _ in range(2):
            with pytest.raises(BackendError, match=rf"process {each.keeper.pid} does not end.* may still be written"):
                each.keeper.close()
            assert each.keeper._shares is not None
            assert each.keeper._shares.fds
            with pytest.raises(BackendError, match="serves already"):
                await each.start()
    monkeypatch.setattr(keeper, "KILL_S", 5.0)
    each.keeper.close()
    assert (each.keeper.num_processes, each.keeper._shares) == (0, None)


async def test_nothing_begins_after_the_end(kept: Make) -> None:
    before = open_files()
    each = await kept("serve", SETTLE_S=0.05, deaths=0, DEATHS_S=0.2, BEAT_S=0.05).started()
    each.keeper.watch(True)
    os.kill(each.keeper.pid, signal.SIGKILL)
    await until(lambda: len(each.news()) > 1)  # it is in the pause
    each.keeper.close()
    loop = asyncio.get_running_loop()
    later = loop.time() + 0.4
    await until(lambda: loop.time() > later)
    assert (each.keeper.num_processes, each.keeper.is_serving) == (0, False)
    assert len(each.news()) == 2
    assert len(open_files() - before) == 1  # its memory's


# -- the planes that are made of it --------------------------------------------------------------------

SOMEBODY = (Memory(4096, 64),)
KILLED = "the data plane's process was ended by SIGKILL"


async def test_where_only_serving_has_a_process_reads_are_posted_here(kept: Make) -> None:
    network = SimNetwork()
    reader = SimData(network, "reader")
    plane = ServingPlane(NixlConfig(), "kept", reader)
    made = kept("serve")
    made.keeper = plane._keeper
    news: list[Any] = []
    agent = await plane.start([Memory(made.memory.ctypes.data, made.memory.nbytes)], lambda: news.extend(plane.poll()))
    assert agent.name == "agent of kept"
    plane.watch(True)
    await until(lambda: plane.statistics().get("serving.beats") == 1)
    assert plane.statistics().keys() >= reader.statistics().keys() | {"restarts", "processes", "frames_in"}
    assert plane.describe() == {**reader.describe(), "serving": f"process {plane.pid}"}
    await until(made.keeper.stands_by)
    os.kill(plane.pid, signal.SIGKILL)
    await until(lambda: len(news) > 1)
    assert news[0] == AgentLost(KILLED)
    assert isinstance(news[1], AgentReplaced)
    await plane.quiesce()
    plane.close()
    assert plane.statistics()["processes"] == 0


async def test_who_may_go_on_without_a_child_serves_by_its_own_agent_and_says_so(
    kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kept("exit=3")
    for executable, cause in ((None, "exited with status 3"), ("/etc/hostname", "cannot be started")):
        if executable:
            monkeypatch.setattr(sys, "executable", executable)
        said: list[str] = []
        reader = SimData(SimNetwork(), "reader")
        plane = ServingPlane(NixlConfig(), "kept", reader, go_on=said.append)
        made.keeper = plane._keeper
        agent = await plane.start([Memory(made.memory.ctypes.data, made.memory.nbytes)], lambda: None)
        assert agent.name == "reader"
        assert re.search(cause, said[0])
        plane.watch(True)
        assert plane.describe()["serving"] == "this process"
        await plane.quiesce()
        plane.close()


# -- peers that are tried first ------------------------------------------------------------------------


async def tried(each: Taster, *names: str) -> list[str]:
    """Try peers at once; what was said of each."""
    tries = [each.try_out(AgentInfo(name, b""), SOMEBODY) for name in names]
    return [str(found or "") for found in await asyncio.gather(*tries, return_exceptions=True)]


async def test_a_peer_that_kills_what_tries_it_is_refused_and_no_other(
    kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kept("serve")
    each, said = Taster(NixlConfig(), "tries", None), list[str]()
    for names in (["good", "deadly", "good", "refused"], ["silent"], ["good", "deadly"]):
        monkeypatch.setattr(taster, "TRY_S", 0.3 if names == ["silent"] else 60.0)
        said += await tried(each, *names)
    of_death = "NIXL refuses the metadata of {}: it ends a process inside NIXL, as a trial in a separate process"
    assert [said[number] for number in (0, 2, 5)] == [""] * 3
    for number, name, how in ((1, "deadly", "SIGSEGV"), (4, "silent", "it hung"), (6, "deadly", "SIGSEGV")):
        assert said[number].startswith(of_death.format(name))
        assert how in said[number]
    assert said[3] == "NIXL refuses the metadata of refused: no such agent"
    assert each.num_refused == 4
    assert made.lines("tries-1")
    assert made.lines("tries-3")
    await each.quiesce()
    assert not made.lines("tries-4")


async def test_a_process_that_ends_just_after_it_has_loaded_a_peer_was_ended_by_it(kept: Make) -> None:
    kept("serve")
    child = taster._Child(NixlConfig(), "tries-1")
    await child.keeper.start(())
    trial = asyncio.ensure_future(child.load(AgentInfo("good", b""), SOMEBODY))
    await asyncio.sleep(0)
    child._hear(wire.LoadEnded(""))  # both are heard in one turn of the loop
    child._lost("signal 11", 0.0)
    assert await trial == "signal 11"
    await child.keeper.quiesce()
    child.keeper.close()
    assert await child.load(AgentInfo("good", b""), SOMEBODY) == "signal 11"


async def test_another_process_tries_after_so_many_peers(kept: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = kept("serve")
    monkeypatch.setattr(taster, "MAX_TRIED", 2)
    each = Taster(NixlConfig(), "tries", None)
    assert await tried(each, *["good"] * 5) == [""] * 5
    await each.quiesce()
    assert [bool(made.lines(f"tries-{number}")) for number in range(1, 5)] == [True, True, True, False]


async def test_hosts_take_turns_and_those_that_were_refused_come_last(
    kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs what tries it costs seconds, and one request can name a hundred of its kind."""
    kept("serve")
    each, ended = Taster(NixlConfig(), "tries", None), list[str]()

    async def try_out(place: str) -> None:
        name, host = place.split("@")
        with suppress(BackendError):
            await each.try_out(AgentInfo(name, b"", False, host), SOMEBODY)
        ended.append(place)

    places = ["deadly@evil", *["refused@evil"] * 2, "good@a", "good@a", "good@b", "good@a"]
    await asyncio.gather(*map(try_out, places))
    assert ended == ["deadly@evil", "good@a", "good@b", "good@a", "good@a", "refused@evil", "refused@evil"]
    assert each._turns == {"a": (0, 5), "b": (0, 3), "evil": (3, 7)}
    monkeypatch.setattr(taster, "MAX_HOSTS", 3)
    await try_out("good@c")
    assert sorted(each._turns) == ["a", "c", "evil"]
    await each.quiesce()


async def test_a_try_that_is_cancelled_leaves_no_process_that_hangs_to_the_next(kept: Make) -> None:
    made = kept("serve")
    each = Taster(NixlConfig(), "tries", None)
    first, second, third = (
        asyncio.ensure_future(each.try_out(AgentInfo(name, b""), SOMEBODY)) for name in ("silent", "good", "good")
    )
    await until(lambda: len(made.lines("tries-1")) > 1)  # it is at it
    assert each._child is not None
    pid = each._child.keeper.pid
    second.cancel()
    first.cancel()
    await third
    assert made.lines("tries-2")
    assert not exists(pid)
    assert (first.cancelled(), second.cancelled(), each.num_refused) == (True, True, 0)
    await each.quiesce()


async def test_where_no_process_can_try_a_peer_is_refused_or_taken_with_a_warning(kept: Make) -> None:
    kept("exit=3")
    (said,) = await tried(Taster(NixlConfig(), "tries", None), "good")
    assert said == "the data plane's process exited with status 3"
    warned: list[str] = []
    assert await tried(Taster(NixlConfig(), "tries", warned.append), "good", "good") == ["", ""]
    assert warned == ["the data plane's process exited with status 3"]
