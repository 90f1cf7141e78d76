"""What crosses between the scheduler's process and the workers': the orders of a step, and where a worker listens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asynckv.embed.orders import Order
from asynckv.integrations.vllm.compat import KVConnectorHandshakeMetadata, KVConnectorMetadata


@dataclass
class StepOrders(KVConnectorMetadata):
    """All that a step asks of every worker; `failing` are loads that fail because the one that they waited for has."""

    orders: Sequence[Order] = field(default_factory=tuple)
    failing: Sequence[str] = ()


@dataclass
class WorkerAddress(KVConnectorHandshakeMetadata):
    """How the scheduler's half describes a worker to readers (`PrefillRanks`)."""

    endpoint: dict[str, Any]
    memory_epoch: int
