"""Write docs/states.md from the transition tables of core and offload; a test compares."""

from __future__ import annotations

import sys
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

from asynckv.core import attempts, lease, lifecycle, peer, pull
from asynckv.offload import entry, job
from scripts import command

TARGET = Path(__file__).parents[1] / "docs" / "states.md"

HEAD = """# States

Drawn from the transition tables in `asynckv/core` and `asynckv/offload` by `scripts/draw_states.py`; a test fails when
this page is stale. Words in capitals are events; words in *italics* are conditions that are acted upon at once,
whatever event led there. Events that a state takes without leaving it stand below each table; an event that is named
in neither raises before anything has changed.
"""


def table(title: str, intro: str, on_event: Any, when: Any) -> str:
    """One machine as a table of transitions and a Mermaid diagram."""
    edges: dict[tuple[Enum, Enum], list[str]] = defaultdict(list)
    stays: dict[Enum, list[str]] = defaultdict(list)
    for state, row in on_event.items():
        for event, after in row.items():
            name = event.name if isinstance(event, Enum) else event.__name__
            (stays[state] if after is state else edges[state, after]).append(name.replace("_", " ").upper())
    for state, row in when.items():
        for condition, after in row.items():
            edges[state, after].append(f"*{_words(condition)}*")
    lines = [f"## {title}\n", f"{intro}\n", "| from | to | by |", "|---|---|---|"]
    lines += [f"| {a.name} | {b.name} | {', '.join(why)} |" for (a, b), why in edges.items()]
    if stays:
        lines += ["", "Also takes, and stays:", ""]
        lines += [f"- {state.name}: {', '.join(events)}" for state, events in stays.items()]
    if ends := [state.name for state, row in on_event.items() if not row and not when.get(state)]:
        lines += ["", f"Takes nothing any more: {', '.join(ends)}."]
    lines += ["", "```mermaid", "stateDiagram-v2"]
    lines += [f"    {a.name} --> {b.name}: {', '.join(why).replace('*', '')}" for (a, b), why in edges.items()]
    return "\n".join([*lines, "```", ""])


def _words(condition: Any) -> str:
    """What a condition says: the first line of its function."""
    if not callable(condition):
        return str(condition)
    words = (condition.__doc__ or "").splitlines()[0].rstrip(".")
    return words[0].lower() + words[1:]


def page() -> str:
    """The whole page."""
    return "\n".join(
        (
            HEAD,
            table(
                "Pull",
                "One attempt of one decode rank at one request. The outcome is given on entering NOTIFYING. The blocks "
                "are the caller's when nothing can write them, which QUARANTINED waits for.",
                pull.ON_EVENT,
                pull.WHEN,
            ),
            table(
                "Lease",
                "One lent request on a prefill rank. In ENDING nothing is granted any more; what was granted is kept.",
                lease.ON_EVENT,
                lease.WHEN,
            ),
            table("Peer", "One start of a remote rank, as a reader knows it.", peer.ON_EVENT, {}),
            table(
                "Request",
                "One request over its attempts; every attempt is a pull. Over, it tells the prefill ranks that no "
                "attempt follows, if they were told that one would.",
                attempts.ON_EVENT,
                attempts.WHEN,
            ),
            table(
                "Engine",
                "The life of one engine. In SHUT and after it no turn is taken. That nothing writes any more is "
                "certain in CLOSED for good, and in SUSPENDED until the engine is resumed.",
                lifecycle.ON_EVENT,
                {},
            ),
            table(
                "Stored block",
                "One block in one tier of the offload: host memory, or files. In LEAVING it cannot be found any more; "
                "its slot is free in GONE.",
                entry.ON_EVENT,
                entry.WHEN,
            ),
            table(
                "Store or load",
                "One request to store blocks in tiers, or to load them. The outcome is given on leaving RUNNING or "
                "DRAINING; in HELD a transfer in doubt may still touch the caller's blocks.",
                job.ON_EVENT,
                job.WHEN,
            ),
        )
    )


def draw() -> None:
    """Write docs/states.md from the transition tables of core and offload.

    Run it after a table changes; a test compares the page.
    """
    TARGET.write_text(page())


main = command.script(draw, "draw_states", "[bold]Exit status[/bold]  0 written, 2 bad input")


if __name__ == "__main__":
    sys.exit(main())
