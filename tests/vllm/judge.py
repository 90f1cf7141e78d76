"""The caches of a model as vLLM itself plans them: its own model classes, built without weights on the `meta` device.

A model is built whole, by the class that vLLM's registry names, and each of its layers is asked for its specification
(`get_kv_cache_spec`). No specification is made here. `Verdict.how` names the class and its layers' backends.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from tests.vllm.versions import planned

MAX_LEN = 512
_DSA = ("vllm.models.deepseek_v32.nvidia.model", "DeepseekV32ForCausalLM")
_FOR_CUDA = {
    "DeepseekV32ForCausalLM": _DSA,
    "GlmMoeDsaForCausalLM": _DSA,
    "KimiLinearForCausalLM": ("vllm.models.kimi_k3.nvidia.model", "KimiLinearForCausalLM"),
}
"""Classes for CUDA, where vLLM would choose another one on a CPU, or none that can be built."""

ABSENT = "torchvision"
"""A package of images that the tests' environment lacks; models of text import it only because they see images too."""


@dataclass
class Verdict:
    """The specification of each layer by name, and the names of the layers that share block ids."""

    specs: dict[str, KVCacheSpec]
    groups: list[list[str]]
    how: str
    written: dict[str, Any]
    """The configuration as transformers, or vLLM's own class of it, writes it."""


class _Empty(types.ModuleType):
    """A package in which any name can be found, for imports alone."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__getattr__": lambda value, _: value})()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_absent = name.partition(".")[0] == ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Idle:
    """A CUDA stream, or an event, of a model that computes nothing."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        pass


def judge(config: Mapping[str, Any], folder: Path, tp: int = 1) -> Verdict:
    """Build the model of a `config.json` as the first rank of `tp`, and ask its layers."""
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch, _imports():
        (name,) = config["architectures"]
        kind = _class_of(name)
        _be_an_accelerator(patch)
        # Otherwise vLLM looks at each class in a process of its own, which takes ten seconds.
        patch.setitem(ModelRegistry.models, name, ModelRegistry.models[name])
        ModelRegistry.register_model(name, kind)
        made = make_config(folder, tp)
        with _first_rank(made, folder), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            initialize_model(made)
            specs = get_kv_cache_spec(made)
        layers = [made.compilation_config.static_forward_context[layer] for layer in specs]
        backends = sorted({layer.get_attn_backend().get_name() for layer in layers})
        # vLLM gives several models one class of transformers, which then names the last of them.
        written = made.model_config.hf_config.to_dict() | {"model_type": config["model_type"]}
    groups = [list(group.layer_names) for group in planned(made, [specs], 1 << 40)[0].kv_cache_groups]
    how = f"{kind.__module__.removeprefix('vllm.')}.{kind.__name__}: {', '.join(backends)}"
    return Verdict(specs, groups, how, written)


def make_config(folder: Path, tp: int = 1) -> Any:
    """vLLM's configuration of the model in a folder, as its command line makes it."""
    made = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_LEN,
        block_size=16,
        num_gpu_blocks_override=1000,
        tensor_parallel_size=tp,
        distributed_executor_backend="mp",
        mamba_block_size=MAX_LEN,
    ).create_engine_config()
    made.cache_config.kv_cache_layout = "LBHNC"
    return made


def _class_of(name: str) -> Any:
    module, kind = _FOR_CUDA.get(name, ("", ""))
    return getattr(importlib.import_module(module), kind) if module else ModelRegistry.models[name].load_model_cls()


@contextlib.contextmanager
def _imports() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.append(finder)  # the last, so that an installed package is preferred
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Empty)]:
            del sys.modules[name]


def _be_an_accelerator(patch: pytest.MonkeyPatch) -> None:
    """Keep the CPU's own choices away, and make what models ask of a GPU before they compute anything."""
    patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # would make all states float32
    patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    backend_of_cpu = current_platform.get_attn_backend_cls

    def backend(selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if attn_selector_config.use_sparse:  # CPUs have none
            return str(AttentionBackendEnum.FLASHMLA_SPARSE.get_path())
        return str(backend_of_cpu(selected_backend, attn_selector_config, num_heads))

    patch.setattr(current_platform, "get_attn_backend_cls", backend)
    patch.setattr(workspace, "_manager", None)
    workspace.init_workspace_manager(torch.device("meta"))
    patch.setattr(torch.accelerator, "empty_cache", lambda: None)
    for name in ("Stream", "Event"):
        patch.setattr(torch.cuda, name, _Idle)
    patch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")  # a kernel of a package that is not here


@contextlib.contextmanager
def _first_rank(config: Any, folder: Path) -> Iterator[None]:
    """Make the process the first rank. There need not be others, because models talk to them only when they compute."""
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder / 'rendezvous'}", 0, "gloo")
        try:
            parallel_state.initialize_model_parallel()
            parallel_state.get_tp_group().world_size = config.parallel_config.tensor_parallel_size
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
