"""What differs between the versions of vLLM that these tests run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_offload.base import OffloadingManager

HAS_SLEEP = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
"""Before 0.33 vLLM does not tell a connector that its memory goes."""

HAS_OFFLOAD = hasattr(OffloadingManager, "lock")
"""Before 0.33 vLLM does not keep an offloading manager's other threads away while it decides on a step."""


def run_by(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines choose a model runner: "0" or, with the second one, "1"."""
    if runner == "1" and not HAS_SLEEP:
        pytest.skip("before 0.33 vLLM's second runner needs Triton, so that it does not start on a CPU")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)


def planned(config: Any, specs: Sequence[Mapping[str, Any]], num_bytes: int) -> list[Any]:
    """Plan the caches of all workers, each of which has so much memory."""
    given = [dict(spec) for spec in specs]
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:
        from vllm.v1.core import kv_cache_utils

        return list(kv_cache_utils.get_kv_cache_configs(config, given, [num_bytes] * len(given)))
    groups = planning.get_global_kv_cache_groups(config, [dict(spec) for spec in given])
    return list(planning.get_kv_cache_configs(config, given, [num_bytes] * len(given), groups))
