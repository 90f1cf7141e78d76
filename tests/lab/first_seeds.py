"""Which seed catches a planted bug first: `python -m tests.lab.first_seeds`, for `SEEN` in `test_simulation.py`.

Seeds that were seen to catch a bug are tried first. A change of the order of events makes them stale; then tests search
for another one and take longer, and this finds it once. It prints bugs with a new seed, and those with no small one.
"""

from __future__ import annotations

import pytest

from tests.lab.mutations import PLANTED, doors
from tests.lab.simulation import simulate
from tests.lab.test_simulation import SEEN, SLOW


def first(name: str, known: int) -> int:
    """The seed that is known if it still catches the bug, else the first that does."""
    with pytest.MonkeyPatch.context() as patch:
        rigged = doors(name, patch)
        seeds: tuple[int, ...] = (known, *range(4000))
        return next(seed for seed in seeds if simulate(seed, doors=rigged).violation)


if __name__ == "__main__":
    for name in sorted(PLANTED):
        known = (SEEN | SLOW).get(name, 0)
        if (found := first(name, known)) != known and found > 3:
            print(f'    "{name}": {found},', flush=True)
