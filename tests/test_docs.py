"""Pages that are made from code are what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from asynckv.tools.pictures import PAPER, THEMES
from scripts import draw_geometry, draw_states, drawing
from scripts.draw_states import TARGET, page


def test_the_states_page_is_fresh() -> None:
    assert TARGET.read_text() == page(), "run python -m scripts.draw_states"


DRAWN_BY = {"draw_geometry": draw_geometry.pictures}
"""The scripts that draw pictures; each returns its files' texts by their names."""


@pytest.mark.parametrize("script", DRAWN_BY)
def test_the_pictures_are_fresh(script: str) -> None:
    for name, drawn in DRAWN_BY[script]().items():
        assert (drawing.PICTURES / name).read_text() == drawn, f"run python -m scripts.{script}"


@pytest.mark.parametrize("machine", draw_states.MACHINES, ids=lambda machine: machine.name)
def test_the_pictures_of_states_are_fresh(machine: draw_states.Machine) -> None:
    assert draw_states.is_fresh(machine), "run python -m scripts.draw_states (it needs Graphviz)"


def test_every_picture_is_drawn_by_a_script() -> None:
    drawn = [name for pictures in DRAWN_BY.values() for name in pictures()]
    drawn += [machine.picture for machine in draw_states.MACHINES]
    assert sorted(drawn) == sorted(path.name for path in drawing.PICTURES.iterdir())


@pytest.mark.parametrize("path", sorted(drawing.PICTURES.iterdir()), ids=lambda path: path.stem)
def test_a_picture_is_read_on_light_and_on_dark_pages(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    spaces = {"": "http://www.w3.org/2000/svg"}
    assert root.get("class") == "picture"
    assert THEMES in (root.findtext("style", "", spaces))
    paper = root.find("rect", spaces)
    assert paper is not None
    assert (paper.get("fill"), paper.get("width"), paper.get("height")) == (PAPER, "100%", "100%")


@pytest.mark.nixl
@pytest.mark.slow
def test_the_embedding_example_runs() -> None:
    text = (TARGET.parent / "embedding.md").read_text()
    (program,) = re.findall(r"```python\n(import asyncio.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "released {'decode/tp0': 'complete'}" in done.stdout
