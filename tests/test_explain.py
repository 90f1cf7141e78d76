"""A transfer explained from two files says what an engine would do."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from asynckv.errors import ConfigError
from asynckv.geometry.check import check_layout
from asynckv.geometry.layout import Group, Layout, Memory, TokenShard, View, dense_part
from asynckv.geometry.match import predicted
from asynckv.tools.plan import bound
from asynckv.tools.plan.explain import explain, show
from asynckv.tools.plan.layouts import model_bytes, model_layout
from asynckv.tools.plan.models import PRESETS, Heads, Latent, Model
from tests.commands import Command


def ranks(model: str | Model, tp: int, pp: int = 1, **sizes: Any) -> list[Layout]:
    chosen = PRESETS[model].resized(layers=4) if isinstance(model, str) else model
    return [
        model_layout(chosen, tp_rank=r, tp_size=tp, pp_stage=s, pp_size=pp, **{"num_blocks": 256, **sizes})
        for s in range(pp)
        for r in range(tp)
    ]


def text(report: dict[str, Any]) -> str:
    stream = io.StringIO()
    show(report, Console(file=stream, width=200))
    return stream.getvalue()


def test_a_llama_from_four_ranks_to_two() -> None:
    report = explain(ranks("llama-3.1-8b", 2), ranks("llama-3.1-8b", 4, order="hnd"), 1024, 0)
    assert report["plannable"]
    reads = {r["rank"]: [x["remote"] for x in r["reads"]] for r in report["ranks"]}
    assert reads == {"tp0": ["tp0", "tp1"], "tp1": ["tp2", "tp3"]}
    assert report["owed"] == {"tp0": ["tp0"], "tp1": ["tp0"], "tp2": ["tp1"], "tp3": ["tp1"]}
    assert sum(r["bytes"] for r in report["ranks"]) == 1024 * 4 * 2 * 8 * 128 * 2
    shown = text(report)
    assert "k, v: head 0-1 of 8 (4 layers)" in shown
    assert "prefill tp3: decode tp1" in shown


def test_a_deepseek_reads_one_replica_and_releases_all() -> None:
    report = explain(ranks("deepseek-v3", 1), ranks("deepseek-v3", 8), 1000, 0)
    [rank] = report["ranks"]
    assert [r["remote"] for r in rank["reads"]] == ["tp0"]
    assert rank["releases"] == [f"tp{r}" for r in range(8)]
    # 63 blocks of one piece per layer, that merge where they lie in runs.
    assert (rank["reads"][0]["descriptors"], rank["reads"][0]["descriptors_in_runs"]) == (63 * 4, 4)
    assert "prefill tp5: decode tp0 (which reads nothing from it)" in text(report)


def test_tokens_from_eight_ranks_that_share_them_to_one() -> None:
    report = explain(ranks("deepseek-v3", 1), ranks("deepseek-v3", 8, dcp=8, block_size=128), 1001, 100)
    [rank] = report["ranks"]
    assert report["plannable"]
    assert [r["remote"] for r in rank["reads"]] == rank["releases"] == [f"tp{r}" for r in range(8)]
    # Tokens 100 to 1,000: rank 4 has the first one, and one token more than ranks 1 to 3 have.
    held = [len([t for t in range(100, 1001) if t % 8 == r]) for r in range(8)]
    assert [r["bytes"] for r in rank["reads"]] == [4 * 576 * 2 * number for number in held]
    assert sum(r["bytes"] for r in rank["reads"]) == rank["bytes"] == 4 * 576 * 2 * 901
    [group] = rank["reads"][3]["groups"]
    assert group["token_shards"] == {"remote": {"size": 8, "rank": 3, "interleave": 1}, "local": None}
    assert report["remote"]["groups"][0]["token_shards"] == {"size": 8, "interleave": 1}
    assert report["local"]["groups"][0]["token_shards"] is None
    shown = text(report)
    assert "group 0: latents: 4 layers, 128 tokens per block, shared by 8 ranks by 1\n" in shown
    assert "latent: tokens 3 of 8 by 1 (4 layers)" in shown


def test_tokens_between_ranks_that_share_them_differently() -> None:
    here, there = (ranks("deepseek-v3", n, dcp=n, cp_interleave=i, block_size=64) for n, i in ((2, 4), (4, 1)))
    report = explain(here, there, 64, 0)
    reads = {r["rank"]: {x["remote"]: x["bytes"] for x in r["reads"]} for r in report["ranks"]}
    assert reads == {f"tp{d}": {f"tp{p}": 8 * 4 * 576 * 2 for p in range(4)} for d in range(2)}
    assert report["owed"] == {f"tp{p}": ["tp0", "tp1"] for p in range(4)}, "each may need every one of them"
    assert "latent: tokens 3 of 4 by 1, here tokens 1 of 2 by 4 (4 layers)" in text(report)
    alike = explain(there, there, 64, 0)
    assert [[x["remote"] for x in r["reads"]] for r in alike["ranks"]] == [["tp0"], ["tp1"], ["tp2"], ["tp3"]]
    shown = text(alike)
    assert "latent: tokens 3 of 4 by 1, here tokens 3 of 4 by 1 (4 layers)" in shown
    assert "prefill tp1: decode tp0, tp2-3 (which read nothing from it), tp1\n" in shown


def test_a_plan_names_the_replicas_that_an_engine_reads() -> None:
    """Two heads on eight ranks: neighbours share tokens by two, so each head is there twice."""
    model = Model("m", (Heads(2, 64),))
    here, there = ranks(model, 2), ranks(model, 8, dcp=2)
    reads = [[x["remote"] for x in rank["reads"]] for rank in explain(here, there, 64, 0)["ranks"]]
    assert reads == [["tp0", "tp1"], ["tp6", "tp7"]]
    assert [predicted(x, range(4 * x.tp_rank, 4 * x.tp_rank + 4), 8, 2) for x in here] == [[0, 1], [6, 7]]
    unshared = explain(here, ranks(model, 8), 64, 0)["ranks"]
    assert [[x["remote"] for x in rank["reads"]] for rank in unshared] == [["tp0"], ["tp4"]]
    assert [predicted(x, range(4 * x.tp_rank, 4 * x.tp_rank + 4), 8) for x in here] == [[0], [4]]


def test_heads_that_ranks_share_by_token_are_said_with_both() -> None:
    there = ranks(Model("m", (Heads(2, 64),)), 4, dcp=2)
    report = explain(ranks(Model("m", (Heads(2, 64),)), 2), there, 100, 0)
    reads = {r["rank"]: [x["remote"] for x in r["reads"]] for r in report["ranks"]}
    assert reads == {"tp0": ["tp0", "tp1"], "tp1": ["tp2", "tp3"]}
    assert "k, v: head 1 of 2, tokens 0 of 2 by 1 (1 layer)" in text(report)


def test_ranks_that_share_tokens_and_hold_other_heads_are_a_problem() -> None:
    """A layout of an engine's own may say so; then no rank holds some tokens of a head."""
    whole = ranks(Model("m", (Heads(2, 64),)), 2)
    torn = [
        msgspec.structs.replace(x, schema=2, token_shards=(TokenShard(0, 2, x.tp_rank),), groups=(Group("g", 32, 256),))
        for x in whole
    ]
    report = explain(torn, whole, 100, 0)
    assert report["plannable"]
    assert "no decode rank with tokens 0 of 2 by 1 holds head [1, 2) of part 'k' in 'layers.0'" in report["problems"]
    report = explain(whole, torn, 100, 0)
    assert not report["plannable"]
    assert "tokens 1 of 2 by 1" in text(report)


