"""vLLM's own tests with the connector exchanged: `python -m tests.vllm.run_swapped VLLM_SOURCE`.

They run three times: with NixlConnector, which shows that the tests are worth something here, with asynckv's, and with
asynckv's inside MultiConnector. A test that does not pass is a failure, and so is one that is missing or skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

UNIT, CORE = "tests/v1/kv_connector/unit", "tests/v1/core"

DRIVEN = [
    f"{UNIT}/test_remote_prefill_lifecycle.py",
    f"{UNIT}/test_remote_decode_lifecycle.py",
    f"{UNIT}/test_bidirectional_kv_transfer.py::test_first_turn_no_remote_blocks",
    f"{UNIT}/test_bidirectional_kv_transfer.py::test_abort_p_side_during_send",
    f"{UNIT}/test_bidirectional_kv_transfer.py::test_cache_miss_first_turn_no_remote_pull",
    f"{UNIT}/test_nixl_connector.py::test_prefill_exports_cached_tokens_in_kv_transfer_params",
]
"""Tests in which vLLM's scheduler drives the connector; the others look into NixlConnector's own state."""

MADE = [
    f"{UNIT}/test_error_propagation.py",
    f"{UNIT}/test_kv_load_failure_recovery.py",
    f"{UNIT}/test_invalid_blocks_correctness.py",
    f"{UNIT}/test_cache_pollution_prevention.py",
    f"{CORE}/test_async_scheduler.py::test_requires_kv_delivery_defaults_to_producer_role",
    f"{CORE}/test_async_scheduler.py::test_kv_pressure_preempt_mid_handoff",
]
"""Tests that only make the connector, and then put another in its place."""

NOT_INSIDE = "not async_load and not deferred_lookup"
"""Tests that replace a method of the outermost connector, where MultiConnector notes which child it chose."""

OURS = {"name": "AsyncKVConnector", "module": "asynckv.integrations.vllm"}
THEIRS = {"name": "NixlConnector", "module": None}
RUNS = [
    ("vLLM's NixlConnector", THEIRS, DRIVEN + MADE, None, 48),
    ("AsyncKVConnector", OURS, DRIVEN + MADE, None, 48),
    ("AsyncKVConnector in MultiConnector", {**OURS, "inside": True}, DRIVEN, NOT_INSIDE, 16),
]
"""Name, what is swapped in, which tests, which of them, and how many have to pass."""


def main(source: Path) -> int:
    """Run all; the exit status."""
    failures = []
    root = Path(__file__).resolve().parents[2]
    for name, swap, tests, chosen, count in RUNS:
        paths = [str(source), str(root), str(Path(__file__).parent / "swapped")]
        environment = {**os.environ, "ASYNCKV_SWAP": json.dumps(swap), "PYTHONPATH": os.pathsep.join(paths)}
        options = ["-q", "-p", "swap_connector", "-p", "no:cacheprovider", "-p", "no:warnings", "--timeout", "240"]
        command = [sys.executable, "-P", "-m", "pytest", *options, *(["-k", chosen] if chosen else []), *tests]
        print(f"== {name}", flush=True)
        run = subprocess.run(command, cwd=source, env=environment, stdout=subprocess.PIPE, text=True)
        print(run.stdout[-8000:], flush=True)
        passed = re.search(r"(\d+) passed", run.stdout)
        if run.returncode or not passed or int(passed[1]) != count or " skipped" in run.stdout:
            failures.append(f"{name}: {passed[0] if passed else 'none passed'}, of {count}")
    print("\n".join(failures) or "all passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
