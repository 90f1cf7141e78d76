"""asynckv as a KV connector of vLLM: `"kv_connector_module_path": "asynckv.integrations.vllm"`.

vLLM makes the same class in the scheduler's process and in every worker's, and carries plain values from the one to the
others, once per step. The scheduler's half decides which blocks a request's KV is in (`scheduler`), and the workers'
half moves it (`worker`, `memory`, `stats`). `connector` has the class, `dual` that class and vLLM's `NixlConnector` in
one, `options` what a user may say, `handover` the values that cross.

vLLM is imported when the class is asked for: the rest can be read and tested without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynckv.integrations.vllm.connector import AsyncKVConnector
    from asynckv.integrations.vllm.dual import DualConnector

__all__ = ["AsyncKVConnector", "DualConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asynckv.integrations.vllm.connector import AsyncKVConnector

    if name == AsyncKVConnector.__name__:
        return AsyncKVConnector
    from asynckv.integrations.vllm.dual import DualConnector

    return DualConnector
