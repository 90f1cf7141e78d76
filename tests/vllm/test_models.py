"""Tests of models' descriptions: `asynckv layout` says of a `config.json` what vLLM's own layers keep.

`judge` builds vLLM's model, and its layers make the specifications. Heads, bytes, windows and the kinds of layers that
may share block ids are compared. vLLM further splits layers into groups of equal size, which depends on the memory and
not on the model, so numbers of groups are not compared.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.models import ModelRegistry
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MLAAttentionSpec

from asynckv.geometry.layout import Group, Layout, View
from asynckv.geometry.match import assign, remote_ranks
from asynckv.integrations.vllm.memory import ModelFacts, register
from asynckv.tools.plan.cli import layout as write_layouts
from asynckv.tools.plan.layout_file import load_layouts
from asynckv.tools.plan.layouts import model_bytes
from asynckv.tools.plan.models import Heads, Model, State, read_hf_config
from tests.vllm.judge import Verdict, judge, make_config
from tests.vllm.planned import plan

FAMILIES: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("families.json").read_text())
"""Small versions of published models: a `config.json` by name, with all fields that say what layers keep.

The fields and the kinds of their values are those of the published files. The sizes of one model differ from each
other, so that none is mistaken for another. MiniMax-M3 has no experts, because vLLM has none of them for CPUs, and is
read by the class for text.
"""

BLOCK = 16
NOT_SERVED = ("Bamba",)
"""vLLM had a class of its own for these once. It now knows only their heads."""


CHANGES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("Step-3.5", {"attention_other_setting": {"num_attention_heads": 32}}),
    ("Step-3.5", {"attention_other_setting": None}),
    ("MiMo-V2-Flash", {"swa_num_key_value_heads": 2, "swa_head_dim": 128, "swa_v_head_dim": 64}),
    ("MiMo-V2-Flash", {"sliding_window": None, "sliding_window_size": 64}),
    ("GLM-5, shared top-k", {"index_topk_freq": None, "index_topk_pattern": "FSSFSF"}),
    ("GLM-5, shared top-k", {"index_topk_freq": 3, "index_skip_topk_offset": 1}),
    ("DeepSeek V3.2", {"index_head_dim": 64}),
    ("Kimi Linear", {"linear_attn_config": {"full_attn_layers": [2, 4], "kda_layers": [1, 3]}}),
    ("MiniMax-M3", {"sparse_attention_config": {"sparse_attention_freq": [1, 0, 0, 1]}}),
    ("Llama 4", {"layer_types": None}),
    ("Llama 4", {"layer_types": None, "no_rope_layers": None}),
    ("Llama 4", {"layer_types": ["chunked_attention", "full_attention"] * 2}),
    ("Llama 4", {"attention_chunk_size": 128}),
    ("Gemma 4, shared layers", {"num_global_key_value_heads": None}),
    ("Gemma 4, shared layers", {"attention_k_eq_v": False}),
    ("Gemma 4", {"layer_types": [*["sliding_attention"] * 8, "sliding_attention"]}),
    ("Qwen3-Next", {"full_attention_interval": 2}),
    ("Qwen3.5", {"mamba_ssm_dtype": None}),
    ("Nemotron-H", {"mamba_ssm_cache_dtype": "bfloat16"}),
    ("Nemotron-H", {"hybrid_override_pattern": "M*M*-"}),
    ("Falcon-H1", {"mamba_d_head": 16, "mamba_d_ssm": 128}),
    ("Granite 4", {"mamba_n_groups": 2, "mamba_d_head": "auto"}),
    ("Granite 4", {"layer_types": None}),
    ("GPT-OSS", {"layer_types": None}),
    ("Qwen3", {"use_sliding_window": False, "sliding_window": 64}),
    ("Llama", {"head_dim": None, "sliding_window": 64}),
    ("ChatGLM", {"multi_query_attention": False}),
    ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
)
"""Fields of a family that have other values; None leaves the field out, and an object changes fields of an object."""


def changed(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    if "text_config" in fields:
        return {**fields, "text_config": changed(fields["text_config"], changes)}
    inner = {k: {**fields[k], **v} if isinstance(v, dict) else v for k, v in changes.items()}
    return {k: v for k, v in {**fields, **inner}.items() if k not in changes or v is not None}


@dataclass(frozen=True, order=True)
class Kept:
    """An array of one layer.

    Attributes:
        kind: `keys and values`, `one vector` or `state`.
        window: Tokens that are kept at most, or 0 for all of them.
        heads: KV heads, or entries of a recurrent state's first dim.
        sizes: Bytes of a key and a value of one head; of a vector; of a convolution's and a recurrent state.
        shape: The columns and channels of a convolution's state, and the dims of the recurrent one.
    """

    kind: str
    window: int
    heads: int
    sizes: tuple[int, ...]
    shape: tuple[int, ...] = ()


def kept_by_vllm(spec: KVCacheSpec) -> Kept:
    given: Any = spec
    if isinstance(spec, MambaSpec):
        sizes = tuple(math.prod(s) * get_dtype_size(d) for s, d in zip(spec.shapes, spec.dtypes, strict=True))
        conv, state = spec.shapes
        return Kept("state", 0, state[0], sizes, (*sorted(conv), *state))
    window = getattr(given, "sliding_window", None) or getattr(given, "attention_chunk_size", None) or 0
    itemsize = get_dtype_size(given.dtype)
    sizes = tuple(x * itemsize for x in (given.head_size, given.head_size_v))
    assert sum(sizes) * given.num_kv_heads == given.num_heads * given.state_content_size_bytes  # no other packing
    if isinstance(spec, MLAAttentionSpec):
        return Kept("one vector", window, given.num_kv_heads, sizes[:1])
    return Kept("keys and values", window, given.num_kv_heads, sizes)


def kept_by_layout(view: View, group: Group) -> Kept:
    sizes = [math.prod(dim.size for dim in part.dims) * part.itemsize for part in view.parts]
    dims = [{dim.name: dim.size for dim in part.dims} for part in view.parts]
    if group.kind == "state":
        *conv, state = dims
        channels = [math.prod(size for name, size in each.items() if name != "column") for each in conv]
        shape = (*sorted((conv[0]["column"], sum(channels))), *state.values())
        return Kept("state", 0, next(iter(state.values())), (sum(sizes[:-1]), sizes[-1]), shape)
    heads = {each.get("head", 1) for each in dims}
    assert len(heads) == 1
    assert all(each["token"] == BLOCK for each in dims)
    each = tuple(size // BLOCK // max(heads) for size in sizes)
    if view.parts[0].name == "k":
        return Kept("keys and values", group.window, max(heads), each)
    return Kept("one vector", group.window, max(heads), (sum(each),))


def described(layout: Layout) -> Counter[Kept]:
    return Counter(kept_by_layout(view, layout.groups[view.group]) for view in layout.views)


def shared_by_vllm(verdict: Verdict) -> Counter[tuple[bool, int]]:
    """The number of layers of each kind, in which vLLM gives layers the same block ids: (is a state, window)."""
    out: Counter[tuple[bool, int]] = Counter()
    for names in verdict.groups:
        kept = [kept_by_vllm(verdict.specs[name]) for name in names]
        ((is_state, window),) = {(each.kind == "state", each.window) for each in kept}
        out[is_state, window] += len(names)
    return out


def shared_by_layout(layout: Layout) -> Counter[tuple[bool, int]]:
    groups = [layout.groups[view.group] for view in layout.views]
    return Counter((group.kind == "state", group.window) for group in groups)


class Table:
    """How each model was judged, and how many bytes it keeps."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = [("model", "caches", "per token", "states", "judged by vLLM's")]

    def add(self, name: str, model: Model, caches: int | str, how: str) -> None:
        self.rows.append((name, str(caches), str(model_bytes(model, "tokens")), str(model_bytes(model, "state")), how))

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in self.rows)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Rows that are printed after the last test, also if output is captured."""
    table = Table()
    yield table
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{table}")


def compare(verdict: Verdict, folder: Path, tp: int = 1) -> Model:
    """Compare what `asynckv layout` writes about the `config.json` of a folder."""
    write_layouts(hf_config=str(folder), block_size=BLOCK, tp=tp, output=str(folder / "layouts.json"))
    layout = load_layouts(folder / "layouts.json")[0]
    assert described(layout) == Counter(map(kept_by_vllm, verdict.specs.values()))
    assert shared_by_layout(layout) == shared_by_vllm(verdict)
    return read_hf_config(folder)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_SERVED])
def test_a_layout_has_the_heads_sizes_groups_and_bytes_of_vllm(name: str, table: Table, tmp_path: Path) -> None:
    verdict = judge(FAMILIES[name], tmp_path)
    model = compare(verdict, tmp_path)
    kept = [(spec, spec.state_content_size_bytes * spec.num_heads) for spec in verdict.specs.values()]
    assert model_bytes(model, "tokens") == sum(size for spec, size in kept if not isinstance(spec, MambaSpec))
    assert model_bytes(model, "state") == sum(size for spec, size in kept if isinstance(spec, MambaSpec))
    table.add(name, model, len(verdict.specs), verdict.how)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_SERVED])
def test_a_rank_has_the_share_that_it_has_in_vllm(name: str, tmp_path: Path) -> None:
    compare(judge(FAMILIES[name], tmp_path, tp=4), tmp_path, tp=4)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_SERVED])
def test_a_configuration_that_transformers_wrote_has_the_same_layout(name: str, tmp_path: Path) -> None:
    verdict = judge(FAMILIES[name], tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(verdict.written))
    compare(verdict, tmp_path)


@pytest.mark.parametrize(("name", "changes"), CHANGES, ids=str)
def test_other_values_change_both_alike(name: str, changes: Mapping[str, Any], tmp_path: Path) -> None:
    compare(judge(changed(FAMILIES[name], changes), tmp_path), tmp_path)


@pytest.mark.parametrize("is_written", [False, True], ids=["own-file", "by-transformers"])
@pytest.mark.parametrize("name", ["Gemma 4", "MiMo-V2-Flash", "Step-3.5"])
def test_the_connector_and_a_plan_read_the_same_ranks(name: str, is_written: bool, tmp_path: Path) -> None:
    engines = {}
    for tp in (2, 4):
        folder = tmp_path / str(tp)
        folder.mkdir()
        verdict = judge(FAMILIES[name], folder, tp=tp)
        if is_written:
            (folder / "config.json").write_text(json.dumps(verdict.written))
        write_layouts(hf_config=str(folder), block_size=BLOCK, tp=tp, output=str(folder / "layouts.json"))
        config = make_config(folder, tp)
        facts = dataclasses.replace(ModelFacts.of(config), name=name)
        ranks = plan(config, [verdict.specs] * tp)
        registered = [register(rank.config, rank.tensors, rank.place, facts).layout for rank in ranks]
        engines[tp] = load_layouts(folder / "layouts.json"), registered
    for one, other in ((2, 4), (4, 2)):
        for rank in range(one):
            planned, connected = (
                assign(here[rank], [there[i] for i in remote_ranks(rank, one, other)])
                for here, there in zip(engines[one], engines[other], strict=True)
            )
            assert [bool(shares) for shares in planned] == [bool(shares) for shares in connected]


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_model_without_a_class_in_vllm_has_the_heads_that_vllm_reads(name: str, table: Table, tmp_path: Path) -> None:
    config = FAMILIES[name]
    assert not set(config["architectures"]) & set(ModelRegistry.models)
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = make_config(tmp_path).model_config
    model = read_hf_config(tmp_path)
    heads = [(x.num_heads, x.head_dim) for x in model.layers if isinstance(x, Heads)]
    assert set(heads) == {(read.get_total_num_kv_heads(), read.get_head_size())}
    assert len(model.layers) == read.hf_config.num_hidden_layers
    assert sum(isinstance(x, State) for x in model.layers) == len(model.layers) - len(heads)
    table.add(name, model, "-", "configuration alone: heads and their size (no class since 0.23)")
