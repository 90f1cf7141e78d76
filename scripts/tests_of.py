"""Say which tests cover a file: `python -m scripts.tests_of asynckv/core/lease.py`.

What it prints can be run line by line, the quickest tests first. It goes by the table `TESTS` of `scripts/mutate.py`.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from asynckv.errors import ConfigError
from scripts import command
from scripts.mutate import ROOT, known_tests


def tests_of(
    path: Annotated[str, typer.Argument(metavar="FILE", help="A file or folder below asynckv/.")],
) -> None:
    """Say which tests cover a file, as commands: the quickest first.

    Tests that are marked slow are among them where nothing quicker covers the file.
    """
    name = Path(path).resolve()
    if not name.exists():
        raise ConfigError(f"{path}: there is no such file")
    if not name.is_relative_to(ROOT / "asynckv"):
        raise ConfigError(f"{path} does not lie in {ROOT / 'asynckv'}")
    known = known_tests(str(name.relative_to(ROOT)))
    if not known:
        raise ConfigError(f"no tests are listed for {path}: CONTRIBUTING.md has a table of topics, or search in tests/")
    for stage in known:
        print("pytest", shlex.join(stage))


EPILOG = """
[bold]Example[/bold]

  python -m scripts.tests_of asynckv/core/lease.py

  python -m scripts.tests_of asynckv/core/lease.py | sh -ex

[bold]Exit status[/bold]  0 there are some, 2 none, or bad input
"""
main = command.script(tests_of, "tests_of", EPILOG)


if __name__ == "__main__":
    sys.exit(main())