def test_a_hybrid_from_one_rank_to_four_with_a_prefix() -> None:
    model = PRESETS["nemotron-h-8b"].resized(layers=4)
    report = explain(ranks(model, 4), ranks(model, 1, block_size=48), 1000, 500)
    rows = {(p["part"], tuple(p["range"])) for g in report["ranks"][3]["reads"][0]["groups"] for p in g["parts"]}
    assert {("conv_x", (96, 128)), ("conv_b", (6, 8)), ("state", (96, 128)), ("k", (6, 8))} <= rows
    kv = (1008 - 500) * 2 * 2 * 128 * 2
    assert report["ranks"][0]["bytes"] == kv + model_bytes(model, "state") // 4


def test_stages_and_a_full_hit() -> None:
    report = explain(ranks("gpt-oss-20b", 1, 2), ranks("gpt-oss-20b", 2, 1), 700, 0)
    assert [len(r["reads"]) for r in report["ranks"]] == [2, 2]
    assert report["owed"]["tp1"] == ["pp0/tp0", "pp1/tp0"]
    hit = explain(ranks("gpt-oss-20b", 1), ranks("gpt-oss-20b", 2), 700, 700)
    assert hit["plannable"]
    assert hit["ranks"][0]["bytes"] == 0
    assert "none" in text(hit)


