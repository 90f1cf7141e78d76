"""Real processes for an experiment, and memory that shows whatever should not have been written or read.

An experiment with real engines has a *driver*, which plays router and scheduler and judges, and *processes*, which play
workers and may be killed. `Fleet` starts them by the import path of what they run, an async context manager that is
called with keywords:

    class Side:                                        # in the module `scripts.example`
        def __init__(self, *, name: str) -> None: ...
        async def __aenter__(self) -> Self: ...        # start an engine
        async def __aexit__(self, *_: object) -> None: ...
        async def address(self) -> str: ...            # what may be asked

    async with Fleet() as fleet:
        worker = await fleet.start("decode", "scripts.example:Side", name="decode")
        address = await worker.ask("address")

Every public method is a question. Its value, anything that JSON carries, is the answer; of an asynchronous generator
the first value is the answer, and it runs on after that. Questions run at the same time, and each has a deadline:
the asker gets the value, `Refused` (the method raised), `Lost` (the process is gone) or `Failure` (too late).

The conversation is one JSON line each way over a socket; what the process and its libraries print goes to its log. A
process ends in order when its end of the socket says so, or by `kill`; if the driver dies, the system kills it. What
processes have started themselves is stopped with them, and found by a mark in its environment if it outlives them.

`connect` and `answer` are the same conversation over a socket of one's own, between processes or hosts.

`Blocks` is the memory: an allocator of KV cache blocks that scribbles over whatever comes back, at once, and looks at
it again before it is given out. A read that was too late finds rubbish, and a write that was too late is counted.

Imports nothing but the standard library, numpy and `asynckv.tools.bench.processes`, so that a process may run under
another Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import inspect
import itertools
import json
import mmap
import os
import random
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from asynckv.tools.bench.processes import ANSWER_S, LIMIT, Child, Failure, Processes, Streams, end_with_driver

CHILD = "from tests.lab.fleet import run_child; run_child()"

TRANSPORTS: Mapping[str, Mapping[str, str]] = {
    "tcp": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
    "cma": {"UCX_TLS": "cma,posix,tcp", "UCX_NET_DEVICES": "lo"},
    "auto": {},
}
"""Environment of processes by what carries bytes between them; tcp carries what shared memory does not."""

Words = npt.NDArray[np.uint64]


class Lost(Failure):
    """The asked process is gone."""


class Refused(Failure):
    """A method that was asked raised an exception.

    Attributes:
        kind: Its class.
    """

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


# -- the asking side ---------------------------------------------------------------------------------


class Link:
    """One end of a conversation: asks."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.is_lost = False
        self._writer = writer
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._listening = asyncio.create_task(self._listen(reader))

    async def ask(self, what: str, within_s: float | None = ANSWER_S, /, **fields: Any) -> Any:
        """Have a method called, and wait for its answer; without end where `within_s` is None.

        Raises:
            Refused: It raised an exception.
            Lost: The process is gone.
            Failure: It took too long.
        """
        if self.is_lost:
            raise Lost(f"{self.name} is gone")
        number = next(self._numbers)
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(_line(number, what, fields))
        try:
            async with asyncio.timeout(within_s):
                return await answered
        except TimeoutError:
            raise Failure(f"{self.name} did not answer {what!r} within {within_s:g} s") from None
        finally:
            del self._asked[number]

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        await self._listening

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        # What was cut short as a process died is no answer.
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                number, value, error = json.loads(line)
                answered = self._asked.get(number)
                if answered is None or answered.done():
                    continue  # the asker does not wait any more
                if error is None:
                    answered.set_result(value)
                else:
                    kind, text = error
                    answered.set_exception(Refused(f"{self.name}: {text}", kind))
        why = await self._ended()
        self.is_lost = True
        for answered in self._asked.values():
            if not answered.done():
                answered.set_exception(Lost(why))

    async def _ended(self) -> str:
        """Say what has become of the other end."""
        return f"{self.name} is gone"


async def connect(path: str | Path, name: str) -> Link:
    """Open a conversation with the process that listens on a socket of this host and answers."""
    return Link(name, *await asyncio.open_unix_connection(path, limit=LIMIT))


