"""Write the catalogue of causes into docs/leaks.md."""

from __future__ import annotations

import sys
from pathlib import Path

from asynckv.tools.diagnose.causes import markdown
from scripts import command

TARGET = Path(__file__).parents[1] / "docs" / "leaks.md"
BEGIN, END = "<!-- catalogue -->\n", "<!-- /catalogue -->"


def draw() -> None:
    """Write the catalogue into docs/leaks.md, from asynckv/tools/diagnose/causes.py.

    Run it after a cause changes; a test compares the page.
    """
    before, _, rest = TARGET.read_text().partition(BEGIN)
    TARGET.write_text(f"{before}{BEGIN}{markdown()}\n{END}{rest.partition(END)[2]}")


main = command.script(draw, "[bold]Exit status[/bold]  0 written, 2 bad input")


if __name__ == "__main__":
    sys.exit(main())