def test_a_refusal_is_a_table_of_fields() -> None:
    here, there = ranks(Model("a", (Heads(8, 64),)), 1), ranks(Model("b", (Heads(8, 32),)), 2)
    report = explain(here, there, 100, 0)
    assert not report["plannable"]
    fields = {d["field"] for d in report["ranks"][0]["refused"]}
    assert "model" in fields
    assert any("dims" in f for f in fields)
    shown = text(report)
    assert "Refused at the handshake" in shown
    assert "dim=64" in shown
    assert shown.count("what to do: ") == 2, "of the model, and of the dims"


def test_a_rank_whose_source_is_missing_is_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"holds 2 of its engine's 4 ranks, but decode tp0 answers for .* \[\(0, 2\)"):
        explain(ranks("llama-3.1-8b", 1), ranks("llama-3.1-8b", 4)[:2], 100, 0)
    report = explain(ranks("llama-3.1-8b", 2)[:1], ranks("llama-3.1-8b", 4)[:2], 100, 0)
    assert report["plannable"]
    assert not report["whole_group"]
    # All decode ranks owe their release, in the file or not.
    shown = text(report)
    assert "tp 2; 1 of 2 ranks are in this file" in shown
    report = explain(ranks("llama-3.1-8b", 4)[1:2], ranks("llama-3.1-8b", 2), 100, 0)
    assert "prefill tp0: decode tp0 (not in this file), tp1\n" in text(report)


def test_a_gap_and_a_pool_too_small_are_refused() -> None:
    there = ranks("llama-3.1-8b", 2)
    there[1] = msgspec.structs.replace(there[0], tp_rank=1)
    report = explain(ranks("llama-3.1-8b", 1), there, 100, 0)
    assert "held ranges" in report["ranks"][0]["refused"][0]["field"]
    with pytest.raises(
        ConfigError, match=r"--tokens 100 .*decode tp0 declares 3 blocks of 16 tokens, but 7 are needed"
    ):
        explain(ranks("llama-3.1-8b", 1, num_blocks=3), ranks("llama-3.1-8b", 1), 100, 0)


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize(("tp", "remote_tp", "cached"), [(2, 3, 0), (3, 1, 77), (1, 2, 999)])
def test_every_family_can_be_planned(model: str, tp: int, remote_tp: int, cached: int) -> None:
    if not all(isinstance(layer, Latent) for layer in PRESETS[model].layers):
        # Three ranks share what is on all of them; heads are divided by powers of two.
        tp, remote_tp = {3: 4}.get(tp, tp), {3: 4}.get(remote_tp, remote_tp)
    here, there = ranks(model, tp, block_size=48), ranks(model, remote_tp, order="hnd")
    report = explain(here, there, 1000, cached)
    assert report["plannable"]


@pytest.mark.parametrize("nulls", [(0, 0), (0, -1), (-1, 0), (7, 3)])
def test_placeholders_are_never_given_to_a_request(nulls: tuple[int, int]) -> None:
    def vllm(layouts: list[Layout], null: int) -> list[Layout]:
        return [
            msgspec.structs.replace(
                x, groups=tuple(msgspec.structs.replace(g, null_block=null, num_blocks=64) for g in x.groups)
            )
            for x in layouts
        ]

    here, there = (vllm(ranks("bamba-9b", tp), null) for tp, null in zip((2, 1), nulls, strict=True))
    assert explain(here, there, 1000, 100)["plannable"]
    # 64 blocks with a placeholder among them hold one block less.
    if nulls[0] >= 0:
        with pytest.raises(ConfigError, match="64 blocks of 16 tokens, but 64 are needed"):
            explain(here, there, 1024, 0)


