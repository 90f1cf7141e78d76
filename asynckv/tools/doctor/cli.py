"""`asynckv doctor`."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asynckv.errors import ConfigError
from asynckv.tools.console import printable
from asynckv.tools.output import check_writable, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynckv.config import EngineConfig
    from asynckv.tools.doctor.facts import Facts, PeerFacts

EPILOG = """
[bold]Examples[/bold]

  asynckv doctor

  asynckv doctor --json - | jq '.findings[] | select(.level == "error")'

  asynckv doctor --to tcp://10.0.0.1:5555

  asynckv doctor --config engine.json --secret a.key_secret --authorized keys

[bold]Exit status[/bold]  0 nothing worse than a note, 1 a warning or an error was found, 2 bad input, 130 Ctrl-C
"""

of_keys = partial(typer.Option, rich_help_panel="Keys")


def doctor(
    to: Annotated[str, typer.Option(help="Look at the way to this engine as well.", metavar="ADDRESS")] = "",
    config: Annotated[
        Path | None, typer.Option(help="Its whole EngineConfig, as JSON.", rich_help_panel="Settings", metavar="FILE")
    ] = None,
    secret: Annotated[Path | None, of_keys(help="Our NAME.key_secret.", metavar="FILE")] = None,
    authorized: Annotated[Path | None, of_keys(help="Directory of the .key files of others.", metavar="DIR")] = None,
    json: Annotated[
        str | None,
        typer.Option(help="Write facts and findings there; - for stdout.", rich_help_panel="Output", metavar="FILE"),
    ] = None,
) -> None:
    """Say what is wrong with this host, or with the way to another one, and what to do about it.

    Two processes of doctor's own move bytes by NIXL, as two ranks would, and what UCX chose is read from its log.
    Limits, shared memory, permissions, devices, addresses, keys and versions are looked at as well. Every finding
    comes with a remedy. How fast it is, `asynckv bench` measures.
    """
    from rich.console import Console

    from asynckv.tools.doctor.checks import examine, is_good
    from asynckv.tools.doctor.show import as_json, show

    began = time.monotonic()
    if (secret is None) != (authorized is None):
        raise ConfigError("--secret and --authorized belong together; give both, or none")
    settings = _config(config, secret, authorized)
    check_writable("--json", json)
    errors = Console(stderr=True, highlight=False)
    with errors.status("looking", spinner="line") as status:
        # A spinner is for people; what is piped gets no progress lines.
        facts = _gather(settings, config is not None, _address(to), lambda text: status.update(printable(text)))
    found = examine(facts)
    write_json(json, as_json(facts, found, time.monotonic() - began))
    show(facts, found, Console(stderr=json == "-", highlight=False))
    raise typer.Exit(0 if is_good(found) else 1)


def _address(text: str) -> str:
    """Check it before anything starts."""
    from asynckv.tools.doctor.peer import check_address

    if text and "://" not in text:
        text = f"tcp://{text}"
    if text:
        check_address(text)
    return text


def _config(path: Path | None, secret: Path | None, authorized: Path | None) -> EngineConfig:
    from dataclasses import replace

    from asynckv.config import EngineConfig, KeysConfig
    from asynckv.tools.doctor.software import read_config

    config = read_config(path) if path is not None else EngineConfig(engine_id="doctor")
    if secret is not None and authorized is not None:
        config = replace(config, keys=KeysConfig(secret=secret, authorized=authorized))
    return config


def _gather(config: EngineConfig, is_told: bool, to: str, note: Callable[[str], None]) -> Facts:
    import os
    from dataclasses import replace

    from asynckv.tools.doctor import host, probing, software
    from asynckv.tools.doctor.facts import Facts

    has = software.software()
    keys, nixl = config.keys, replace(config.nixl, posting_threads=0)
    key_facts = None if keys is None else software.keys(os.fspath(keys.secret), os.fspath(keys.authorized))
    machine = host.machine()  # before anything of ours makes it busy
    ucx = probing.try_nixl(nixl, note) if has.variant and nixl.backend == "UCX" else None
    peer = None
    if to and (key_facts is None or not (key_facts.secret_error or key_facts.authorized_error)):
        peer = _ask(to, config, note)
    return Facts(
        machine=machine,
        network=host.network(),
        gpu=host.gpu(),
        software=has,
        posting_threads=config.nixl.num_posters,
        listening=software.listening(config) if is_told else None,
        keys=key_facts,
        ucx=ucx,
        peer=peer,
    )


def _ask(to: str, config: EngineConfig, note: Callable[[str], None]) -> PeerFacts:
    import asyncio
    from dataclasses import replace

    import msgspec

    from asynckv.tools.doctor import peer, probing

    asked = asyncio.run(peer.ask(to, config.keys, note))
    if asked.place is None:
        return asked.facts
    ucx = probing.try_nixl(replace(config.nixl, posting_threads=0), note, asked.place)
    return msgspec.structs.replace(asked.facts, ucx=ucx)
