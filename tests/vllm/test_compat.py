"""Another vLLM than the tested ones: it starts with a warning, goes on without what it lacks, or says what it lacks."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from asynckv.errors import ConfigError
from asynckv.integrations.vllm import compat
from asynckv.integrations.vllm.compat import (
    IDENTITY,
    RARE_SPECS,
    SPECS,
    Absent,
    Attention,
    identity,
    is_by_token,
    num_received,
    num_token_shards,
    quantisation,
)
from asynckv.integrations.vllm.memory import check_supported
from tests.vllm.without import ASKED_FOR


def test_a_version_that_lacks_every_name_with_a_stand_in_moves_the_same_bytes() -> None:
    command = [sys.executable, "-P", "-m", "tests.vllm.without"]
    done = subprocess.run(command, check=False, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[-3:-1] == ["read by a scheduler", "read by a worker"]
    warning = next(line for line in done.stderr.split("\n") if "AsyncKVConnector was tested with vLLM 0.33.0" in line)
    assert "this is 0.99.0" in warning
    assert all(name in warning for name in {*compat.STAND_INS} - ASKED_FOR)


@pytest.mark.parametrize("name", ["KVConnectorBase_V1", "KVConnectorTransferResults", *SPECS.split()])
def test_a_name_that_nothing_stands_in_for_is_an_error_that_names_it(name: str, monkeypatch: Any) -> None:
    module = importlib.import_module(compat._MODULES[name])
    monkeypatch.delattr(module, name)
    monkeypatch.delitem(vars(compat), name, raising=False)
    with pytest.raises(ImportError, match=f"has no {name} in {module.__name__}, .* tested with"):
        getattr(compat, name)


@pytest.mark.parametrize("name", IDENTITY)
def test_a_request_of_which_nothing_shows_whose_kv_it_is_is_refused_by_the_field(name: str) -> None:
    fields: dict[str, Any] = dict.fromkeys(IDENTITY)
    assert identity(SimpleNamespace(**fields)) == [None] * len(IDENTITY)
    del fields[name]
    with pytest.raises(ConfigError, match=f"have no {name}, so that nothing shows"):
        identity(SimpleNamespace(**fields))


def test_tokens_that_a_step_may_still_write_do_not_count_and_must_be_known() -> None:
    given = {"num_computed_tokens": 9, "num_tokens": 100}
    assert num_received(SimpleNamespace(**given, num_in_flight_tokens=2)) == 7
    with pytest.raises(ConfigError, match="have no num_in_flight_tokens, so that nothing shows"):
        num_received(SimpleNamespace(**given))


def test_a_cache_that_does_not_say_whether_it_is_quantised_is_refused() -> None:
    assert quantisation(SimpleNamespace(kv_quant_mode=KVQuantMode.NONE)) == ""
    assert quantisation(SimpleNamespace(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)) == "fp8_per_tensor"
    with pytest.raises(ConfigError, match="have no kv_quant_mode, so that nothing shows"):
        quantisation(SimpleNamespace())


def test_a_cache_that_does_not_say_whether_ranks_share_its_tokens_is_refused_to_several() -> None:
    assert num_token_shards(SimpleNamespace(), 1) == 1
    assert [num_token_shards(SimpleNamespace(dcp_sharded=each), 4) for each in (False, True)] == [1, 4]
    with pytest.raises(ConfigError, match="have no dcp_sharded, so that nothing shows"):
        num_token_shards(SimpleNamespace(), 2)


ALONE: dict[str, Any] = {
    "parallel_config": SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
    "kv_transfer_config": SimpleNamespace(kv_role="kv_both"),
}


class Moved(FullAttentionSpec):
    """A kind that this version has under another name."""


@pytest.mark.parametrize("kind", [*RARE_SPECS.split(), "Moved"])
def test_a_kind_of_cache_that_is_not_known_by_its_name_is_refused(kind: str, monkeypatch: Any) -> None:
    spec = object.__new__(globals().get(kind) or getattr(compat, kind))
    monkeypatch.setattr(compat, kind, Absent, raising=False)
    groups = [SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)]
    config = SimpleNamespace(**ALONE, model_config=None)
    with pytest.raises(ConfigError, match=f"layer 'layer' has a cache of kind {kind}, which .* does not know"):
        check_supported(config, SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("flash_attn.FlashAttentionBackend", True),
        ("triton_attn.TritonAttentionBackend", True),
        ("flex_attention.FlexAttentionBackend", True),
        ("mla.triton_mla.TritonMLABackend", True),
        ("mla.flashmla.FlashMLABackend", True),
        ("cpu_attn.CPUAttentionBackend", False),
        ("rocm_attn.RocmAttentionBackend", False),
        ("b12x.B12xPagedAttentionBackend", False),
        ("mla.flashmla_sparse.FlashMLASparseBackend", False),
    ],
)
def test_backends_that_find_a_token_by_its_stride_are_told_by_kind(path: str, expected: bool) -> None:
    module, _, name = path.rpartition(".")
    backend = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), name)

    class Layer(Attention):
        def get_attn_backend(self) -> Any:
            return backend

    layer, plain = object.__new__(Layer), SimpleNamespace(get_attn_backend=lambda: backend)
    assert is_by_token(layer, SimpleNamespace()) is expected
    assert not is_by_token(layer, SimpleNamespace(model_version="deepseek_v4"))
    assert not is_by_token(plain, SimpleNamespace())  # an index, say


def test_sleep_is_refused_where_vllm_does_not_tell_that_memory_goes(monkeypatch: Any) -> None:
    config = SimpleNamespace(**ALONE, model_config=SimpleNamespace(enable_sleep_mode=True))
    groups = SimpleNamespace(kv_cache_groups=[])
    monkeypatch.setattr(compat, "KVConnectorBase_V1", object)
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        check_supported(config, groups)
    config.model_config = None
    check_supported(config, groups)


def test_offloading_is_refused_where_vllm_lets_other_threads_in(monkeypatch: Any) -> None:
    from asynckv.integrations.vllm.offload import spec

    monkeypatch.setattr(spec.AsyncKVOffloadingSpec.__base__, "__init__", lambda self, config: None)
    monkeypatch.setattr(compat, "OffloadingManager", object)
    with pytest.raises(ConfigError, match=r"use vLLM 0\.33 or later"):
        spec.AsyncKVOffloadingSpec(SimpleNamespace())
