"""The phases of a request, in the order of the protocol, and how they are drawn.

Colours were found by search: all phases of a pull differ from each other, also for eyes that do not tell red from green
or blue from yellow, and stand out from the page behind them (a contrast of 3 or more). Nothing is said by colour alone.
"""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """How a phase is drawn: a letter in text, a colour on a light page and on a dark one; and what it is."""

    letter: str
    light: str
    dark: str
    about: str


PHASES = {
    "lent": Phase("-", "#9aa3ae", "#6d7783", "lent, and not claimed yet"),
    "granted": Phase("=", "#7fb2d0", "#3f6f8c", "promised to a reader"),
    "ending": Phase("e", "#c79bbd", "#7d5274", "revoked; what was promised is kept"),
    "announced": Phase("a", "#424a57", "#9da1b1", "announced, and not pulled yet"),
    "handshake": Phase("h", "#691a9f", "#a63aa8", "until the peers were ready"),
    "queue": Phase("q", "#6e5306", "#fdc97a", "until it might read, and until its first post"),
    "plan": Phase("p", "#f2099c", "#b83c55", "planning what to read"),
    "read": Phase("R", "#0380f5", "#0c56fd", "from the first post to the last completion"),
    "confirm": Phase("c", "#0ea560", "#a0fdd1", "until its bytes were proven"),
    "drain": Phase("d", "#4c0701", "#ea2a06", "failed, and waiting for transfers that run"),
    "release": Phase("r", "#7e9a11", "#d1e419", "its outcome told, until the prefill side had heard"),
    "quarantine": Phase("X", "#a3262a", "#ff5a5f", "failed, and its blocks may still be written"),
    "pause": Phase(".", "#d8c9a8", "#6f6448", "between two attempts"),
    "pull": Phase("#", "#6b6ecf", "#8a8df0", "a pull of which the log says no more"),
    "unlogged": Phase("?", "#b3a98c", "#8a8266", "claimed, as the prefill side has it; successes here are sampled"),
}
"""What bars are called. Those of a pull but `release`, which comes after the result, add up to its seconds."""
