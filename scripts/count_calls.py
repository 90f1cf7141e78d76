"""How many Python calls one warm small pull makes in the core, on either side.

A call of a Python function is what small requests pay for: it costs as much as a dozen additions. The core is driven as
`scripts/bench_core.py` drives it, one pull of one block at a time, and what that calls on a rank's core is counted with
all that is called below; a generator counts each time it is resumed. What is written in C (a dict, msgspec, a numpy
function without a wrapper in Python) does not count.

    python -m scripts.count_calls               # calls per pull, decode and prefill, by what was called from outside
    python -m scripts.count_calls --functions   # and by function
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType

from scripts.bench_core import Pulls


class Calls:
    """Counts the Python calls of one side or the other, while it is the profile function.

    Args:
        sides: What stands for a side: the ids of its objects that are called from outside.
    """

    def __init__(self, sides: Mapping[int, str]) -> None:
        self.by_entry: Counter[tuple[str, str]] = Counter()
        self.by_function: Counter[tuple[str, str]] = Counter()
        self._sides = sides
        self._entry: tuple[str, str] | None = None
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Take an event of `sys.setprofile`."""
        if event == "call":
            if self._entry is None:
                side = self._sides.get(id(frame.f_locals.get("self")))
                if side is None:
                    return
                self._entry = side, _name(frame.f_code)
            self._depth += 1
            self.by_entry[self._entry] += 1
            self.by_function[self._entry[0], _name(frame.f_code)] += 1
        elif event == "return" and self._entry is not None:
            self._depth -= 1
            if not self._depth:
                self._entry = None


def _name(code: CodeType) -> str:
    return f"{code.co_filename.rpartition('/')[2].removesuffix('.py')}.{code.co_qualname}"


def count(pulls: int, peers: int = 1) -> Calls:
    """Count the calls of so many pulls, after as many to warm up."""
    bench = Pulls(2 * pulls, in_flight=1, peers=peers)
    sides: dict[int, str] = {}
    for name, side in [("decode", bench.decode), *(("prefill", side) for side in bench.prefill)]:
        core = side.node
        sides |= dict.fromkeys(map(id, (core, core.outbox, core.decode)), name)
    bench.run(pulls)
    calls = Calls(sides)
    gc.collect()
    gc.disable()  # what it finds may have finalizers, which would be counted wherever it comes
    sys.setprofile(calls)
    try:
        bench.run(pulls)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def main(argv: Sequence[str] | None = None) -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pulls", type=int, default=100, help="how many are counted (%(default)s)")
    parser.add_argument("--functions", action="store_true", help="by function too")
    given = parser.parse_args(argv)
    if given.pulls < 1:
        parser.error(f"--pulls {given.pulls} must be 1 or more")
    calls = count(given.pulls)
    for side in ("decode", "prefill"):
        for title, counts in (("", calls.by_entry), ("by function", calls.by_function))[: 1 + given.functions]:
            mine = {name: n / given.pulls for (where, name), n in counts.items() if where == side}
            print(f"{side:8} {sum(mine.values()):8.2f}  {title}".rstrip())
            for name, number in sorted(mine.items(), key=lambda item: -item[1]):
                print(f"{'':8} {number:8.2f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
