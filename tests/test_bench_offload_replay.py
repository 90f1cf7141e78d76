"""`asynckv bench offload`: what is said of a workload follows from what its prompts share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from asynckv.config import POLICIES
from asynckv.offload.eviction import POLICIES as KNOWN
from asynckv.offload.keys import StoredGroup
from asynckv.tools.bench.offload_replay import Prompts, Tiers, replay
from asynckv.tools.bench.workload import Workload
from scripts.bench import offload as bench_offload
from scripts.bench.offload import ABOUT
from tests.commands import Command

GROUP = StoredGroup(name="attention", block_size=16, record_bytes=4096)
SMALL = ["bench", "offload", "--layers", "2", "--kv-heads", "1", "--requests", "12", "--prompt-tokens", "128:200"]
SMALL += ["--shared-prefix", "128:3"]


def chat(turns: int) -> Workload:
    """Prompts of which each continues the one before it by a chunk of 32 tokens."""
    lengths = tuple(32 * (i + 1) for i in range(turns))
    return Workload("chat", lengths, chunks=tuple(tuple(range(n // 32)) for n in lengths), chunk_tokens=32)


def played(workload: Workload, *, blocks: int = 1000, files: int = 0, policy: str = "lru") -> Any:
    told = replay(Prompts(workload, 16, 16), [GROUP], Tiers(policy, blocks * 4096, files * 4096), lambda: None)
    assert sum(told["tokens"][where] for where in ("host", "file", "computed")) == told["tokens"]["prompt"]
    return told


def test_tokens_have_one_hash_if_they_and_all_before_them_are_the_same() -> None:
    prompts = Prompts(Workload("", (70, 70, 48), chunks=((1, 2, 3), (1, 2, 4), (1,)), chunk_tokens=32), 16, 16)
    first, second, third = (prompts.hashes(i) for i in range(3))
    assert list(map(len, (first, second, third))) == [4, 4, 3]  # of whole blocks
    assert first == second
    assert third[:2] == first[:2]
    assert third[2] != first[2]
    assert len(set(first)) == 4


def test_a_large_tier_finds_all_that_came_before_and_a_small_one_what_is_left_of_it() -> None:
    told = played(chat(8))
    assert told["tokens"]["host"] == told["tokens"]["best"] == sum(32 * i for i in range(8))
    assert told["bytes"]["store"] == 16 * 4096
    assert 0 < played(chat(8), blocks=10)["tokens"]["host"] < told["tokens"]["host"]


def test_what_host_memory_has_no_room_for_is_found_in_files() -> None:
    workload = Workload("", (128,) * 8, chunks=tuple(((i % 4),) for i in range(8)), chunk_tokens=128)
    told = played(workload, blocks=8, files=100)
    assert told["tokens"]["file"] == 4 * 112  # the last token of a prompt is computed again
    assert told["hit_rate"]["all"] == told["hit_rate"]["best"] == 0.4375
    assert told["bytes"]["promotion"] == 28 * 4096


def test_a_scan_does_not_empty_the_tier_of_a_policy_that_resists_it() -> None:
    wanted, lengths, chunks = 4, [], []
    for i in range(40):  # four prompts again and again, and between them others that are asked for once
        chunks += [(i % wanted,), (1000 + i,), (2000 + i,)]
        lengths += [64] * 3
    workload = Workload("", tuple(lengths), chunks=tuple(chunks), chunk_tokens=64)
    rates = {policy: played(workload, blocks=32, policy=policy)["hit_rate"]["all"] for policy in POLICIES}
    assert rates["s3-fifo"] > rates["lru"]


def test_all_policies_can_be_asked_for() -> None:
    assert set(POLICIES) == set(KNOWN)


def test_every_combination_of_sizes_and_policies_is_a_run(command: Command, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    argv = [*SMALL, "--host-mb", "1,2", "--file-mb", "0,8", "--policy", "lru,s3-fifo", "--json", str(report)]
    status, out, err = command.run(*argv)
    assert status == 0
    runs = json.loads(report.read_text())["runs"]
    assert {(run["policy"], run["host_bytes"] >> 20, run["file_bytes"] >> 20) for run in runs} == {
        (policy, host, file) for policy in POLICIES for host in (1, 2) for file in (0, 8)
    }
    assert "a cache without eviction would find" in " ".join((out + err).split())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "these prompts have nothing in common; give --shared-prefix"),
        (["--shared-prefix", "64", "--host-mb", "0"], "--host-mb '0': '0' is no number of MiB from 1"),
        (["--shared-prefix", "64", "--policy", "arc"], "--policy 'arc' is unknown; use one of s3-fifo, lru"),
        (["--shared-prefix", "64", "--block-size", "16:32"], "--block-size and --order take one value here"),
    ],
)
def test_bad_input_is_refused_with_its_remedy(argv: list[str], says: str, command: Command) -> None:
    status, _, err = command.run("bench", "offload", *argv)
    assert status == 2
    assert says in " ".join(err.split())


# -- the bench of stores and loads -----------------------------------------------------------------------------


ROUNDED = 0.0006
"""Error of a figure that is told with three digits."""

SMALLEST = ["--blocks", "2", "--layers", "3", "--heads", "1", "--rounds", "3"]


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("order", "descriptors", "least", "status"), [("nhd", 6.0, 0.0, 0), ("cross-nhd", 0.5, math.inf, 1)]
)
def test_every_way_is_measured(
    order: str,
    descriptors: float,
    least: float,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However fast this machine is: all of it is enough if nothing is asked for, and nothing if all is."""
    monkeypatch.setattr(bench_offload, "LEAST", least)
    options = [*SMALLEST, "--order", order, "--runs", "--folder", str(tmp_path), "--json", "-"]
    assert bench_offload.main(options) == status
    report = json.loads(capsys.readouterr().out)
    assert list(report["ways"]) == list(ABOUT)
    moved = report["blocks"] * report["block_bytes"]
    for each in report["ways"].values():
        for name in ("gb_per_s", "raw_gb_per_s", "of_raw", "request_ms"):
            assert each[name]["rounds"] == 3
            # On a busy machine these few bytes may take so long that three digits of a speed are 0.
            assert 0 <= each[name]["low"] <= each[name]["median"] <= each[name]["high"]
        speed, took = each["gb_per_s"]["median"], each["request_ms"]["median"]
        assert speed * took == pytest.approx(moved / 1e6, abs=ROUNDED * (speed + took + ROUNDED))
    assert report["block_bytes"] == 2 * 3 * 16 * 256
    assert report["descriptors_per_block"] == descriptors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nixl
def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_offload, "LEAST", math.inf)
    assert bench_offload.main([*SMALLEST, "--host-only"]) == 1
    said = capsys.readouterr().out
    assert "store" in said
    assert "write" not in said
    assert "6 descriptors and" in " ".join(said.split())
    assert " no " in said
    assert " yes " not in said


@pytest.mark.parametrize(("low", "high", "said"), [(0.9, 1.1, "yes"), (0.8, 0.95, "maybe"), (0.7, 0.89, "no")])
def test_less_than_the_floor_is_said_only_where_it_is_sure(low: float, high: float, said: str) -> None:
    assert bench_offload.met({"low": low, "high": high}) == said
