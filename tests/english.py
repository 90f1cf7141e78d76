"""Measures the English of the package and of the documentation: `python -m tests.english PATH...` (CONTRIBUTING)."""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNNAMED = re.compile(r"\b(who|whom|whose|who(?:m|se)?ever|nobody|somebody)\b", re.IGNORECASE)
"""Words that stand where the name of a subject should."""
STARTS = re.compile(r"(What|Who|Whom|Whose|Whoever|How|So|Such)\b")
"""Words that no docstring begins with: the first word is a verb, or a noun that stands in the code."""


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring, also of those that follow a constant or a field."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(told))):
                yield node.lineno, told


def prose(page: str) -> str:
    """Return a page without code, tables, headings, directives and comments."""
    page = re.sub(r"^( *)(```|:::|~~~).*?^\1\2.*?$|<!--.*?-->", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^(\||#|\(|!\[| *:).*$", "", page, flags=re.MULTILINE)


def by_hand(page: str) -> str:
    """Return a page without the parts that `scripts.draw` makes."""
    return re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", page, flags=re.DOTALL)


def sentences(text: str) -> list[str]:
    """Return the sentences of three words and more. A list's item or a field's line is one of its own."""
    parts = re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. |\w+: )", text)
    found = (re.split(r"(?<=[.!?:])[*)\"]*\s+(?=[A-Z`\"(*\[])", " ".join(part.split())) for part in parts)
    return [one for part in found for one in part if len(one.split()) > 2]


def words(found: list[str]) -> float:
    return statistics.median(len(one.split()) for one in found) if found else 0


def unnamed(paths: list[Path]) -> float:
    """Return how many of `UNNAMED` stand in 1,000 lines."""
    texts = [path.read_text() for path in paths]
    return 1000 * sum(len(UNNAMED.findall(x)) for x in texts) / sum(x.count("\n") for x in texts)


def main() -> None:
    paths = [x for given in map(Path, sys.argv[1:]) for x in (given, *given.rglob("*")) if x.suffix in (".py", ".md")]
    for path in sorted(paths):
        text = path.read_text()
        for at, line in enumerate(text.splitlines(), 1):
            if UNNAMED.search(line):
                print(f"{path}:{at}: {line.strip()}")
        told = list(docstrings(text)) if path.suffix == ".py" else []
        for at, one in told:
            if STARTS.match(one):
                print(f"{path}:{at}: begins so: {one.splitlines()[0]}")
        found = [x for _, one in told for x in sentences(one)] if told else sentences(prose(text))
        long = sum(len(x.split()) > 30 for x in found)
        print(f"{path}: {len(text.split())} words; the median sentence has {words(found):g}, {long} have more than 30")


if __name__ == "__main__":
    main()
