"""Layouts as files: what was written is read back, and what was mistyped is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from asynckv.errors import ConfigError
from asynckv.geometry.layout import Layout
from asynckv.tools.plan.layout_file import Role, dump_layouts, load_layouts
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


@pytest.mark.parametrize("role", [None, "prefill", "decode"])
def test_a_file_says_its_role_and_older_ones_have_none(role: Role | None, tmp_path: Path) -> None:
    path, layouts = tmp_path / "ranks.json", ranks("llama-3.1-8b")
    path.write_text(dump_layouts(layouts, role))
    assert json.loads(path.read_text()).get("role") == role
    for place in get_args(Role):
        if role in (None, place):
            assert load_layouts(path, place) == load_layouts(path) == layouts
        else:
            with pytest.raises(ConfigError, match=f"ranks of a {role} engine, in the place of the {place} engine"):
                load_layouts(path, place)


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
        ((), {"rank": []}, "unknown field `rank`"),
        ((), {"role": "lender"}, r"Invalid enum value 'lender' - at `\$.role`"),
        ((), {"ranks": []}, r"Expected `array` of length >= 1 - at `\$.ranks`"),
        ((), {"ranks": [3]}, r"Expected `object`, got `int` - at `\$.ranks\[0\]`"),
        (("ranks", 0), {"tp_rnak": 1}, r"unknown field `tp_rnak` - at `\$.ranks\[0\]`"),
        (("ranks", 1), {"tp_rank": 7}, r"ranks\[1\]: tp_rank 7 is outside its group of tp_size 2"),
        (("ranks", 0), {"model": "\ud800"}, "JSON is malformed"),
        (("ranks", 1), {"tp_rank": 0}, "a file holds different ranks of one engine"),
        (("ranks", 1), {"tp_size": 4}, "a file holds ranks of one engine"),
        (("ranks", 0), {"tp_rank": "x"}, r"Expected `int`, got `str` - at `\$.ranks\[0\].tp_rank`"),
        (("ranks", 0), {"views": ...}, r"missing required field `views` - at `\$.ranks\[0\]`"),
        (("ranks", 0), {"views": {}}, r"Expected `array`, got `object` - at `\$.ranks\[0\].views`"),
        (("ranks", 0), {"groups": []}, r"Expected `array` of length >= 1 - at `\$.ranks\[0\].groups`"),
        (VIEW, {"stride": -8}, r"Expected `int` >= 1 - at `\$.ranks\[0\].views\[0\].stride`"),
        (VIEW, {"memory": 99}, r"layer 'layers.0': memory 99 is not among the 4 memories"),
        ((*VIEW, "parts", 0), {"axes": "head"}, r"unknown field `axes` - at `\$.ranks\[0\].views\[0\].parts\[0\]`"),
        ((*VIEW, "parts", 0), {"held": [0, 9]}, r"holds \[0, 9\) of 8 along 'head'"),
        ((*VIEW, "parts", 0, "dims", 0), {"size": 1 << 40}, r"dims\[0\].size`"),
        (
            ("ranks", 0, "groups", 0),
            {"kind": "token"},
            r"Invalid enum value 'token' - at `\$.ranks\[0\].groups\[0\].kind`",
        ),
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
        ("a.json", "{", "truncated"),
        ("a.json", "[]", "Expected `object`, got `array`"),
        ("a.json", "[" * 100_000, "Expected `object`"),
        ("a.json", "\x00", "malformed"),
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
