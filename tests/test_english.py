"""The package and the documentation keep the rules of CONTRIBUTING ("English"), and the documentation its size."""

from __future__ import annotations

import functools
import re
import statistics
from pathlib import Path

import pytest

from scripts import english
from tests.test_repository import DOCUMENTS, ROOT

WORD = re.compile(r"\S*\w\S*")


@functools.cache
def texts_of(what: str) -> dict[Path, str]:
    return {path: path.read_text() for path in (DOCUMENTS if what == "pages" else (ROOT / "asynckv").rglob("*.py"))}


@functools.cache
def docstrings() -> list[tuple[Path, int, str]]:
    return [(path, at, x) for path, text in texts_of("package").items() for at, x in english.docstrings(text)]


@pytest.mark.parametrize("what", ["package", "pages"])
def test_subjects_are_named(what: str) -> None:
    text = "".join(texts_of(what).values())
    assert 1000 * len(english.UNNAMED.findall(text)) < 2 * text.count("\n")


@pytest.mark.parametrize("what", ["package", "pages"])
def test_sentences_are_neither_telegrams_nor_mazes(what: str) -> None:
    texts = map(english.prose, texts_of("pages").values()) if what == "pages" else (x for *_, x in docstrings())
    assert 12 <= statistics.median(english.lengths(texts)) <= 22


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert [(path, at) for path, at, text in docstrings() if english.STARTS.match(text)] == []


def test_the_documentation_keeps_its_size() -> None:
    """A word has a letter or a digit. Prose is written by hand, and is neither code nor output."""
    pages = texts_of("pages").values()
    by_hand = (re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", page, flags=re.DOTALL) for page in pages)
    assert sum(len(WORD.findall(page)) for page in pages) <= 52_500
    assert sum(len(WORD.findall(english.without_code(page))) for page in by_hand) <= 37_500
