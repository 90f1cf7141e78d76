"""Measure the English of Python files and pages, by the rules of CONTRIBUTING: `python -m scripts.english PATH...`"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

UNNAMED = re.compile(r"\b(who|whom|whose|who(?:m|se)?ever|nobody|somebody)\b", re.IGNORECASE)
"""Words that stand in the place of a subject's name."""
STARTS = re.compile(r"(What|Who|Whom|Whose|Whoever|How|So|Such)\b")
"""Words that no docstring begins with, because a verb or a noun of the code comes first."""


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring, including those after a constant or a field."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def without_code(page: str) -> str:
    """Return a page without code, directives and comments."""
    return re.sub(r"^( *)(```|:::|~~~).*?^\1\2.*?$|<!--.*?-->", "", page, flags=re.DOTALL | re.MULTILINE)


def prose(page: str) -> str:
    """Return a page without code, tables, headings, directives and comments."""
    return re.sub(r"^(\||#|\(|!\[| *:).*$", "", without_code(page), flags=re.MULTILINE)


def lengths(texts: Iterable[str]) -> list[int]:
    """Return the number of words of each sentence, list item and field with three words or more."""
    parts = (part for text in texts for part in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. |\w+: )", text))
    found = (re.split(r"(?<=[.!?:])[*)\"]*\s+(?=[A-Z`\"(*\[])", " ".join(part.split())) for part in parts)
    return [len(words) for part in found for sentence in part if len(words := sentence.split()) > 2]


def main() -> None:
    paths = [x for given in map(Path, sys.argv[1:]) for x in (given, *given.rglob("*")) if x.suffix in (".py", ".md")]
    for path in sorted(paths):
        text = path.read_text()
        told = list(docstrings(text)) if path.suffix == ".py" else []
        lines = [(at, line.strip()) for at, line in enumerate(text.splitlines(), 1) if UNNAMED.search(line)]
        for at, line in lines + [(at, each.splitlines()[0]) for at, each in told if STARTS.match(each)]:
            print(f"{path}:{at}: {line}")
        found = lengths([each for _, each in told] or [prose(text)])
        print(f"{path}: {len(text.split())} words, {statistics.median(found or [0]):g} in the median sentence")


if __name__ == "__main__":
    main()
