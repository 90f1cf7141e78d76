"""Pages that are made from code are what the code says."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

import asynckv
import asynckv.testing
from asynckv import layout, offload
from asynckv.core import wire
from asynckv.core.types import Reason
from asynckv.engine.attempts import ERRORS
from asynckv.errors import ConfigError
from scripts.draw import configuration, states
from scripts.draw.__main__ import MADE
from scripts.draw.drawing import PAPER, PICTURES, THEMES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "asynckv"


@pytest.mark.parametrize("what", MADE)
def test_what_is_made_from_code_is_fresh(what: str) -> None:
    for path, text in MADE[what][0]().items():
        assert path.read_text() == text, f"run python -m scripts.draw {what}"


def test_the_reference_has_every_public_name_once() -> None:
    blocks = re.split(r"^\.\. currentmodule:: (.*)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    listed: dict[str, list[str]] = {}
    for module, block in zip(blocks[1::2], blocks[2::2], strict=True):
        listed.setdefault(module, []).extend(re.findall(r"^\.\. auto\w+:: (\w+)$", block, re.MULTILINE))
    assert {module: sorted(names) for module, names in listed.items()} == {
        "asynckv": sorted(asynckv._HOME),
        "asynckv.layout": sorted(layout.__all__),
        "asynckv.offload": sorted(offload.__all__),
        "asynckv.testing": sorted(asynckv.testing.__all__),
    }


def test_every_reason_is_explained_once_with_the_error_that_it_raises() -> None:
    text = (DOCS / "api.md").read_text().partition("\n### Reasons\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\| .+ \|$", text, re.MULTILINE)
    errors = {**dict.fromkeys(wire.REFUSED, "LeaseRefused"), **{r: e.__name__ for r, e in ERRORS.items()}}
    errors |= {Reason.QUEUE_FULL: "Overloaded", Reason.COMPLETE: "", Reason.DISCHARGED: ""}
    told = {
        Reason(reason): error or ("LeaseRefused" if Reason(reason) in wire.REFUSED else "") for reason, error in rows
    }
    assert len(rows) == len(told)
    assert told == errors
    assert set(Reason) - set(told) == {Reason.RELEASED}
    assert f"`{Reason.RELEASED}`" in text.splitlines()[-2]


DATA = [
    kind
    for kind in (getattr(asynckv, name) for name in asynckv._HOME)
    if inspect.isclass(kind)
    and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))
    and not issubclass(kind, asynckv.Order)
]
"""Public plain data, but orders: their fields are the arguments of the methods that they name."""


@pytest.mark.parametrize("kind", DATA, ids=lambda kind: kind.__name__)
def test_every_field_of_public_data_is_explained(kind: type) -> None:
    names = {x.name for x in fields(kind)} if is_dataclass(kind) else set(kind.__struct_fields__)  # type: ignore[attr-defined]
    listed = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    assert set(re.findall(r"^    (\w+): ", listed, re.MULTILINE)) == names


def test_the_configuration_page_refuses_a_field_that_nobody_explains() -> None:
    @dataclass
    class Forgotten:
        """A part.

        Attributes:
            told: Explained.
        """

        told: int = 0
        untold: int = 0

    with pytest.raises(ConfigError, match="explains told; it has told, untold"):
        configuration.explained(Forgotten)


def test_every_picture_is_made_from_code() -> None:
    made = {path for files, _ in MADE.values() for path in files()} | {PICTURES / x.picture for x in states.MACHINES}
    assert made >= set(PICTURES.iterdir())


@pytest.mark.parametrize("path", sorted(PICTURES.iterdir()), ids=lambda path: path.stem)
def test_a_picture_is_read_on_light_and_on_dark_pages(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    spaces = {"": "http://www.w3.org/2000/svg"}
    assert root.get("class") == "picture"
    assert THEMES in (root.findtext("style", "", spaces))
    paper = root.find("rect", spaces)
    assert paper is not None
    assert (paper.get("fill"), paper.get("width"), paper.get("height")) == (PAPER, "100%", "100%")


def test_columns_of_tables_stay_wide_enough_on_a_phone() -> None:
    """A browser would make them as narrow as their longest word. Two columns of text fit 400 px; others scroll."""
    css = (DOCS / "_static" / "site.css").read_text()
    phone = css.partition("@media (max-width: 46em) {")[2].partition("\n}\n")[0]
    rules = dict(re.findall(r"^  \.content (table\S*(?: :is\(td, th\))?) \{\n    (.*);\n  \}$", phone, re.MULTILINE))
    assert rules == {
        "table.docutils": "width: max-content",
        "table.docutils :is(td, th)": "max-width: 10.5em",
        "table.docutils:has(td:nth-child(3)) :is(td, th)": "max-width: 15em",
    }


def test_the_map_names_files_that_exist_and_every_folder() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    named = {word for word in re.findall(r"`([^`\s]+)`", text) if re.search(r"\.(py|html|md)$|/$", word)}
    assert len(named) > 90
    assert not [word for word in sorted(named) if not (ROOT / word).exists() and not (PACKAGE / word).exists()]
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= named


@pytest.mark.nixl
@pytest.mark.slow
def test_the_embedding_example_runs() -> None:
    text = (DOCS / "embedding.md").read_text()
    (program,) = re.findall(r"```python\n(import asyncio.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "released {'decode/tp0': 'complete'}" in done.stdout