def shared_pages() -> list[Layout]:
    """Two groups in one memory, as vLLM's hybrid allocator places them."""
    parts = tuple(
        dense_part(name, "bfloat16", [("token", 16), ("head", 8), ("dim", 64)], offset=i * 16 * 8 * 64 * 2)
        for i, name in enumerate("kv")
    )
    page = 2 * 16 * 8 * 64 * 2
    groups = (Group("full", 16, 80), Group("window", 16, 80, window=128))
    views = (View(0, 0, "layers.0", 0, page, parts), View(0, 1, "layers.1", 0, page, parts))
    layout = Layout(model="gpt-oss", memories=(Memory(0, page * 80),), groups=groups, views=views)
    check_layout(layout)
    return [layout]


def test_groups_in_one_memory_share_its_blocks() -> None:
    assert explain(shared_pages(), shared_pages(), 1024, 0)["plannable"]
    with pytest.raises(ConfigError, match=r"'window' .* but 8 are needed beside the 75 of groups in the same memory"):
        explain(shared_pages(), shared_pages(), 1200, 0)


def test_names_from_a_stranger_cannot_steer_the_terminal() -> None:
    here = [msgspec.structs.replace(x, model="a\n\x1b[31m[red]") for x in ranks("llama-3.1-8b", 1)]
    shown = text(explain(here, here, 100, 0))
    assert r"a\n\x1b[31m[red], tp 1" in shown
    assert "\x1b" not in shown


def test_what_no_rank_holds_is_a_problem() -> None:
    here, there = ranks("llama-3.1-8b", 2), ranks("llama-3.1-8b", 4)
    assert explain(here, there, 100, 0)["problems"] == []
    # Two decode ranks that both declare the first half: each is served, and half of the heads lands nowhere.
    twice = [here[0], msgspec.structs.replace(here[0], tp_rank=1)]
    report = explain(
        twice, [*there[:2], *(msgspec.structs.replace(x, tp_rank=r) for r, x in enumerate(there[:2], 2))], 100, 0
    )
    assert report["plannable"]
    assert "no decode rank holds head [4, 8) of part 'k' in 'layers.0' and 3 more layers" in report["problems"]
    assert "problem: no decode rank holds" in text(report)
    fewer = explain(ranks(PRESETS["llama-3.1-8b"].resized(layers=3), 1, 2), ranks("llama-3.1-8b", 1, 2), 100, 0)
    assert any("only prefill has the layers layers.3" in p for p in fewer["problems"])


def layouts(path: Path, command: Command, *argv: str) -> str:
    assert command.run("layout", "--layers", "4", *argv, "-o", path) == (0, "", "")
    return str(path)


def test_the_command_line_from_model_to_plan(tmp_path: Path, command: Command) -> None:
    decode = layouts(tmp_path / "decode.json", command, "--tp", "2")
    prefill = layouts(tmp_path / "prefill.json", command, "--tp", "4", "--order", "hnd")
    status, out, err = command.run("plan", prefill, decode, "--json", "-")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert (report["plannable"], report["remote"]["tp_size"], report["local"]["tp_size"]) == (True, 4, 2)
    status, out, err = command.run("plan", prefill, decode)
    assert (status, err) == (0, "")
    assert "Releases: a prefill" in out
    other = layouts(tmp_path / "other.json", command, "--head-dim", "64")
    status, out, err = command.run("plan", other, decode)
    assert status == 1
    assert "Refused" in out


