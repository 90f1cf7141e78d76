"""The class that vLLM makes, one in the scheduler and one in every worker: every hook is one line to its half."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

__all__ = ["AsyncKVConnector"]


class AsyncKVConnector(KVConnectorBase_V1, SupportsHMA):
    """A drop-in for `NixlConnector`."""
