"""Layouts as files: what was written is read back, and what was mistyped is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asynckv.errors import ConfigError
from asynckv.geometry.layout import Layout
from asynckv.tools.plan.layout_file import dump_layouts, load_layouts
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import PRESETS


def ranks(name: str, **sizes: Any) -> list[Layout]:
    model = PRESETS[name].resized(layers=4)
    return [model_layout(model, tp_rank=r, tp_size=2, num_blocks=8, **sizes) for r in range(2)]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "nemotron-h-8b", "qwen3-next-80b-a3b"])
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    layouts = ranks(name, ratio=2, order="cross-hnd")
    path.write_text(dump_layouts(layouts))
    assert load_layouts(path) == layouts


TOML = """
schema = "asynckv.layout/1"

[[ranks]]
memories = [{base = 4096, length = 4096}]
groups = [{name = "attention", block_size = 4, num_blocks = 8}]

[[ranks.views]]
memory = 0
group = 0
layer = "layers.0"
offset = 0
stride = 64

[[ranks.views.parts]]
name = "kv"
dtype = "float16"
itemsize = 2
offset = 0
dims = [{name = "token", size = 4, stride = 16}, {name = "dim", size = 8, stride = 2}]
"""


def test_toml_will_do_as_well(tmp_path: Path) -> None:
    path = tmp_path / "rank.toml"
    path.write_text(TOML)
    [layout] = load_layouts(path)
    assert layout.views[0].parts[0].dims[0].stride == 16
    again = tmp_path / "rank.json"
    again.write_text(dump_layouts([layout]))
    assert load_layouts(again) == [layout]


def broken(path: Path, *keys: Any, **change: Any) -> Path:
    """A good file with something changed below `keys`; `...` takes a field away."""
    whole = json.loads(dump_layouts(ranks("llama-3.1-8b")))
    at = whole
    for key in keys:
        at = at[key]
    for name, value in change.items():
        if value is ...:
            del at[name]
        else:
            at[name] = value
    path.write_text(json.dumps(whole))
    return path


VIEW = ("ranks", 0, "views", 0)


@pytest.mark.parametrize(
    ("keys", "change", "message"),
    [
        ((), {"schema": "asynckv.layout/2"}, "schema is 'asynckv.layout/2', but this version reads"),
        ((), {"rank": []}, "rank is unknown; did you mean 'ranks'?"),
        ((), {"ranks": []}, "ranks is not a list of one or more"),
        ((), {"ranks": [3]}, r"ranks\[0\] is not a table of fields"),
        (("ranks", 0), {"tp_rnak": 1}, r"ranks\[0\].tp_rnak is unknown; did you mean 'tp_rank'\?"),
        (("ranks", 1), {"tp_rank": 7}, r"ranks\[1\]: tp_rank 7 is outside its group of tp_size 2"),
        (("ranks", 0), {"model": "\ud800"}, "model is .* no text that can be encoded"),
        (("ranks", 1), {"tp_rank": 0}, "a file holds different ranks of one engine"),
        (("ranks", 1), {"tp_size": 4}, "a file holds ranks of one engine"),
        (("ranks", 0), {"tp_rank": "x"}, r"ranks\[0\].tp_rank is 'x': Expected `int`, got `str`"),
        (("ranks", 0), {"views": ...}, r"ranks\[0\].views is missing"),
        (("ranks", 0), {"views": {}}, r"ranks\[0\].views is not a list"),
        (("ranks", 0), {"groups": []}, r"ranks\[0\].groups is empty"),
        (VIEW, {"stride": -8}, r"views\[0\].stride is -8: Expected `int` >= 1"),
        (VIEW, {"memory": 99}, r"layer 'layers.0': memory 99 is not among the 4 memories"),
        ((*VIEW, "parts", 0), {"axes": "head"}, r"parts\[0\].axes is unknown; did you mean 'axis'\?"),
        ((*VIEW, "parts", 0), {"held": [0, 9]}, r"holds \[0, 9\) of 8 along 'head'"),
        ((*VIEW, "parts", 0, "dims", 0), {"size": 1 << 40}, r"dims\[0\].size is"),
        (("ranks", 0, "groups", 0), {"kind": "token"}, r"groups\[0\].kind is 'token': use one of 'tokens', 'state'"),
        (("ranks", 0, "groups", 0), {"num_blocks": 9999}, "but memory 0 has"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_field(
    keys: tuple[Any, ...], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = broken(tmp_path / "ranks.json", *keys, **change)
    with pytest.raises(ConfigError, match=message) as caught:
        load_layouts(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "[]", "holds no table of fields"),
        ("a.json", "[" * 100_000, "is not JSON"),
        ("a.toml", "= 3", "is not TOML"),
        ("a.toml", "\x00", "is not TOML"),
    ],
)
def test_what_does_not_parse_is_one_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_layouts(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_layouts(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_layouts(tmp_path)