def test_layout_files_in_the_wrong_order_are_refused(tmp_path: Path, command: Command) -> None:
    prefill, decode = (layouts(tmp_path / role, command, "--role", role) for role in ("prefill", "decode"))
    old = layouts(tmp_path / "old", command)
    for first, second in ((prefill, decode), (old, decode), (prefill, old), (old, old)):
        assert command.run("plan", first, second)[0] == 0
    for first, second, wrong, role, other in (
        (decode, prefill, decode, "decode", "prefill"),
        (decode, old, decode, "decode", "prefill"),
        (old, prefill, prefill, "prefill", "decode"),
        (prefill, prefill, prefill, "prefill", "decode"),
    ):
        status, out, err = command.run("plan", first, second)
        assert (status, out) == (2, "")
        assert err == (
            f"asynckv: {wrong}: these are ranks of a {role} engine, in the place of the {other} engine; the order is "
            f"asynckv plan PREFILL DECODE\n"
        )


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize(("prefill", "decode"), [(8, 8), (8, 1), (1, 8), (8, 4)])
def test_a_plan_of_tp_8_is_read_at_80_columns(model: str, prefill: int, decode: int) -> None:
    report = explain(ranks(model, decode), ranks(model, prefill, order="hnd"), 1 << 12, 0)
    stream = io.StringIO()
    show(report, Console(file=stream, width=80))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = set(stream.getvalue().split())
    # No word and no number is broken: each stands whole somewhere.
    for read in report["ranks"][-1]["reads"]:
        for group in read["groups"]:
            assert {f"{group[x]:,}" for x in ("descriptors", "descriptors_in_runs", "posts")} <= words
    for row in report["bounds"]:
        assert {row["limit"], f"{row['requests_per_s']:,.0f}"} <= words
    for line in lines[lines.index("") :]:
        assert not line.startswith(("scattered ", "runs ", "blocks "))  # the column of ranks is there
    assert {
        "ranks",
        "decode",
        "reads",
        "group",
        "what",
        "bytes",
        "descriptors",
        "posts",
        "requests/s",
        "share",
    } <= words


MLA = ("--model", "deepseek-v3", "--tp", "8")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["plan", "NONE/a.json", "NONE/b.json"], "NONE/a.json: No such file"),
        (["plan", "NONE/a", "NONE/b", "--tokens", "0"], "'--tokens': Input should be greater"),
        (["layout", "--tp", "3"], "--tp 3: "),
        (["layout", "--tp", "0"], "Invalid value for '--tp'"),
        (["layout", "--model", "lama-3.1-8b"], "did you mean llama-3.1-8b?"),
        (["layout", "-o", "NONE/x.json"], "--output NONE/x.json: cannot be written"),
        (["layout", "--num-blocks", "0"], "Invalid value for '--num-blocks'"),
        (["layout", "--ratio", "3"], "block_size 16 is not a positive multiple of the ratio 3"),
        (["layout", "--order", "x"], "order 'x' is unknown; use one of nhd"),
        (["layout", "--dcp", "0"], "Invalid value for '--dcp'"),
        (["layout", "--cp-interleave", "0"], "Invalid value for '--cp-interleave'"),
        (["layout", "--tp", "8", "--dcp", "2"], "--tp 8 --dcp 2 --cp-interleave 1: these sizes make no layout: dcp 2"),
        (
            ["layout", *MLA, "--dcp", "3"],
            "tp_rank 0 of 8 cannot have shard 0 of 3; the size is 2 or more and divides tp_s",
        ),
        (
            ["layout", *MLA, "--dcp", "8", "--cp-interleave", "3"],
            "an interleave of 3 does not fit 2 tokens per block and 2",
        ),
        (
            ["layout", *MLA, "--dcp", "8", "--block-size", "20"],
            "kernel blocks of 20 tokens on all ranks cannot be shared",
        ),
        (
            ["layout", *MLA, "--dcp", "8", "--block-size", "4"],
            "kernel blocks of 4 tokens on all ranks cannot be shared",
        ),
        (
            ["layout", "--model", "mamba2-2.7b", "--tp", "2", "--dcp", "2"],
            "mamba2-2.7b keeps only states and sliding wind",
        ),
        (
            ["layout", "--model", "mistral-7b-v0.1", "--tp", "8", "--dcp", "8"],
            "which cannot be shared by dcp 8; use dcp 1",
        ),
        (["plan", "a"], "Missing argument 'decode'; see "),
    ],
)
def test_bad_input_is_one_line_and_status_2(argv: list[str], says: str, tmp_path: Path, command: Command) -> None:
    none = str(tmp_path / "none")
    said = command.complaint(*(x.replace("NONE", none) for x in argv))
    assert says.replace("NONE", none) in said


