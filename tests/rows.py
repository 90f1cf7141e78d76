"""Make every row of a transition table wrong, one at a time: whatever is said to check the table has to notice each.

That is how one knows that a table *is* the machine, and no drawing of it: in a drawing a wrong row changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest

Table = Mapping[Any, Mapping[Any, Any]]
"""State -> (event or condition -> state). The rows have to be dicts that the machine looks into as it runs."""


def unnoticed(table: Table, checks: Callable[[], object]) -> list[str]:
    """Return the wrong rows that nothing came of: each redirected to every other state in turn, and each removed.

    Args:
        table: Its keys are all states of one `Enum`.
        checks: Raises if the machine does not do what it should; quick, for it runs once per wrong row.
    """
    checks()
    missed = []
    for state, row in table.items():
        for trigger, after in dict(row).items():
            for wrong in (*(s for s in type(state) if s is not after), None):
                with wrong_row(row, trigger, wrong):
                    if _pass(checks):
                        missed.append(f"{state.name} -{_name(trigger)}-> {wrong.name if wrong else 'nowhere'}")
    checks()
    return missed


@contextmanager
def wrong_row(row: Mapping[Any, Any], trigger: Any, wrong: Enum | None) -> Iterator[None]:
    """Let an event or condition lead elsewhere for a while, or nowhere."""
    assert isinstance(row, dict)
    right = dict(row)
    if wrong is None:
        del row[trigger]
    else:
        row[trigger] = wrong
    try:
        yield
    finally:
        row.clear()
        row.update(right)  # in the old order: the first condition that holds counts


def _pass(checks: Callable[[], object]) -> bool:
    try:
        checks()
    except (Exception, pytest.fail.Exception):
        return False
    return True


def _name(trigger: Any) -> str:
    return str(getattr(trigger, "name", None) or getattr(trigger, "__name__", trigger))
