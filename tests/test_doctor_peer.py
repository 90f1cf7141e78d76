"""The way to another engine: every trap between two sides, by real sockets and real keys."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv import Engine, EngineConfig, KeysConfig
from asynckv.core import wire
from asynckv.core.types import Reason
from asynckv.edges.control.zmq import ZmqPlane, make_pair
from asynckv.errors import ConfigError
from asynckv.keys import write_pair
from asynckv.testing import SimData, SimNetwork
from asynckv.tools.doctor import peer
from asynckv.tools.doctor.checks import examine
from asynckv.tools.doctor.facts import Facts
from tests.engines import memory


class Keys:
    """Keys of some engines; each lists those that it is told to list."""

    def __init__(self, folder: Path, names: Sequence[str] = ("prefill", "decode")) -> None:
        self.folder = folder
        self.publics = {name: write_pair(folder / name, name, make_pair())[1] for name in names}

    def of(self, name: str, *listed: str) -> KeysConfig:
        directory = self.folder / name / "authorized"
        directory.mkdir()
        for other in listed:
            (directory / f"{other}.key").write_bytes(self.publics[other].read_bytes())
        return KeysConfig(secret=self.folder / name / f"{name}.key_secret", authorized=directory)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@contextlib.asynccontextmanager
async def engine(keys: KeysConfig | None = None, **layout: int) -> AsyncIterator[str]:
    """An engine that listens for real; its bytes are simulated, and are not what is looked at here."""
    registration, _ = memory(1, **layout)
    settings = EngineConfig(engine_id="prefill", keys=keys)
    async with Engine(settings, registration, data=SimData(SimNetwork(), "prefill-1")) as there:
        yield str(there.endpoint.address)


@contextlib.asynccontextmanager
async def listener(answer: Any, keys: KeysConfig | None = None) -> AsyncIterator[str]:
    """A listener that answers as it is told."""
    plane = ZmqPlane("tcp://127.0.0.1:0", keys=keys)

    def hear(origin: Any, data: bytes, principal: str) -> None:
        for packet in answer(data):
            plane.send(origin, packet)

    await plane.start(hear)
    try:
        yield str(plane.address)
    finally:
        await plane.aclose()


async def ask(address: str, keys: KeysConfig | None = None) -> peer.Asked:
    return await peer.ask(address, keys, lambda text: None)


async def codes(address: str, keys: KeysConfig | None = None) -> set[str]:
    found = examine(Facts(peer=(await ask(address, keys)).facts))
    return {each.code for each in found if each.topic == "peer"} - {"to-loopback"}


async def test_an_engine_says_who_it_is_and_how_it_is_reached() -> None:
    async with engine() as address:
        asked = await ask(address)
    facts = asked.facts
    assert (facts.stage, facts.engine_id, facts.rank, facts.agent) == ("done", "prefill", "tp0 of 1", "prefill-1")
    assert (facts.major, facts.minor) == (wire.MAJOR, wire.MINOR)
    assert facts.memories == len(memory(1)[0].layout.memories)
    assert facts.gauges
    assert facts.versions["asynckv"]
    assert facts.life == "running"
    assert facts.planes
    assert asked.place is not None


async def test_a_tensor_parallel_rank_is_asked_by_its_own_name() -> None:
    async with engine(tp_rank=1, tp_size=2) as address:
        assert (await ask(address)).facts.rank == "tp1 of 2"


async def test_a_rank_that_shares_tokens_says_which_it_holds() -> None:
    async with engine(tp_rank=3, tp_size=4, dcp=4) as address:
        asked = await ask(address)
    assert asked.facts.token_shards == ((0, 4, 3, 4),)
    (said,) = [each.found for each in examine(Facts(peer=asked.facts)) if each.code == "to-engine"]
    assert f"layout {asked.facts.layout[:12]}, tokens 3 of 4 by 4, " in said


def rigged(greet: Callable[[wire.Hello], wire.Message]) -> Callable[[bytes], list[bytes]]:
    """An engine of which only the answer to a hello is not its own."""

    def answer(data: bytes) -> list[bytes]:
        (message,) = wire.decode_packet(data).messages
        match message:
            case wire.StatusRequest(nonce):
                said: wire.Message = wire.Status(nonce, "prefill", 0, 1, {})
            case wire.Hello():
                said = greet(message)
            case wire.Ping(nonce):
                said = wire.Pong(nonce)
            case _:
                raise AssertionError(message)
        return [wire.encode_packet("x", "", [said])]

    return answer


async def test_the_stage_is_learnt_from_the_answer() -> None:
    said: list[int] = []

    def greet(hello: wire.Hello) -> wire.Message:
        said.append(hello.pp_stage)
        text = "prefill/pp3/tp0@0a1b listens here, not prefill/tp0; correct the endpoint's address"
        return wire.Unwelcome(hello.nonce, Reason.WRONG_TARGET, text)

    async with listener(rigged(greet)) as address:
        assert "to-unwelcome" in await codes(address)
    assert said == [0, 3]


async def test_with_keys_on_both_sides_it_works(keys: Keys) -> None:
    ours = keys.of("decode", "prefill")
    async with engine(keys.of("prefill", "decode")) as address:
        assert await codes(address, ours) == {"to-engine"}


@pytest.mark.slow
async def test_an_unlisted_key_is_told_from_a_wrong_one(keys: Keys) -> None:
    ours = keys.of("decode", "prefill", "decode")
    async with engine(keys.of("prefill", "prefill")) as address:
        assert await codes(address, ours) == {"to-turned-away"}
        # The address names a key that we trust, but not that of the listener.
        other = Keys(keys.folder / "other")
        trusted = other.of("decode", "prefill", "decode")
        stale = f"{address.partition('#')[0]}#{_public(other.publics['prefill'])}"
        assert await codes(stale, trusted) == {"to-wrong-key"}
        assert await codes(stale.replace("127.0.0.1", "localhost"), trusted) == {"to-wrong-key"}


def _public(path: Path) -> str:
    from asynckv.keys import read_public

    return read_public(path).hex()


async def test_who_is_not_listed_here_is_not_asked(keys: Keys) -> None:
    async with engine(keys.of("prefill", "decode")) as address:
        assert await codes(address, keys.of("decode", "decode")) == {"to-unlisted"}


@pytest.mark.slow
async def test_keys_on_one_side_only(keys: Keys) -> None:
    ours = keys.of("decode", "prefill", "decode")
    async with engine(keys.of("prefill", "decode")) as address:
        assert await codes(address) == {"to-needs-keys"}
        assert await codes(address.partition("#")[0], ours) == {"to-no-key"}
        assert await codes(address.partition("#")[0]) == {"to-needs-keys"}
    async with engine() as address:
        assert await codes(f"{address}#{_public(keys.publics['prefill'])}", ours) == {"to-keyless"}


@pytest.mark.slow
async def test_another_protocol_is_named() -> None:
    def answer(data: bytes) -> list[bytes]:
        return [msgspec.msgpack.encode([wire.MAJOR + 1, "x", "", [[3, 0, "protocol_version", "another"]]])]

    async with listener(answer) as address:
        asked = await ask(address)
    assert "protocol version 2 is not 1" in asked.facts.error
    assert {each.code for each in examine(Facts(peer=asked.facts)) if each.level == "error"} == {"to-version"}


async def test_metadata_that_was_damaged_is_not_loaded() -> None:
    layout = msgspec.Raw(msgspec.msgpack.encode(memory(1)[0].layout))

    def greet(hello: wire.Hello) -> wire.Message:
        return wire.Welcome(hello.nonce, wire.MAJOR, 0, "prefill", "agent", b"metadata", bytes(32), layout)

    async with listener(rigged(greet)) as address:
        asked = await ask(address)
    assert asked.place is None
    assert {"to-damaged", "to-minor"} <= {each.code for each in examine(Facts(peer=asked.facts))}


@pytest.mark.slow
async def test_a_dead_port_refuses() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        assert await codes(f"tcp://127.0.0.1:{held.getsockname()[1]}") == {"to-refused"}


@contextlib.contextmanager
def rude(greeting: bytes | None) -> Iterator[str]:
    """A listener that is no ZMQ: it says something and closes, or says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    if greeting is not None:
                        connection.sendall(greeting)
                        connection.shutdown(socket.SHUT_RDWR)

        held: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for each in held:
                each.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that pass while one looks on: everything here is near."""
    for name in ("ANSWER_S", "SILENCE_S", "CONNECT_S", "GREETING_S"):
        monkeypatch.setattr(peer, name, 1.0 if name == "ANSWER_S" else 0.5)


@pytest.mark.slow
async def test_what_is_no_zmq_is_told_from_what_is_silent() -> None:
    with rude(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        assert await codes(address) == {"to-not-zmq"}
    with rude(None) as address:
        assert await codes(address) == {"to-silent"}
    async with listener(lambda data: []) as address:
        assert await codes(address) == {"to-silent"}


@pytest.mark.slow
async def test_an_engine_that_is_away_is_not_taken_for_a_wrong_key(keys: Keys) -> None:
    ours = keys.of("decode", "prefill")
    plane = ZmqPlane("tcp://127.0.0.1:0", keys=keys.of("prefill", "decode"))
    plane._from_zap = lambda frames: None  # type: ignore[method-assign]  # it admits no key
    await plane.start(lambda origin, data, principal: None)
    try:
        assert await codes(str(plane.address), ours) == {"to-silent"}
    finally:
        await plane.aclose()


@pytest.mark.slow
async def test_what_swallows_packets_is_told_from_what_refuses() -> None:
    # A listener with a full queue: the kernel drops what asks for more, as a firewall does.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            queued = stack.enter_context(socket.socket())
            queued.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                queued.connect(server.getsockname())
        assert await codes(f"tcp://127.0.0.1:{server.getsockname()[1]}") == {"to-timeout"}


async def test_addresses_that_lead_nowhere() -> None:
    assert await codes("tcp://0.0.0.0:5555") == {"to-wildcard"}
    assert await codes("tcp://127.0.0.1:0") == {"to-port-zero"}
    assert await codes("tcp://no-such-host.invalid:5555") == {"to-name"}
    for wrong in ("tcp://127.0.0.1", "ipc:///x", "tcp://127.0.0.1:5555#short"):
        with pytest.raises(ConfigError):
            await ask(wrong)


async def test_a_loopback_address_is_noted() -> None:
    async with engine() as address:
        found = examine(Facts(peer=(await ask(address)).facts))
    assert "to-loopback" in {each.code for each in found}
