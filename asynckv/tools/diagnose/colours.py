"""Colours of what pages show: one phase has one colour on every page, in light and in dark.

Found by search: all phases differ from each other, also for eyes that do not tell red from green or blue from yellow,
and stand out from the page behind them (a contrast of 3 or more). Nothing is said by colour alone.
"""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """One colour, for a light page and for a dark one."""

    light: str
    dark: str


PHASES = {
    "announced": Colour("#424a57", "#9da1b1"),
    "handshake": Colour("#691a9f", "#a63aa8"),
    "queue": Colour("#6e5306", "#fdc97a"),
    "plan": Colour("#f2099c", "#b83c55"),
    "read": Colour("#0380f5", "#0c56fd"),
    "confirm": Colour("#0ea560", "#a0fdd1"),
    "drain": Colour("#4c0701", "#ea2a06"),
    "release": Colour("#7e9a11", "#d1e419"),
}
"""Phases of a pull, in their order: all but `release`, which comes after the result, add up to its seconds."""

OTHERS = {
    "lent": Colour("#9aa3ae", "#6d7783"),
    "granted": Colour("#7fb2d0", "#3f6f8c"),
    "ending": Colour("#c79bbd", "#7d5274"),
    "quarantine": Colour("#a3262a", "#ff5a5f"),
    "pause": Colour("#d8c9a8", "#6f6448"),
    "pull": Colour("#6b6ecf", "#8a8df0"),
    "unlogged": Colour("#b3a98c", "#8a8266"),
}
"""What else a request goes through, on a timeline: its lease, and what comes between attempts or after a failure."""
