"""Runs the slow tests, two processes at a time: `python -m tests.slow`, with pytest's options behind it.

Tests that only compute, or have deadlines so long that other load does not matter, run beside the
others. Tests that break processes under load run one at a time. Tests that measure or limit a time
run when all these have ended. An editor who makes one of the two that run together much longer moves a file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
PATIENT = [
    str((TESTS / f"test_{name}.py").relative_to(TESTS.parent))
    for name in (
        # These only compute.
        *(
            "alerts",
            "cli_streams",
            "deploy",
            "fuzz",
            "geometry",
            "look",
            "machine",
            "offload_machine",
            "offload_planted",
        ),
        "token_shards",
        # These have engines and processes as well, and wait for events within many seconds.
        *("bench_compare", "bench_remote", "bench_sweep", "bench_vs_vllm", "cli", "docs", "doctor"),
        *("doctor_peer", "embed", "embed_examples", "events", "families", "inspect_ask", "leaks", "leaks_records"),
        *("log_sink", "models", "proxy", "public_clients", "release", "timeline_real"),
    )
]
PATIENT += [
    f"tests/lab/test_{name}.py"
    for name in (
        *("conformance", "leaks_simulated", "offload_soak", "simulated_logs"),
        *("simulation", "simulation_ahead", "simulation_follow", "simulation_offload"),
    )
]
ALONE = [
    f"tests/lab/test_chaos.py::test_what_is_promised_holds_under_pressure[{name}]"
    for name in ("load-tcp", "isolate-tcp", "drain-tcp", "sleep-tcp", "sleep-auto")
]
NOTHING_FOUND = 5
"""Pytest's status where no test was selected."""


def main() -> int:
    """Run both; the status is that of whichever failed."""
    pytest = [sys.executable, "-m", "pytest", "-m", "slow and not gpu", *sys.argv[1:]]
    with tempfile.TemporaryFile() as said:
        patient = subprocess.Popen([*pytest, "-p", "no:cacheprovider", *PATIENT], stdout=said, stderr=said)
        try:
            elsewhere = [*(f"--ignore={path}" for path in PATIENT), *(f"--deselect={test}" for test in ALONE)]
            others = subprocess.run([*pytest, *elsewhere, "tests"], check=False)
            statuses = {others.returncode, patient.wait()}
        finally:
            patient.kill()
            said.seek(0)
            print(said.read().decode(errors="replace"), flush=True)
    statuses.add(subprocess.run([*pytest, *ALONE], check=False).returncode)
    return max(statuses - {NOTHING_FOUND}, default=NOTHING_FOUND)


if __name__ == "__main__":
    sys.exit(main())
