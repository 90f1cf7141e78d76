"""`asynckv doctor`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from asynckv.config import KeysConfig, NixlConfig
from asynckv.errors import ConfigError
from asynckv.tools.console import printable
from asynckv.tools.doctor.facts import Facts
from asynckv.tools.output import HELP, consoles, write_json

of_keys = partial(typer.Option, rich_help_panel="Keys")


def doctor(
    to: Annotated[str, typer.Option(help=HELP["doctor"]["to"], metavar="ADDRESS")] = "",
    keys: Annotated[Path | None, of_keys(help=HELP["doctor"]["keys"], metavar="FILE")] = None,
    authorized: Annotated[Path | None, of_keys(help=HELP["doctor"]["authorized"], metavar="DIR")] = None,
    json: Annotated[
        str | None, typer.Option(help=HELP["doctor"]["json"], rich_help_panel="Output", metavar="FILE")
    ] = None,
) -> None:
    """Say what is wrong with this host, or with the way to another one, and what to do about it.

    Two processes of doctor's own move bytes by NIXL, as two ranks would, and what UCX chose is read from its log.
    Limits, shared memory, permissions, devices, addresses and versions are looked at as well. Every finding
    comes with a remedy. How fast it is, `asynckv bench` measures.
    """
    from asynckv.tools.doctor.checks import examine, is_good
    from asynckv.tools.doctor.show import as_json, show

    began = time.monotonic()
    shown, errors = consoles(json)
    pair = _pair(keys, authorized, to)
    with errors.status("looking", spinner="line") as status:
        if to:
            from asynckv.tools.doctor.peer import check_address

            to = to if "://" in to else f"tcp://{to}"
            check_address(to)  # before anything starts
        # A spinner is for people; what is piped gets no progress lines.
        facts = _gather(pair, to, lambda text: status.update(printable(text)))
    found = examine(facts)
    write_json(json, as_json(facts, found, time.monotonic() - began))
    show(facts, found, shown)
    raise typer.Exit(0 if is_good(found) else 1)


def _pair(keys: Path | None, authorized: Path | None, to: str) -> KeysConfig | None:
    """Read keys as an engine would, or refuse them."""
    from asynckv.edges.control import zmq

    if keys is None and authorized is None:
        return None
    if keys is None or authorized is None:
        raise ConfigError("--keys and --authorized belong together; give both, or none")
    if not to:
        raise ConfigError("--keys and --authorized are for --to; give the address of an engine as well")
    pair = KeysConfig(secret=keys, authorized=authorized)
    zmq._load(pair)
    return pair


def _gather(keys: KeysConfig | None, to: str, note: Callable[[str], None]) -> Facts:
    from asynckv.tools.doctor import host, peer, probing, software

    has = software.software()
    machine = host.machine()  # before anything of ours makes it busy
    facts = Facts(
        machine=machine,
        network=host.network(),
        gpu=host.gpu(),
        software=has,
        posting_threads=NixlConfig().num_posters,
        ucx=probing.try_nixl(note) if has.variant else None,
    )
    if not to:
        return facts
    asked = asyncio.run(peer.ask(to, keys, note))
    if asked.place is None:
        return replace(facts, peer=asked.facts)
    return replace(facts, peer=replace(asked.facts, ucx=probing.try_nixl(note, asked.place)))
