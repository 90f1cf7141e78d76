"""Real models prefilled in one process and decoded in another; needs transformers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.tables import GroupPair
from scripts import disagg_generate


def disagg(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.disagg_generate", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options", [[], ["--prefill-tp", "1", "--decode-tp", "6"], ["--prefill-tp", "6", "--cached-tokens", "0"]]
)
def test_every_family_goes_on_bit_for_bit(options: list[str]) -> None:
    assert importlib.util.find_spec("transformers"), "install the test dependencies: transformers is among them"
    done = disagg(*options)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["family"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows.keys() == disagg_generate.FAMILIES.keys()
    for row in rows.values():
        assert disagg_generate.is_good(row)
        assert row["tensors_equal"] and row["logits_equal"] and row["tokens_equal"]  # noqa: PT018
    # Every part of every layer is seen to matter: with it zeroed, the logits differ.
    awake = {name.split(".")[1] for row in rows.values() for name, seen in row["controls_see"].items() if seen}
    asleep = {(f, name) for f, row in rows.items() for name, seen in row["controls_see"].items() if not seen}
    assert awake == {"k", "v", "latent", "conv_x", "conv_b", "conv_c", "conv_q", "conv_k", "conv_v", "state"}
    assert not asleep


NUMBERS = disagg_generate.Numbers(45, 21, 2, 3, 2, 12, 8, 0)


SPOILT = [
    ("llama", 0, "k"),
    ("deepseek_v3", 0, "latent"),
    ("deepseek_v3", 1, "latent"),
    ("bamba", 0, "conv_b"),
    ("bamba", 1, "state"),
    ("qwen3_next", 1, "conv_q"),
]
"""Which family's rank has one wrong value, and in which part; all in one run, for processes take seconds to start."""


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_judge_sees_one_wrong_value_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = iter(SPOILT)

    def spoil(ranks: list[disagg_generate.Rank]) -> None:
        _, rank, part = next(spoilt)
        tensors = [t for _, _, p, t in ranks[rank].tensors() if p.name == part]
        # One value, in a block that holds something.
        values = tensors[-1].reshape(-1)
        at = int((tensors[-1].contiguous().view(torch.int32).reshape(-1) != MARK).nonzero()[0])
        index = torch.unravel_index(torch.tensor(at), tensors[-1].shape)
        assert values[at] == tensors[-1][index]
        tensors[-1][index] += 1.0

    assert not asyncio.run(disagg_generate.decode_process([family for family, _, _ in SPOILT], NUMBERS, spoil))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["family"], disagg_generate.is_good(row)) for row in rows] == [
        (family, False) for family, _, _ in SPOILT
    ]
    for row, (_, rank, part) in zip(rows, SPOILT, strict=True):
        assert [x.split()[0] + x.split()[2] for x in row["differing"]] == [f"tp{rank}{part}"]


MARK = -0x54545455
"""What memory holds that nobody has written: 0xAB everywhere."""


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("up", [True, False])
def test_the_judge_sees_a_prefix_that_is_rounded(
    up: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = BlockLists._pair_tokens

    def rounded(self: BlockLists, pair: GroupPair) -> Any:
        group, here = pair.local_index, pair.local
        first, ids = self.local[group]
        if first % here.block_size:
            step = here.block_size if up else 0
            at = first - first % here.block_size + step
            self.local = (*self.local[:group], (at, ids[1:] if up else ids), *self.local[group + 1 :])
        return honest(self, pair)

    monkeypatch.setattr(BlockLists, "_pair_tokens", rounded)
    assert not asyncio.run(disagg_generate.decode_process(["llama"], NUMBERS))
    row = json.loads(capsys.readouterr().out)
    assert row["written_beside"] == ([] if up else ["the cached prefix was written again"])
    assert row["tensors_equal"] is not up


@pytest.mark.slow
def test_without_transformers_it_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['disagg_generate', 'llama']\n"
        "from scripts import disagg_generate; sys.exit(disagg_generate.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "transformers is not installed; run: pip install 'transformers==5.23.0'" in done.stderr