def test_layers_under_one_name_or_the_other_are_the_same() -> None:
    two = ranks(Model("m", (Heads(4, 8),) * 2), 1)
    [whole] = two
    one = [msgspec.structs.replace(whole, views=whole.views[:1], aliases=(("layers.1", "layers.0"),))]
    bare = [msgspec.structs.replace(whole, views=whole.views[1:])]
    for here, there in ((two, one), (one, two), (one, bare), (bare, one)):
        report = explain(here, there, 100, 0)
        assert (report["plannable"], report["problems"]) == (True, [])
    assert explain(two, bare, 100, 0)["problems"] == ["only decode has the layers layers.0"]


# -- The bound over RDMA ----------------------------------------------------------------------------------------------

GB = 1e9
MIB = 1 << 20
POST, MOST_DESCRIPTORS = 4 * MIB, 512


def bounds(here: Sequence[Any], there: Sequence[Any], **options: Any) -> dict[str, dict[str, Any]]:
    """Return the bounds of the first rank of each side."""
    report = explain(here, there, 1024, 0, **options)
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


# -- A head start on paper --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes_per_s", "share"), [(50 * GB, 0.0117), (12.5 * GB, 0.0448), (3 * GB, 0.1571), (0.1 * GB, 0.0838)]
)
def test_a_head_start_hides_what_each_chunk_but_the_last_takes(bytes_per_s: float, share: float) -> None:
    """llama-3.1-70b on 8 ranks: 1.34 GB of 32,768 tokens. If reads take longer than chunks, computing is hidden."""
    read_s = 32768 * 80 * 2 * 128 * 2 / bytes_per_s
    found = bound.head_start(32768, 0, 8192, 19400.0, read_s, 1.0)
    assert found["chunks"] == 4
    assert found["share"] == pytest.approx(share, abs=5e-5)
    assert found["saved_s"] == pytest.approx(3 * min(8192 / 19400, read_s / 4))


def test_a_head_start_brings_no_cached_token_no_window_and_no_last_chunk() -> None:
    def saved(tokens: int, cached: int, brought: float = 1.0) -> float:
        return bound.head_start(tokens, cached, 100, 1e3, 0.001 * (tokens - cached) / 100, brought)["saved_s"]

    assert [saved(n, 0) for n in (1, 100, 101, 350)] == pytest.approx([0, 0, 0.001, 0.003])
    assert [saved(400, n) for n in (50, 250, 300, 399)] == pytest.approx([0.0025, 0.0005, 0, 0])
    assert saved(400, 0, 0.25) == pytest.approx(0.25 * saved(400, 0))


def test_the_report_has_a_head_start_for_each_way_that_blocks_lie() -> None:
    two = ranks("llama-3.1-8b", 2, num_blocks=4096)
    found = explain(two, two, 32768, 0, nic_gbit=24.0, prefill_rate=20_000.0)
    slowest = {x["blocks"]: 1 / x["requests_per_s"] for x in found["bounds"] if x["side"] == "decode"}
    assert {x["blocks"]: x["read_s"] for x in found["head_starts"]} == slowest
    shown = text(found)
    assert "4 chunks of 8,192 tokens at 20,000 tokens/s, 1,638.4 ms" in shown
    assert f"blocks runs: read in {slowest['runs'] * 1e3:,.1f} ms; it saves at most" in shown
    assert not explain(two, two, 32768, 0)["head_starts"]
    assert not explain(two, two, 32768, 32768, prefill_rate=20_000.0)["head_starts"]


def test_windows_are_no_part_of_a_head_start() -> None:
    """Two of four layers see 4,096 tokens, half of the request."""
    layout = ranks("gemma-2-9b", 1, num_blocks=2048)
    found = explain(layout, layout, 8192, 0, prefill_rate=1e4, chunk_tokens=4096)
    windows = [g["window"] for g in found["local"]["groups"]]
    bytes_of = {g["group"]: g["bytes_read"] for g in found["ranks"][0]["reads"][0]["groups"]}
    whole = sum(n for group, n in bytes_of.items() if not windows[group])
    (row,) = (x for x in found["head_starts"] if x["blocks"] == "runs")
    assert whole == pytest.approx(sum(bytes_of.values()) * 2 / 3, rel=0.01)
    assert row["saved_s"] == pytest.approx(row["read_s"] * whole / sum(bytes_of.values()) / 2)
