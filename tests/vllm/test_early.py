"""What ends a start before a model is loaded, with vLLM's own configuration, executor and engine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from asynckv.errors import ConfigError
from asynckv.integrations.vllm.early import watch_executors
from tests.vllm.planned import vllm_config

watch_executors()  # as the import of a connector does


class Reached(Exception):
    """A model would be loaded now."""


class Loading(Executor):
    """An executor that only says how far a start came."""

    ran: list[str]

    def _init_executor(self) -> None:
        Loading.ran.append("load_model")
        raise Reached

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    def check_health(self) -> None:
        raise AssertionError


def lese(config: Any) -> None:
    config.kv_transfer_config.kv_connector_extra_config = {"lese": {}}


def no_keys(config: Any) -> None:
    extra = {"bind": "tcp://10.0.0.1:0", "keys": {"secret": "/none/a.key_secret", "authorized": "/none"}}
    config.kv_transfer_config.kv_connector_extra_config = extra


def pcp(config: Any) -> None:
    config.parallel_config.prefill_context_parallel_size = 2


def pcp_and_dcp(config: Any) -> None:
    pcp(config)
    config.parallel_config.decode_context_parallel_size = 2
    config.kv_transfer_config.kv_role = "kv_producer"


def child_of_another_role(config: Any) -> None:
    pcp(config)
    ours = {"kv_connector": "AsyncKVConnector", "kv_role": "kv_both"}
    within(config, "MultiConnector", {"connectors": [ours]}, "kv_producer")


def dual(config: Any) -> None:
    config.parallel_config.decode_context_parallel_size = 2
    within(config, "DualConnector", {})


def offload(config: Any) -> None:
    config.parallel_config.decode_context_parallel_size = 2
    extra = {"spec_name": "AsyncKVOffloadingSpec", "host_bytes": 1 << 30, "directory": "/none", "file_bytes": 1 << 30}
    within(config, "OffloadingConnector", extra)


def within(config: Any, name: str, extra: dict[str, Any], role: str = "kv_both") -> None:
    transfer = config.kv_transfer_config
    transfer.kv_connector, transfer.kv_connector_extra_config, transfer.kv_role = name, extra, role


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lese, "no option 'lese'; did you mean 'lease'"),
        (no_keys, "/none"),
        (pcp, "--prefill-context-parallel-size 2 with kv_role 'kv_both'"),
        (child_of_another_role, "--prefill-context-parallel-size 2 with kv_role 'kv_both'"),
        (pcp_and_dcp, "--decode-context-parallel-size 2, --tensor-parallel-size 2: tokens are shared"),
        (dual, "--decode-context-parallel-size 2, .* DualConnector"),
        (offload, "--decode-context-parallel-size 2: the records in"),
    ],
)
def test_a_mistake_is_refused_before_a_model_is_loaded(tmp_path: Path, spoil: Any, says: str) -> None:
    config = vllm_config(tmp_path / "model", tp=2)
    Loading.ran = []
    with pytest.raises(Reached):
        EngineCore(config, Loading, log_stats=False)
    assert Loading.ran == ["load_model"], "a good configuration comes so far"
    spoil(config)
    with pytest.raises(ConfigError, match=says):
        EngineCore(config, Loading, log_stats=False)
    assert Loading.ran == ["load_model"]
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(VllmConfig) if f.init}
    with pytest.raises(ConfigError, match=says):
        VllmConfig(**given)


def test_watching_twice_checks_once() -> None:
    before = VllmConfig.__post_init__, Executor.__init__
    watch_executors()
    assert (VllmConfig.__post_init__, Executor.__init__) == before


class Odd(dict[str, Any]):
    """Options of somebody else's connector, of which a check knows nothing."""

    def get(self, *args: Any) -> Any:
        raise ZeroDivisionError


def test_an_error_of_the_check_itself_ends_no_start(tmp_path: Path) -> None:
    config = vllm_config(tmp_path / "model")
    config.kv_transfer_config.kv_connector = "SomebodysConnector"
    config.kv_transfer_config.kv_connector_extra_config = Odd()
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(VllmConfig) if f.init}
    assert VllmConfig(**given).kv_transfer_config is config.kv_transfer_config


PLUG_IN = """
import sys
import vllm.config
before = set(sys.modules)
from asynckv.integrations.vllm.early import watch
watch()
large = "vllm.v1.executor", "asynckv.engine", "asynckv.edges", "nixl", "zmq"
print([x for x in sorted(set(sys.modules) - before) if x.startswith(large)])
vllm.config.VllmConfig()
"""


def test_the_plug_in_imports_nothing_large() -> None:
    done = subprocess.run([sys.executable, "-c", PLUG_IN], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
