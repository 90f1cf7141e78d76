"""Layouts of whole models hold together, for every preset, size and order."""

from __future__ import annotations

from typing import Any

import pytest

from asynckv.errors import ConfigError, LayoutError
from asynckv.geometry.check import check_layout
from asynckv.geometry.layout import ONE_PER_REQUEST
from asynckv.geometry.match import assign, compare, remote_ranks
from asynckv.tools.plan.layouts import CONV_ORDERS, ORDERS, model_groups, model_layout, with_addresses
from asynckv.tools.plan.models import PRESETS, Heads, Model, preset


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_laid_out_and_read_between_unequal_engines(name: str, order: str) -> None:
    model = PRESETS[name].resized(layers=5)
    here = [
        model_layout(
            model, tp_rank=r, tp_size=2, block_size=48, ratio=3, num_blocks=4, order=order, conv_order=CONV_ORDERS[0]
        )
        for r in range(2)
    ]
    there = [
        model_layout(model, tp_rank=r, tp_size=4, pp_stage=s, pp_size=2, num_blocks=7, conv_order=CONV_ORDERS[1])
        for s in range(2)
        for r in range(4)
    ]
    for layout in (*here, *there):
        check_layout(with_addresses(layout, [i << 30 for i in range(1, len(layout.memories) + 1)]))
    for d, layout in enumerate(here):
        answered = [t for t in there if t.tp_rank in remote_ranks(d, 2, 4)]
        assert all(compare(layout, t) == () for t in answered)
        shares = assign(layout, answered)
        assert {s.local_view.layer for row in shares for s in row} == {f"layers.{i}" for i in range(5)}


def test_groups_are_layers_of_one_kind() -> None:
    groups = model_groups(preset("gpt-oss-20b"))
    assert [(layer.window, len(numbers)) for layer, numbers in groups if isinstance(layer, Heads)] == [
        (128, 12),
        (0, 12),
    ]
    layout = model_layout(preset("qwen3-next-80b-a3b"), num_blocks=[3, 5])
    assert [(g.kind, g.block_size, g.num_blocks) for g in layout.groups] == [
        ("state", ONE_PER_REQUEST, 3),
        ("tokens", 16, 5),
    ]


def test_stages_share_out_all_layers() -> None:
    stages = [model_layout(Model("m", (Heads(8, 16),) * 5), pp_stage=s, pp_size=3) for s in range(3)]
    assert [list(dict.fromkeys(x.layer for x in stage.views)) for stage in stages] == [
        ["layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "layers.4"],
    ]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"order": "dhn"}, ConfigError, "order 'dhn' is unknown; use one of nhd"),
        ({"conv_order": "x"}, ConfigError, "conv_order 'x'"),
        ({"block_size": 16, "ratio": 3}, ConfigError, "block_size 16 is not a positive multiple of the ratio 3"),
        ({"pp_size": 99}, ConfigError, "pp_size 99 does not exist for 2 layers"),
        ({"num_blocks": [1, 2]}, ConfigError, "num_blocks"),
        ({"tp_size": 3}, LayoutError, "8 entries cannot be cut evenly over tp_size 3"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model_layout(Model("m", (Heads(8, 16),) * 2), **changes)
