"""Write the parts of the documentation that are made from code: `python -m scripts.draw --help`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from scripts import command
from scripts.draw import bounds, configuration, events, figures, geometry, life, metrics, states, structure, tables

MADE: dict[str, tuple[Callable[[], dict[Path, str]], str]] = {
    "configuration": (configuration.files, "the fields in docs/configuration.md, from the configuration's dataclasses"),
    "events": (events.files, "the events in docs/logging.md, from their types"),
    "metrics": (metrics.files, "the table in docs/metrics.md and the Grafana dashboard, from the table of metrics"),
    "tables": (tables.files, "the causes in docs/why.md and the findings in docs/doctor.md"),
    "states": (states.files, "the states in docs/structure.md, from the transition tables; pictures need Graphviz"),
    "geometry": (geometry.files, "pictures of geometry, from real plans"),
    "life": (life.files, "the life of a request, and the calls between processes"),
    "structure": (structure.files, "one worker process: its core and the parts around it"),
    "figures": (figures.files, "the measured figures in README, docs/performance.md and docs/versus.md"),
    "bounds": (bounds.files, "the bounds over RDMA in docs/performance.md, from plans"),
}


def draw(
    what: Annotated[list[str] | None, typer.Argument(metavar="WHAT", help="Parts to draw; by default all.")] = None,
) -> None:
    """Write the pages, tables and pictures of the documentation that are made from code.

    Run this after a change of their sources; a test compares.
    """
    for name in command.chosen(what, MADE, "page or picture"):
        for path, text in MADE[name][0]().items():
            path.write_text(text, encoding="utf-8")


EPILOG = f"""
[bold]What[/bold]

{command.listed({name: about for name, (_, about) in MADE.items()})}

[bold]Exit status[/bold]  0 written, 2 bad input, or an incomplete source
"""

main = command.script(draw, EPILOG)

if __name__ == "__main__":
    sys.exit(main())
