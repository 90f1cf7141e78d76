"""What crosses between the scheduler's process and the workers': the orders of a step, and where a worker listens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from asynckv.embed.orders import Order


@dataclass
class StepOrders(KVConnectorMetadata):
    """All that a step asks of every worker, to be carried out in this order."""

    orders: Sequence[Order] = field(default_factory=tuple)


@dataclass
class WorkerAddress(KVConnectorHandshakeMetadata):
    """How the scheduler's half describes a worker to readers (`PrefillRanks`).

    Attributes:
        endpoint: `Engine.endpoint`, as plain data.
        memory_epoch: `Engine.memory_epoch`.
    """

    endpoint: dict[str, Any]
    memory_epoch: int
