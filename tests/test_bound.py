"""The bound over RDMA names what limits a rank: the figures are computed by hand from a model's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from asynckv.tools.plan import bound
from asynckv.tools.plan.explain import explain
from asynckv.tools.plan.models import PRESETS
from tests.test_explain import ranks, text

GB = 1e9
MIB = 1 << 20
POST, MOST_DESCRIPTORS = 4 * MIB, 512


def bounds(here: Sequence[Any], there: Sequence[Any], tokens: int = 1024, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the bounds of the first rank of each side."""
    report = explain(here, there, tokens, 0, **options)
    return {row["blocks"] or "lender": row for row in report["bounds"] if row["rank"].endswith("tp0")}


def test_the_limit_moves_from_python_to_the_wire_as_requests_grow() -> None:
    """Without posts, both are equal where the wire takes as long as Python, with 50,000 bytes per microsecond."""
    sizes = [MIB << i for i in range(8)]
    for posts_of in (lambda _: 0, lambda n: -(-n // POST)):
        found = [bound.reader(n, 1, posts_of(n), 1, 50 * GB) for n in sizes]
        limits = [x.limit for x in found]
        assert limits == sorted(limits)
        assert (limits[0], limits[-1]) == ("python", "wire")
        assert [x.share_of_wire for x in found] == sorted(x.share_of_wire for x in found)
    meet = round(bound.PYTHON_REQUEST_S * 50 * GB)
    assert bound.reader(meet - 50_000, 1, 0, 1, 50 * GB).limit == "python"
    assert bound.reader(meet + 50_000, 1, 0, 1, 50 * GB).limit == "wire"


@pytest.mark.parametrize(("piece", "share"), [(256, 0.01024), (4096, 0.16384), (16384, 0.65536), (32768, 1.0)])
def test_small_pieces_leave_a_share_of_the_device_whatever_python_does(piece: int, share: float) -> None:
    number = 1 << 16
    found = bound.reader(number * piece, number, 0, 1, 50 * GB)
    assert found.share_of_wire == pytest.approx(share)
    assert found.limit == ("wire" if share == 1 else "descriptors")


def test_the_slowest_part_sets_the_rate() -> None:
    found = bound.reader(50_000_000, 1000, 12, 3, 50 * GB)
    assert [found.wire_s, found.descriptors_s] == pytest.approx([1e-3, 0.5e-3])
    assert found.python_s == bound.PYTHON_REQUEST_S + 2 * bound.PYTHON_SOURCE_S + 12 * bound.PYTHON_POST_S
    assert found.requests_per_s == pytest.approx(1 / max(found.wire_s, found.python_s))
    lender = bound.lender(50_000_000, 3, 25 * GB)
    assert lender.limit == "wire"
    assert lender.requests_per_s == pytest.approx(500)
    assert bound.lender(1, 3, 25 * GB).limit == "python"


def test_equal_llamas_with_tokens_first() -> None:
    """80 layers of 2 x 16 tokens x 1 head x 128 x 2 bytes: pieces of 4 KiB, which only runs join."""
    whole = ranks(PRESETS["llama-3.1-70b"], 8)
    found = bounds(whole, whole)
    wanted = 1024 * 80 * 2 * 128 * 2
    for blocks, descriptors, posts, limit in (("scattered", 10_240, 20, "descriptors"), ("runs", 160, 10, "wire")):
        row = found[blocks]
        assert (row["bytes"], row["descriptors"], row["posts"], row["limit"]) == (wanted, descriptors, posts, limit)
    assert found["scattered"]["share_of_wire"] == pytest.approx(0.16384)
    assert found["scattered"]["requests_per_s"] == pytest.approx(195.3, abs=0.1)
    assert found["runs"]["requests_per_s"] == pytest.approx(1192, abs=1)
    assert found["lender"]["bytes"] == wanted
    assert bounds(whole, whole, nic_gbit=40.0)["scattered"]["limit"] == "wire"


@pytest.mark.parametrize(
    ("order", "descriptors", "posts"),
    [
        # Heads first, a piece is a block's two heads, which only lie apart in our block.
        ("hnd", {"scattered": 2048, "runs": 2048}, 4),
        # Tokens first, a piece is a token's two heads; staged, the runs of a block follow each other.
        ("nhd", {"scattered": 2048, "runs": 4 * 8}, 4),
    ],
)
def test_gqa_at_unequal_tp(order: str, descriptors: dict[str, int], posts: int) -> None:
    """Two heads of a prefill rank go to a rank with eight, in blocks of 16 tokens."""
    found = bounds(ranks("llama-3.1-8b", 1, order=order), ranks("llama-3.1-8b", 4, order=order))
    wanted = 1024 * 4 * 2 * 8 * 128 * 2
    for blocks, number in descriptors.items():
        row = found[blocks]
        assert (row["bytes"], row["descriptors"], row["posts"]) == (wanted, number, posts)
        assert row["python_s"] == pytest.approx(
            bound.PYTHON_REQUEST_S + 3 * bound.PYTHON_SOURCE_S + row["posts"] * bound.PYTHON_POST_S
        )
    assert found["lender"]["bytes"] == wanted // 4


def test_replicas_of_mla_are_read_whole_by_every_rank() -> None:
    one, eight = ranks("deepseek-v3", 1, block_size=64), ranks("deepseek-v3", 8, block_size=64)
    wanted = 1024 * 4 * 576 * 2
    spread, shared = bounds(eight, eight), bounds(eight, one)
    assert spread["scattered"]["bytes"] == shared["scattered"]["bytes"] == wanted
    assert (spread["scattered"]["descriptors"], spread["runs"]["descriptors"]) == (16 * 4, 4)
    # The one prefill rank sends its only copy eight times.
    assert (spread["lender"]["bytes"], shared["lender"]["bytes"]) == (wanted, 8 * wanted)
    assert shared["lender"]["python_s"] == pytest.approx(8 * bound.PYTHON_READER_S)


def test_a_hybrid_adds_its_groups() -> None:
    report = explain(ranks("nemotron-h-8b", 4), ranks("nemotron-h-8b", 2), 1000, 0)
    groups = report["ranks"][0]["reads"][0]["groups"]
    assert len(groups) == 2
    for row in report["bounds"][:2]:
        names = ("descriptors", "posts_scattered") if row["blocks"] == "scattered" else ("descriptors_in_runs", "posts")
        assert [row[x] for x in ("bytes", "descriptors", "posts")] == [
            sum(g[name] for g in groups) for name in ("bytes_read", *names)
        ]


def test_the_table_has_one_line_for_ranks_alike() -> None:
    shown = text(explain(ranks("llama-3.1-8b", 2), ranks("llama-3.1-8b", 4, order="hnd"), 1024, 0, nic_gbit=200.0))
    assert "every rank has a device of 200 Gbit/s" in shown
    assert shown.count("decode tp0-1 ") == 2
    assert "prefill tp0-3 " in shown


def test_what_reads_nothing_has_no_bound() -> None:
    hit = explain(ranks("llama-3.1-8b", 1), ranks("llama-3.1-8b", 2), 700, 700)
    assert hit["bounds"] == []
    assert "on paper" not in text(hit)
