"""The class that vLLM makes: every hook reaches its half, with what vLLM gave it; and what vLLM asks of the class."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asynckv.integrations.vllm import AsyncKVConnector
from asynckv.integrations.vllm.handover import StepOrders


class Half:
    """Notes every call, and answers with the call's name."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any) -> str:
            self.calls.append((name, *args))
            return name

        return called


def made(**halves: Any) -> Any:
    connector: Any = object.__new__(AsyncKVConnector)
    vars(connector).update(halves, _is_worker="_scheduler" not in halves)
    return connector


WORKERS = [
    ("get_mem_pool_context", (), ("allocation",)),
    ("register_kv_caches", ("caches",), ("register_kv_caches", "caches")),
    ("unregister_kv_caches", (), ("unregister_kv_caches",)),
    ("restore_kv_caches", (), ("restore_kv_caches",)),
    ("get_handshake_metadata", (), ("address",)),
    ("get_transfer_results", ({"a"},), ("take_results",)),
    ("get_kv_connector_stats", (), ("statistics",)),
    ("shutdown", (), ("shutdown",)),
]
SCHEDULERS = [
    ("set_xfer_handshake_metadata_pp_aware", ("found",), ("set_workers", "found")),
    ("on_new_request", ("request",), ("add", "request")),
    ("get_num_new_matched_tokens", ("request", 5), ("match", "request", 5)),
    ("update_state_after_alloc", ("request", "blocks", 7), ("allocated", "request", "blocks", 7)),
    ("request_finished", ("request", [1, 2]), ("finished", "request", ([1, 2],))),
    ("request_finished_all_groups", ("request", ([1], [2])), ("finished", "request", ([1], [2]))),
]


@pytest.mark.parametrize(
    ("side", "hook", "given", "expected"),
    [("_worker", *each) for each in WORKERS] + [("_scheduler", *each) for each in SCHEDULERS],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_every_hook_reaches_its_half(side: str, hook: str, given: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    half = Half()
    answer = getattr(made(**{side: half}), hook)(*given)
    assert half.calls == [expected]
    assert answer in (None, expected[0])


def test_orders_of_a_step_reach_the_worker_and_nothing_else_does() -> None:
    half, orders = Half(), StepOrders([])
    made(_worker=half, _connector_metadata=orders).start_load_kv(None)
    made(_worker=half, _connector_metadata=None).start_load_kv(None)
    assert half.calls == [("start_load", orders)]


@pytest.mark.parametrize(("use_mla", "layout"), [(False, "LBHNC"), (True, None), (None, None)])
def test_the_order_of_memory_with_the_fewest_descriptors_is_asked_for(use_mla: bool | None, layout: str | None) -> None:
    model = None if use_mla is None else SimpleNamespace(use_mla=use_mla)
    assert AsyncKVConnector.get_required_kvcache_layout(SimpleNamespace(model_config=model)) == layout


def test_no_pushes_and_no_counts_of_workers_are_announced() -> None:
    assert not made().has_pending_push_work()
    assert made().get_finished_count() is None


def test_sleep_and_loads_beside_a_local_prefix_are_offered() -> None:
    assert AsyncKVConnector.supports_sleep_mode(None) is True
    assert made().supports_divergent_local_hybrid_hits is True


def test_the_connector_loads_no_tool_and_no_simulated_plane() -> None:
    """`tests/test_imports.py` reads the import statements; this looks at what vLLM's class has really loaded."""
    code = (
        "import sys; import asynckv.integrations.vllm.offload.spec\n"
        "from asynckv.integrations.vllm import AsyncKVConnector\n"
        "print(*(x for x in sys.modules if x.startswith('asynckv.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    rooms = {module.split(".")[1] for module in done.stdout.splitlines()[-1].split()}
    assert {"core", "embed", "integrations"} <= rooms
    assert not rooms & {"tools", "testing"}
