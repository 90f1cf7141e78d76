"""asynckv as a KV connector of vLLM: `"kv_connector_module_path": "asynckv.integrations.vllm"`.

A request passes through two processes of each engine. The scheduler's decides which blocks a request's KV is in, and
the workers' move it; vLLM makes the same class in both, and carries plain values from the one to the others, once per
step. So there are two halves, and little between them:

- `connector`: the class that vLLM makes. Every hook of vLLM is one line to its half.
- `dual`: that class and vLLM's `NixlConnector` in one, for a fleet that moves from the one to the other.
- `options`: what a user may say in `kv_connector_extra_config`.
- `scheduler`: the scheduler's half. What vLLM's hooks mean, and vLLM's requests and blocks in asynckv's words.
- `handover`: the values that cross.
- `worker`, `memory`, `stats`: the workers' half, the memory that vLLM registers, and what is counted.

vLLM is imported when the class is asked for, not before: the rest can be read and tested without it.
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
