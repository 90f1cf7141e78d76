"""What the repository says of itself: its version, its changelog, and the paths that its documents name."""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from asynckv.core.wire import MAJOR, MINOR
from asynckv.edges.files.index import FORMAT
from asynckv.version import VERSION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_OURS = re.compile(r"[/~]|vllm/|\w+:|.*[<>{}*$ ]|.*[A-Z]{3}|.*\.\.\.")
"""Absolute paths, vLLM's own, addresses, and names with a part to fill in."""
MADE = {"authorized/", "bench-results/", "build/", "dist/", "engines/", "logs/", "results/"}
"""What commands make; no checkout has them."""


def test_the_changelogs_newest_section_is_this_version() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(VERSION)} \(\d{{4}}-\d\d-\d\d\)", headings[0])
    numbers = [tuple(map(int, re.findall(r"\d+", heading.split()[0]))) for heading in headings]
    assert numbers == sorted(set(numbers), reverse=True)


def test_pages_show_this_version() -> None:
    """What commands print, as pages have it. Figures name the version that they were recorded with."""
    lines = [line for path in DOCUMENTS for line in path.read_text().splitlines() if not line.startswith("Recorded ")]
    shown = {version for line in lines for version in re.findall(r"\basynckv (\d+\.\d+\.\d+)", line)}
    assert shown == {VERSION}


def test_every_news_fragment_is_of_a_known_kind() -> None:
    """Towncrier passes over what it does not know."""
    kinds = "|".join(kind["directory"] for kind in PROJECT["tool"]["towncrier"]["type"])
    names = {path.name for path in (ROOT / "docs" / "newsfragments").iterdir()} - {"README.md"}
    assert [name for name in sorted(names) if not re.fullmatch(rf"(\d+|\+[a-z-]+)\.({kinds})(\.\d+)?\.md", name)] == []


def named_paths(text: str) -> set[str]:
    """Files and folders in backticks; in blocks only those that lie in a folder: the rest is an example's own."""
    quoted = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    blocks = " ".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).split()
    found = {word.split("::")[0] for word in [*quoted, *(word for word in blocks if "/" in word[:-1])]}
    return {word for word in found if re.fullmatch(r"[\w./-]+(\.py|/)", word) and not NOT_OURS.match(word)}


@functools.cache
def endings() -> set[str]:
    """Every file and folder of this checkout, from the root and from every folder on the way to it."""
    found = set()
    for top in ("asynckv", "deploy", "docs", "scripts", "tests"):
        for path in (ROOT / top, *(ROOT / top).rglob("*")):
            parts = path.relative_to(ROOT).parts
            end = "/" if path.is_dir() else ""
            found |= {"/".join(parts[i:]) + end for i in range(len(parts))}
    return found | {path.name for path in ROOT.iterdir()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_that_a_document_names_is_there(document: Path) -> None:
    """Named in full, or from a folder that the document speaks of."""
    assert sorted(named_paths(document.read_text()) - endings() - MADE) == []


def test_modules_that_documents_would_have_run_are_there() -> None:
    text = " ".join(path.read_text() for path in DOCUMENTS)
    modules = set(re.findall(r"python3? -m ((?:scripts|tests|asynckv)[\w.]*\w)", text))
    assert modules
    homes = {name: ROOT.joinpath(*name.split(".")) for name in modules}
    assert [x for x, home in homes.items() if not home.with_suffix(".py").exists() and not home.is_dir()] == []


def test_the_page_on_compatibility_says_what_the_code_and_the_pins_say() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"speaks **{MAJOR}.{MINOR}**" in page
    sources = (path.read_text() for path in (ROOT / "asynckv").rglob("*.py"))
    schemas = {schema for text in sources for schema in re.findall(r'"(asynckv\.[a-z_.]+/\d+)"', text)}
    assert schemas == set(re.findall(r"`(asynckv\.[a-z_.]+/\d+)`", page))
    assert f"(format {FORMAT}, in the index)" in page

    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    bounds = dict(each.split(">=") for each in PROJECT["project"]["dependencies"])
    row = re.compile(r"^\| ([\w, ]+) \| ([\d., ]+)(?:, the CPU build)? \| ([\d., ]+) \|$", re.MULTILINE)
    said = {
        name.lower(): (pin, bound)
        for names, tested, least in row.findall(page)
        for name, pin, bound in zip(names.split(", "), tested.split(", "), least.split(", "), strict=True)
    }
    assert said.pop("python")[1] == PROJECT["project"]["requires-python"].removeprefix(">=")
    assert said == {name: (pins[name], bounds[name]) for name in said}
    assert {"nixl", "torch", "pyzmq"} <= set(said)


def test_the_first_test_of_a_contributor_passes() -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    test()


MOST_LINES = {"asynckv": 56_901, "asynckv/tools": 17_296, "tests": 101_735, "scripts": 8_772, "docs/examples": 1_593}
"""Lines of Python at most. A change that removes some lowers the number; one that adds some removes others."""


@pytest.mark.parametrize("folder", MOST_LINES)
def test_the_house_does_not_grow(folder: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert lines <= MOST_LINES[folder], f"{folder} has {lines} lines of at most {MOST_LINES[folder]}"
