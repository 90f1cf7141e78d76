"""Write the section States of docs/structure.md from the transition tables, and draw each table as a picture.

Graphviz lays the pictures out (`apt-get install graphviz`). Building the documentation and running its tests works
without Graphviz, because each picture holds a digest of its source, and a test compares only that.
"""

from __future__ import annotations

import hashlib
import subprocess
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from xml.etree import ElementTree

from asynckv.core import attempts, following, lease, lifecycle, peer, pull
from asynckv.errors import ConfigError
from asynckv.offload import entry, job
from scripts.draw import drawing
from scripts.draw.drawing import DOCS, PICTURES, between

WIDTH = 119
LABEL = 18
"""Characters in one line of a label. Narrow pictures can be read on a phone."""
ALIKE = 3
"""Number of transitions to one state, for the same reasons, that are drawn as one arrow."""

GRAPH = """digraph {
  graph [nodesep=0.2, ranksep=0.3, bgcolor=transparent, pad=0.15]
  node [shape=box, style="rounded,filled", fillcolor="#dddddd", fontname="DejaVu Sans", fontsize=14, height=0.35,
    margin="0.12,0.04"]
  edge [fontname="DejaVu Sans", fontsize=12, arrowsize=0.7]"""


class Machine(NamedTuple):
    """A transition table and the `module` that holds it."""

    name: str
    module: ModuleType
    intro: str

    @property
    def on_event(self) -> Mapping[Any, Mapping[Any, Any]]:
        """Return the table: state -> event -> next state."""
        table: Mapping[Any, Mapping[Any, Any]] = self.module.ON_EVENT
        return table

    @property
    def when(self) -> Mapping[Any, Mapping[Any, Any]]:
        """Return the table: state -> condition -> state that is entered as soon as the condition holds."""
        table: Mapping[Any, Mapping[Any, Any]] = getattr(self.module, "WHEN", {})
        return table

    @property
    def events(self) -> list[Any]:
        """Return every event, in the order of the states that take it."""
        return list(dict.fromkeys(event for row in self.on_event.values() for event in row))

    @property
    def edges(self) -> dict[tuple[str, str], list[str]]:
        """Return the reasons of each transition between two states: events in capitals, conditions in italics."""
        edges: dict[tuple[str, str], list[str]] = defaultdict(list)
        for state, row in self.on_event.items():
            for event, after in row.items():
                if after is not state:
                    edges[state.name, after.name].append(_name(event))
        for state, row in self.when.items():
            for condition, after in row.items():
                edges[state.name, after.name].append(f"*{_words(condition)}*")
        return edges

    @property
    def stays(self) -> dict[str, list[str]]:
        """Return the events that a state takes without being left."""
        all_of = {s.name: [_name(e) for e, after in row.items() if after is s] for s, row in self.on_event.items()}
        return {state: events for state, events in all_of.items() if events}

    @property
    def ends(self) -> list[str]:
        """Return the final states."""
        left = {state for state, _ in self.edges}
        return [state.name for state in self.on_event if state.name not in left]

    @property
    def picture(self) -> str:
        """Return the file name of the picture."""
        return f"states-{self.name.lower().replace(' ', '-')}.svg"


MACHINES = (
    Machine(
        "Pull",
        pull,
        "One attempt of one decode rank at one request. NOTIFYING begins with the outcome. The caller gets its blocks "
        "back once nothing can write them any more; QUARANTINED waits for that.",
    ),
    Machine(
        "Lease",
        lease,
        "One lent request on a prefill rank. Each reader is owed until it releases, and so is each decode engine that "
        "was not heard of yet: `lend(params, num_readers=2)` waits for two. ENDING grants nothing more, and keeps the "
        "grants that run.",
    ),
    Machine("Peer", peer, "One start of a remote rank, as this rank sees it."),
    Machine(
        "Request",
        attempts,
        "One request over its attempts, each of which is a pull. EARLY reads pieces. If the prefill ranks expect "
        "another attempt, OVER tells them that none follows.",
    ),
    Machine("Follow", following, "One ticket that a decode rank follows. An offer begins nothing by itself."),
    Machine(
        "Engine",
        lifecycle,
        "The life of one engine. From SHUT on the engine takes no turn. In CLOSED nothing can ever write again; in "
        "SUSPENDED nothing can write until the engine is resumed.",
    ),
    Machine(
        "Stored block",
        entry,
        "One block in one tier of the offload: host memory, or files. LEAVING hides the block from searches; GONE "
        "frees its slot.",
    ),
    Machine(
        "Store or load",
        job,
        "One request to store or load blocks. The outcome is given on leaving RUNNING or DRAINING. In HELD a transfer "
        "in doubt may still touch the caller's blocks.",
    ),
)


