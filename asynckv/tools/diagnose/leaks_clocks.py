"""One time for all: when something happened, whoever has told of it by his own clock.

Clocks are aligned by what processes said to each other (`clocks.py`), as far as that goes. So every moment is an
interval here, and what is concluded from the order of two moments holds for all of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from asynckv.tools.diagnose.axis import Axis, make_axis
from asynckv.tools.diagnose.join import Service

__all__ = ["CLOCKS_S", "HOST_S", "When", "aligned"]

CLOCKS_S = 10.0
"""How far the clocks of two hosts may be apart where nothing else is known of them."""

HOST_S = 0.1
"""How far apart the lines of one moment may be that processes of one host have written."""

When = Callable[[str, float], tuple[float, float]]
"""Between which moments of one time for all something happened: the start of a process, and a time by its clock."""


def aligned(service: Service, axis: Axis | None = None) -> When:
    """Align the clocks of all processes by what they said to each other.

    Of those who said nothing to anybody it is only known that clocks are seldom more than `CLOCKS_S` apart.
    """
    clocks = (axis or make_axis(service)).clocks
    main = clocks.group(clocks.groups[0][0]) if clocks.groups else 0
    # Who exchanged nothing with anybody has the clock of the others on its host.
    on_host = {x.host: name for name, x in service.processes.items() if x.host and clocks.group(name) == main}

    def when(incarnation: str, at: float) -> tuple[float, float]:
        name, slack = incarnation, 0.0
        if clocks.group(incarnation) != main:
            name, slack = on_host.get(service.processes[incarnation].host, ""), HOST_S
        if not name:
            return at - CLOCKS_S, at + CLOCKS_S
        offset = clocks.offset(name, at)
        if not math.isfinite(offset.seconds):
            return at - CLOCKS_S, at + CLOCKS_S
        within_s = min(offset.within_s + slack, CLOCKS_S)
        return at - offset.seconds - within_s, at - offset.seconds + within_s

    return when
