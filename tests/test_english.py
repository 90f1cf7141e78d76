"""The package and the documentation keep the rules of CONTRIBUTING ("English") and the documentation its size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import english

SOURCE = sorted((english.ROOT / "asynckv").rglob("*.py"))
OURS = [*SOURCE, *(x for name in ("tests", "scripts", "docs") for x in sorted((english.ROOT / name).rglob("*.py")))]
SITE = [page for page in english.PAGES if page.parent.name != "newsfragments"]


@pytest.mark.parametrize("paths", [SOURCE, OURS, english.PAGES], ids=["package", "all Python", "documentation"])
def test_subjects_are_named(paths: list[Path]) -> None:
    assert english.unnamed(paths) < 2


def test_sentences_are_neither_telegrams_nor_mazes() -> None:
    told = [x for path in SOURCE for _, text in english.docstrings(path.read_text()) for x in english.sentences(text)]
    assert 12 <= english.words(told) <= 22
    assert 12 <= english.words([x for page in SITE for x in english.sentences(english.prose(page.read_text()))]) <= 22


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [(path, at) for path in OURS for at, x in english.docstrings(path.read_text()) if english.STARTS.match(x)]
    assert found == []


def test_the_documentation_keeps_its_size() -> None:
    """Words as `wc` counts them, in all and without what is made from code."""
    texts = [page.read_text() for page in SITE]
    assert sum(len(text.split()) for text in texts) <= 55_000
    assert sum(len(english.by_hand(text).split()) for text in texts) <= 40_000
