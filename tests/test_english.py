"""The package and the documentation keep the rules of CONTRIBUTING ("English"), and the documentation its size."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from scripts import english

ROOT = Path(__file__).parents[1]
SOURCE = {path: path.read_text() for path in (ROOT / "asynckv").rglob("*.py")}
PAGES = [path.read_text() for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))]
WORD = re.compile(r"\S*\w\S*")
DOCSTRINGS = [(path, at, text) for path, source in SOURCE.items() for at, text in english.docstrings(source)]


@pytest.mark.parametrize("texts", [SOURCE.values(), PAGES], ids=["package", "documentation"])
def test_subjects_are_named(texts: list[str]) -> None:
    found = sum(len(english.UNNAMED.findall(text)) for text in texts)
    assert 1000 * found < 2 * sum(text.count("\n") for text in texts)


@pytest.mark.parametrize(
    "texts", [[x for _, _, x in DOCSTRINGS], [*map(english.prose, PAGES)]], ids=["package", "pages"]
)
def test_sentences_are_neither_telegrams_nor_mazes(texts: list[str]) -> None:
    assert 12 <= statistics.median(english.lengths(texts)) <= 22


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert [(path, at) for path, at, text in DOCSTRINGS if english.STARTS.match(text)] == []


def test_the_documentation_keeps_its_size() -> None:
    """A word has a letter or a digit. Prose is written by hand, and is neither code nor output."""
    by_hand = [re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", page, flags=re.DOTALL) for page in PAGES]
    assert sum(len(WORD.findall(page)) for page in PAGES) <= 55_000
    assert sum(len(WORD.findall(english.without_code(page))) for page in by_hand) <= 40_000
