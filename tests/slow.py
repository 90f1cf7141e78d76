"""Runs the slow tests in two processes: `python -m tests.slow`, with pytest's options behind it.

Those that only compute run beside the others. Of these one runs at a time, because they have processes, ports and
deadlines of their own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
COMPUTES = [
    str((TESTS / f"test_{name}.py").relative_to(TESTS.parent))
    for name in ("fuzz", "geometry", "leaks_simulated", "machine", "offload_soak", "real_models", "simulation")
]
NOTHING_FOUND = 5
"""Pytest's status where no test was selected."""


def main() -> int:
    """Run both; the status is that of whichever failed."""
    pytest = [sys.executable, "-m", "pytest", "-m", "slow and not gpu", *sys.argv[1:]]
    with tempfile.TemporaryFile() as said:
        computing = subprocess.Popen([*pytest, "-p", "no:cacheprovider", *COMPUTES], stdout=said, stderr=said)
        try:
            others = subprocess.run([*pytest, *(f"--ignore={path}" for path in COMPUTES), "tests"], check=False)
            statuses = {others.returncode, computing.wait()}
        finally:
            computing.kill()
            said.seek(0)
            print(said.read().decode(errors="replace"), flush=True)
    return max(statuses - {NOTHING_FOUND}, default=NOTHING_FOUND)


if __name__ == "__main__":
    sys.exit(main())
