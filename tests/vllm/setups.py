"""What an engine of these tests is started with; plain data, for both ends of the pipe."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.vllm.models import Model

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends: NIXL's threads spin, and nobody else would stop them."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Connector:
    """The class that moves the cache.

    Attributes:
        name: Of the class.
        module: Where it is; None for vLLM's own.
        extra: Its `kv_connector_extra_config`.
        is_inside: Put into vLLM's MultiConnector.
    """

    name: str = "AsyncKVConnector"
    module: str | None = "asynckv.integrations.vllm"
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_inside: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine."""

    name: str
    model: Model = field(default_factory=Model)
    connector: Connector | None = field(default_factory=Connector)
    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    num_blocks: int = 128
    max_model_len: int = 1024
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefix_caching: bool = True
    async_scheduling: bool = False
    layout: str = "LBHNC"
    policy: Literal["fail", "recompute"] = "fail"
    role: str = "kv_both"
    drafts: int = 0
    """Tokens that are guessed per step, as with `--speculative-config`."""
    replica: int = 0
    """The data-parallel rank; vLLM makes an engine of each."""
    traces: str | None = None
    """Where vLLM sends spans (`--otlp-traces-endpoint`)."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def connector_fields(self) -> dict[str, Any]:
        """The `--kv-transfer-config`."""
        assert self.connector is not None
        common = {"kv_role": self.role, "kv_load_failure_policy": self.policy, "kv_buffer_device": "cpu"}
        inner = {
            "kv_connector": self.connector.name,
            "kv_connector_module_path": self.connector.module,
            "kv_connector_extra_config": dict(self.connector.extra),
        }
        if not self.connector.is_inside:
            return common | inner | {"engine_id": self.name}
        extra = {"connectors": [common | inner]}
        return common | {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra, "engine_id": self.name}
