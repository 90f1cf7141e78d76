"""Pages that are made from code are what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import draw_geometry
from scripts.draw_states import TARGET, page


def test_the_states_page_is_fresh() -> None:
    assert TARGET.read_text() == page(), "run python -m scripts.draw_states"


def test_the_pictures_are_fresh() -> None:
    drawn = draw_geometry.pictures()
    found = {path.name: path.read_text() for path in draw_geometry.TARGET.iterdir()}
    assert found == drawn, "run python -m scripts.draw_geometry"


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "asynckv"


def test_the_map_names_files_that_exist_and_every_folder() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    named = {word for word in re.findall(r"`([^`\s]+)`", text) if re.search(r"\.(py|html|md)$|/$", word)}
    assert len(named) > 150
    assert not [word for word in sorted(named) if not (ROOT / word).exists() and not (PACKAGE / word).exists()]
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= named


@pytest.mark.nixl
@pytest.mark.slow
def test_the_embedding_example_runs() -> None:
    text = (TARGET.parent / "embedding.md").read_text()
    (program,) = re.findall(r"```python\n(import asyncio.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "released {'decode/tp0': 'complete'}" in done.stdout
