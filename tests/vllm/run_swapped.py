"""vLLM's own tests with the connector exchanged: `python -m tests.vllm.run_swapped VLLM_SOURCE`.

They run three times: with NixlConnector, which shows that the tests are worth something here, with asynckv's, and with
asynckv's inside MultiConnector. The same is done with those of offloading, and asynckv's manager and worker. A test
that does not pass is a failure, and so is one that is missing or skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.vllm.versions import HAS_OFFLOAD

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

MANAGER, MOVER = "tests/v1/kv_offload/cpu/test_manager.py", "tests/v1/kv_offload/cpu/test_gpu_worker.py"
KEPT = [
    f"{MANAGER}::{name}"
    for name in (
        "test_cpu_eviction_removed_precedes_stored",
        "test_already_stored_chunk_not_evicted_during_prepare_store[lru]",
        "test_cpu_manager_reports_no_config_info_without_info",
        "test_prepare_load_preserves_key_order",
        "test_request_finish_orders_lru_prefix_independent_of_store_completion",
        "test_request_finish_orders_lru_prefix_independent_of_load_completion",
        "test_request_key_positions_override_store_observation_order",
        "test_request_key_positions_order_tails_across_kv_groups",
        "test_unfinished_lru_prefix_survives_pressure_across_store_batches",
        "test_unfinished_lru_reused_prefix_outlives_new_tail",
        "test_unfinished_lru_backfill_orders_by_token_position",
        "test_lru_failed_store_retry_preserves_prefix_order",
        "test_lru_reset_discards_unfinished_request_recency",
        "test_older_lru_request_does_not_demote_a_newer_shared_access",
    )
]
"""Tests of a manager that know it by its calls; the others know CPUOffloadingManager's policies, options or metrics."""

ASKED = [f"{UNIT}/offloading_connector/test_scheduler.py::test_swa_offload_window_covers_unaligned_hit"]
ONE_BOUNDARY = "3904"
"""How vLLM's connector asks a manager for prompts of three groups; the others of its tests have a manager of mocks."""

MOVED = [f"{MOVER}::test_transfer", f"{MOVER}::test_transfer_multi_group"]
NOT_APART = "not (multi_group and True)"
"""Stores of several groups are looked for by a test in a memory per group: here all groups have slots of one memory."""

OURS = {"name": "AsyncKVConnector", "module": "asynckv.integrations.vllm"}
THEIRS = {"name": "NixlConnector", "module": None}
RUNS: list[tuple[str, str, dict[str, Any], list[str], str | None, int]] = [
    ("vLLM's NixlConnector", "swap_connector", THEIRS, DRIVEN + MADE, None, 48),
    ("AsyncKVConnector", "swap_connector", OURS, DRIVEN + MADE, None, 48),
    ("AsyncKVConnector in MultiConnector", "swap_connector", {**OURS, "inside": True}, DRIVEN, NOT_INSIDE, 16),
    ("vLLM's CPUOffloadingManager", "", {}, KEPT, None, 22),
    ("AsyncKVOffloadingSpec's manager", "swap_offload", {}, KEPT, None, 22),
    ("vLLM's CPUOffloadingManager behind its connector", "", {}, ASKED, ONE_BOUNDARY, 32),
    ("AsyncKVOffloadingSpec's manager behind its connector", "swap_offload", {}, ASKED, ONE_BOUNDARY, 32),
    ("AsyncKVOffloadingSpec's worker", "swap_offload", {}, MOVED, NOT_APART, 28),
]
"""Name, the plug-in, what it swaps in, which tests, which of them, and how many have to pass."""


def main(source: Path) -> int:
    """Run all; the exit status."""
    failures = []
    root = Path(__file__).resolve().parents[2]
    # Offloading is refused by older versions, whose tests are others.
    for name, plugin, swap, tests, chosen, count in RUNS if HAS_OFFLOAD else RUNS[:3]:
        paths = [str(source), str(root), str(Path(__file__).parent / "swapped")]
        environment = {**os.environ, "ASYNCKV_SWAP": json.dumps(swap), "PYTHONPATH": os.pathsep.join(paths)}
        options = [
            "-q",
            *(["-p", plugin] if plugin else []),
            "-p",
            "no:cacheprovider",
            "-p",
            "no:warnings",
            "--timeout",
            "240",
        ]
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
