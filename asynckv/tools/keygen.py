"""`asynckv keygen`: make the keys of one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asynckv.tools.output import HELP


def keygen(
    name: Annotated[str, typer.Argument(help=HELP["keygen"]["name"])],
    dir: Annotated[Path, typer.Option("--dir", help=HELP["keygen"]["dir"], metavar="DIR")] = Path("keys"),
) -> None:
    """Make the keys of one engine, so that its control plane is authenticated and encrypted.

    NAME.key_secret is secret: keep it on the engine's host, readable by the engine's user only. NAME.key is public:
    copy it into the authorized directory of every engine that this one talks to. Existing files are not overwritten.
    """
    from asynckv.edges.control.zmq import make_pair
    from asynckv.keys import write_pair

    secret, public = write_pair(dir, name, make_pair())
    typer.echo(f"{secret}  secret: only for {name} (KeysConfig.secret); keep it on its host, mode 0600")
    typer.echo(f"{public}  public: for the authorized directory of each engine that {name} talks to")