class Process(Link, Child):
    """A process of a fleet that answers questions."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        streams: Streams,
        log: Path,
        on_abort: Callable[[str], None],
    ) -> None:
        self.log, self._on_abort = log, on_abort
        Child.__init__(self, name, process, streams)
        Link.__init__(self, name, *streams)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to all that it has started."""
        for pid in family(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def last_words(self, lines: int = 12) -> list[str]:
        """Read the end of its log."""
        return self.log.read_text(errors="replace").splitlines()[-lines:]

    async def _ended(self) -> str:
        how = await self.ended()
        if not self._is_ending or self.status not in (0, -signal.SIGKILL):
            self._on_abort(f"{self.name} ended by itself, status {self.status}")
        return how


class Fleet(Processes):
    """Processes of one experiment; none is left when it is over.

    Args:
        env: Environment of all of them, on top of this process's own.

    Attributes:
        folder: Of logs and of whatever processes share, as long as the experiment lasts.
        processes: All that were started, ended ones too.
    """

    def __init__(self, env: Mapping[str, str] = TRANSPORTS["auto"]) -> None:
        super().__init__(env)
        self.processes: list[Process] = []

    async def __aenter__(self) -> Self:
        self._kept = tempfile.TemporaryDirectory(prefix="asynckv-fleet-")
        self.folder = Path(self._kept.name)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        self._kept.cleanup()

    async def start(
        self,
        name: str,
        target: str,
        /,
        *,
        python: str = sys.executable,
        on_abort: Callable[[str], None] = lambda _: None,
        **setup: Any,
    ) -> Process:
        """Start a process.

        Args:
            name: Of the process, and of its log, to which later ones of the same name append.
            target: `module:name` of an async context manager, or of a class without start and end.
            python: Interpreter that runs it.
            on_abort: Called if it ends without being told to, before any asker gets `Lost`.
            setup: Keywords of the target.
        """
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            process, streams = await self._spawn((python, "-c", CHILD, target), out)
        asked = Process(name, process, streams, log, on_abort)
        self.processes.append(asked)
        self._children.append(asked)
        streams[1].write(_line(setup))
        return asked

    async def _spawn(self, command: Sequence[str], out: IO[bytes]) -> tuple[asyncio.subprocess.Process, Streams]:
        """Start a process with the number of its end of a socket as the last argument."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(*command, str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=self._env,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        return process, await asyncio.open_unix_connection(sock=ours, limit=LIMIT)

    def last_words(self, lines: int = 12) -> Iterator[str]:
        """Read the end of everybody's log."""
        for log in sorted(self.folder.glob("*.log")):
            for line in log.read_text(errors="replace").splitlines()[-lines:]:
                yield f"{log.name}: {line[:300]}"


def family(pid: int) -> list[int]:
    """A process and all that it has started and that live."""
    pids = [pid]
    for each in pids:
        with contextlib.suppress(OSError):  # it ends this moment
            for task in os.listdir(f"/proc/{each}/task"):
                pids += map(int, Path(f"/proc/{each}/task/{task}/children").read_text().split())
    return pids


def _line(*values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"


# -- the answering side ------------------------------------------------------------------------------


async def answer(side: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Call methods of an object for the other end of a connection, until it asks no more."""
    tasks: set[asyncio.Task[None]] = set()

    async def call(number: int, what: str, fields: dict[str, Any]) -> None:
        is_answered = False
        try:
            if what.startswith("_"):
                raise AttributeError(f"{what} is private")
            value = getattr(side, what)(**fields)
            if inspect.isasyncgen(value):
                async for each in value:
                    if not is_answered:
                        is_answered = True
                        writer.write(_line(number, each, None))
            else:
                value = await value if inspect.isawaitable(value) else value
                is_answered = True
                writer.write(_line(number, value, None))
        except Exception as exc:
            if is_answered:
                print(f"{what}, after its answer: {exc!r}", file=sys.stderr)
            else:
                writer.write(_line(number, None, [type(exc).__name__, f"{what}: {exc!r}"]))

    while line := await reader.readline():
        task = asyncio.create_task(call(*json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def run_child() -> None:
    """Answer questions, as a process of a fleet."""
    end_with_driver()
    sock = socket.socket(fileno=int(sys.argv[-1]))
    sock.set_inheritable(False)
    asyncio.run(_run_child(sys.argv[1], sock))


async def _run_child(target: str, sock: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=LIMIT)
    (setup,) = json.loads(await reader.readline())
    module, _, name = target.partition(":")
    made = getattr(importlib.import_module(module), name)(**setup)
    async with made if hasattr(made, "__aenter__") else contextlib.nullcontext(made) as side:
        await answer(side, reader, writer)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


# -- what a process uses -----------------------------------------------------------------------------


def usage() -> dict[str, int]:
    """Return numbers of open files, threads and MiB of this process, and of its children."""
    found = Counter[str](children=0, children_fds=0, children_threads=0, children_rss_mib=0)
    for prefix, pid in zip(itertools.chain([""], itertools.repeat("children_")), family(os.getpid()), strict=False):
        with contextlib.suppress(OSError, StopIteration):  # it ends this moment
            found[f"{prefix}fds"] += len(os.listdir(f"/proc/{pid}/fd"))
            found[f"{prefix}threads"] += len(os.listdir(f"/proc/{pid}/task"))
            # Of its own: pages of the pool count for the process that has touched them.
            found[f"{prefix}rss_mib"] += memory_kib("RssAnon", pid) >> 10
            found["children"] += bool(prefix)
    return dict(found)


def memory_kib(what: str = "VmRSS", pid: int | str = "self") -> int:
    """Read what a process occupies, or its peak (`VmHWM`)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def free_memory() -> None:
    """Collect garbage and give free pages back, so that what is left can be judged."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # of the GNU C library
        ctypes.CDLL(None).malloc_trim(0)


class SharedNumber:
    """A number in a file that processes share: one writes it, others see it without asking."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(8)
            self._words = np.frombuffer(mmap.mmap(file.fileno(), 8), np.int64)

    @property
    def value(self) -> int:
        return int(self._words[0])

    @value.setter
    def value(self, value: int) -> None:
        self._words[0] = value


# -- memory ------------------------------------------------------------------------------------------


def pattern(key: int, places: Sequence[int] | npt.NDArray[Any], width: int) -> Words:
    """Return the words of blocks of `width` words: each depends on the key, on the block's place, and on its own."""
    rows = np.asarray(places, np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    columns = np.arange(width, dtype=np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    return rows + columns + np.uint64((key * 0xD6E8FEB86659FD93) % (1 << 64))


class Blocks:
    """Blocks of KV cache under a hostile allocator.

    Args:
        words: All of the memory, `[block, word]`.
        rubbish: What free blocks hold.
        seed: Of the order in which blocks are given out.

    Attributes:
        free: Ids of blocks without an owner.
        stray: Bytes that were found written in free blocks.
    """

    def __init__(self, words: Words, *, rubbish: int = 0xDEADBEEFDEADBEEF, seed: int = 0) -> None:
        self.words, self.rubbish = words, np.uint64(rubbish)
        self.words[:] = self.rubbish
        self.free = list(range(len(words)))
        self.stray = 0
        self._freed, self._rng = asyncio.Event(), random.Random(seed)

    @property
    def num_taken(self) -> int:
        return len(self.words) - len(self.free)

    async def take(self, count: int) -> list[int]:
        """Wait for so many free blocks: those that came back last, or any, by turns; each is looked at."""
        while len(self.free) < count:
            self._freed.clear()
            await self._freed.wait()
        free = self.free
        if self._rng.random() < 0.5:
            for last in range(len(free) - 1, len(free) - 1 - count, -1):
                other = self._rng.randrange(last + 1)
                free[last], free[other] = free[other], free[last]
        ids = free[len(free) - count :]
        del free[len(free) - count :]
        self.audit(ids)
        return ids

    def give(self, ids: Sequence[int]) -> None:
        """Take blocks back, and scribble over them at once."""
        self.words[ids] = self.rubbish
        self.free.extend(ids)
        self._freed.set()

    def audit(self, ids: Sequence[int] | None = None) -> None:
        """Look at free blocks, all of them if none are named."""
        self.stray += 8 * int(np.count_nonzero(self.words[self.free if ids is None else ids] != self.rubbish))

    def pattern(self, request: int, count: int, first: int = 0) -> Words:
        """Return the words of a request's blocks from the `first` on."""
        return pattern(request, range(first, first + count), self.words.shape[1])

    def fill(self, request: int, ids: Sequence[int]) -> None:
        """Write a request."""
        self.words[ids] = self.pattern(request, len(ids))

    def wrong(self, request: int, ids: Sequence[int], first: int = 0) -> int:
        """Compare with a request from its `first` block on; the bytes that differ."""
        return 8 * int(np.count_nonzero(self.words[ids] != self.pattern(request, len(ids), first)))
