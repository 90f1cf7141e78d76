"""Engines in processes of their own, and the router that sends a request through two of them.

A server is started once, imports vLLM, and forks every engine from there: an engine is up within a second or two. What
is asked of an engine goes over a pipe; what it says of requests comes back by itself. All waiting is for what an engine
says, with a deadline.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.vllm.models import VOCABULARY, next_token
from tests.vllm.setups import Setup

WITHIN_S = 60.0
START_S = 240.0


class Dead(Exception):
    """The engine has ended, or does not answer."""


@dataclass(slots=True)
class Reply:
    """What an engine has said of a request."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    params: dict[str, Any] | None = None

    @property
    def is_done(self) -> bool:
        return self.reason is not None


class Server:
    """Starts engines, and ends those that are left."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.vllm.core"])
        self._folder = tempfile.TemporaryDirectory()
        self._started: list[Engine] = []

    def start(self, *setups: Setup) -> list[Engine]:
        """Start engines, all at once."""
        engines = [self._begin(setup) for setup in setups]
        for engine in engines:
            engine.wait(lambda engine=engine: engine.is_ready, START_S, "to start")  # type: ignore[misc]
        return engines

    def _begin(self, setup: Setup) -> Engine:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(theirs, setup, Path(self._folder.name)))
        process.start()
        theirs.close()
        engine = Engine(setup, process, mine)
        self._started.append(engine)
        return engine

    def end(self) -> None:
        """End all engines that are left."""
        for engine in self._started:
            engine.kill()
        self._started.clear()

    def close(self) -> None:
        """End all engines, and start no more."""
        self.end()
        self._folder.cleanup()


def _run(connection: Connection, setup: Setup, folder: Path) -> None:
    from tests.vllm.core import run  # imported by the server, and only there

    run(connection, setup, folder)


class Engine:
    """An engine in another process."""

    def __init__(self, setup: Setup, process: Any, connection: Connection) -> None:
        self.setup, self.process, self._connection = setup, process, connection
        self.is_ready, self.is_dead = False, False
        self.replies: dict[str, Reply] = {}
        self._answers: dict[int, tuple[str, Any]] = {}
        self._asked = 0

    def _listen(self, within_s: float) -> None:
        """Take in one message, if it comes in time."""
        try:
            if not self._connection.poll(within_s):
                return
            kind, key, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self.is_dead = True
            raise Dead(f"{self.setup.name} is gone") from error
        if kind == "ready":
            self.is_ready = True
        elif kind == "died":
            self.is_dead = True
            raise Dead(f"{self.setup.name} died: {value}")
        elif kind == "output":
            reply = self.replies.setdefault(key, Reply())
            reply.tokens += value["tokens"]
            reply.reason = value["reason"] or reply.reason
            reply.params = value["params"] or reply.params
        else:
            self._answers[key] = kind, value

    def wait(self, condition: Callable[[], bool], within_s: float = WITHIN_S, what: str = "") -> None:
        """Wait for something that the engine says by itself.

        Raises:
            Dead: It did not say it in time.
        """
        deadline = time.monotonic() + within_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                raise Dead(f"{self.setup.name}: waited {within_s} s {what}; {self.replies}")
            self._listen(min(left, 1.0))

    def ask(self, method: str, *args: Any, within_s: float = WITHIN_S) -> Any:
        """Ask, and wait for the answer.

        Raises:
            Dead: There is none.
        """
        self._asked += 1
        number = self._asked
        try:
            self._connection.send((number, method, args))
        except OSError as error:
            self.is_dead = True
            raise Dead(f"{self.setup.name} is gone") from error
        self.wait(lambda: number in self._answers, within_s, f"for an answer to {method}")
        kind, value = self._answers.pop(number)
        if kind == "raised":
            raise Dead(f"{self.setup.name}: {method} raised: {value}")
        return value

    def until(self, condition: Callable[[dict[str, Any]], bool], within_s: float = WITHIN_S) -> dict[str, Any]:
        """Ask for the state until a condition holds; the engine goes its own way meanwhile."""
        deadline = time.monotonic() + within_s
        while True:
            state: dict[str, Any] = self.ask("state")
            if condition(state):
                return state
            if time.monotonic() > deadline:
                raise Dead(f"{self.setup.name}: waited {within_s} s; it is {state}")
            self.pause()

    def pause(self) -> None:
        """Hear what the engine says by itself, for as long as it takes to say something new."""
        self._listen(0.01)

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        most: int = 8,
        params: Mapping[str, Any] | None = None,
        immediately: bool = False,
        trace: Mapping[str, str] | None = None,
        adapter: tuple[int, str, str] | None = None,
        **fields: Any,
    ) -> Reply:
        """A request arrives (an adapter is number, name, path). Returns what will hold all that is said of it."""
        if params is not None:
            fields["extra_args"] = {"kv_transfer_params": params}
        reply = self.replies[request_id] = Reply()
        self.ask("add", request_id, list(tokens), most, fields, immediately, trace, adapter)
        return reply

    def finish(self, *replies: Reply, within_s: float = WITHIN_S) -> None:
        """Wait until requests have ended."""
        self.wait(lambda: all(reply.is_done for reply in replies), within_s, "for the end of requests")

    def kill(self) -> None:
        """End the process at once."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.is_dead = True
        self._connection.close()


def prompt(rng: random.Random, count: int) -> list[int]:
    """A prompt that no other shares blocks with."""
    return [rng.randrange(10, VOCABULARY) for _ in range(count)]


def continued(tokens: Sequence[int], count: int) -> list[int]:
    """What a correct engine says after these tokens."""
    all_of_them = list(tokens)
    for _ in range(count):
        all_of_them.append(next_token(all_of_them))
    return all_of_them[len(tokens) :]