def section(machine: Machine) -> str:
    """Return one machine as a picture and a table of its transitions."""
    title = f"The states of: {machine.name.lower()}"
    path = machine.module.__name__.replace(".", "/") + ".py"
    lines = [
        f"### {machine.name}\n",
        f"{textwrap.fill(machine.intro, WIDTH)}\n",
        f"Code: [`{path}`](../{path})\n",
        f"![{title}](pictures/{machine.picture})\n",
    ]
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for state in (state.name for state in machine.on_event):
        for (before, after), why in machine.edges.items():
            if before == state:
                alike[after, _any_of(why)].append(state)
        if events := machine.stays.get(state):
            alike["*stays*", _any_of(events)].append(state)
    rows = ((", ".join(states), *reached) for reached, states in alike.items())
    lines.append(drawing.table("| from | to | by |", rows))
    if machine.ends:
        lines.append(f"Final: {', '.join(machine.ends)}.\n")
    return "\n".join(lines)


def _any_of(reasons: list[str]) -> str:
    """Join reasons of which each is enough."""
    *others, last = reasons
    return f"{', '.join(others)} or {last}" if others else last


def graph(machine: Machine) -> str:
    """Return one machine in Graphviz' language."""
    lines = [GRAPH, f"  {next(iter(machine.on_event)).name} [penwidth=2.5]"]
    lines += [f"  {state} [peripheries=2]" for state in machine.ends]
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (state, after), why in machine.edges.items():
        words = textwrap.wrap(_any_of(why).replace("*", "").replace("`", ""), LABEL)
        alike[after, "".join(f"  {line}\\l" for line in words)].append(state)
    for number, ((after, label), states) in enumerate(alike.items()):
        if len(states) < ALIKE:
            lines += [f'  {state} -> {after} [label="{label}"]' for state in states]
        else:
            lines += [f'  joint{number} [shape=point, width=0.06, fillcolor=black, label=""]']
            lines += [f"  {state} -> joint{number} [arrowhead=none]" for state in states]
            lines += [f'  joint{number} -> {after} [label="{label}"]']
    return "\n".join([*lines, "}", ""])


def digest(machine: Machine) -> str:
    """Return a comment with the digest of everything that the picture is drawn from."""
    text = graph(machine) + drawing.STYLE
    return f"<!-- drawn by scripts/draw from {hashlib.sha256(text.encode()).hexdigest()} -->"


def picture(machine: Machine) -> str:
    """Return one machine, drawn by Graphviz.

    Raises:
        ConfigError: Graphviz is not installed.
    """
    try:
        done = subprocess.run(["dot", "-Tsvg"], input=graph(machine), capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise ConfigError(f"{machine.picture} needs Graphviz: apt-get install graphviz") from None
    ElementTree.register_namespace("", "http://www.w3.org/2000/svg")
    root = ElementTree.fromstring(done.stdout)
    for element in root.iter():
        element.attrib.pop("font-family", None)
        for child in list(element):
            if child.tag.endswith("title"):
                element.remove(child)
        for name in ("fill", "stroke"):
            if element.get(name) == "black":
                element.set(name, "currentColor")
    _, _, width, height = (float(x) for x in root.attrib["viewBox"].split())
    body = ElementTree.tostring(root[0], encoding="unicode").replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return drawing.svg(f"The states of: {machine.name.lower()}", width, height, f"{digest(machine)}\n{body}")


def _name(event: Any) -> str:
    return str(event.name if isinstance(event, Enum) else event.__name__).replace("_", " ").upper()


def _words(condition: Any) -> str:
    """Return the words of a condition: the first line of its function's docstring."""
    if not callable(condition):
        return str(condition)
    words = (condition.__doc__ or "").splitlines()[0].rstrip(".")
    return words[0].lower() + words[1:]


def page() -> str:
    """Return the section with all machines."""
    return "\n".join(map(section, MACHINES))


def is_fresh(machine: Machine) -> bool:
    """Return True if the picture was drawn from the current tables."""
    path = PICTURES / machine.picture
    return path.exists() and digest(machine) in path.read_text(encoding="utf-8")


def files() -> dict[Path, str]:
    """Return the page, and the pictures that are stale."""
    stale = [machine for machine in MACHINES if not is_fresh(machine)]
    return {
        **between(DOCS / "structure.md", "states", page()),
        **{PICTURES / machine.picture: picture(machine) for machine in stale},
    }
