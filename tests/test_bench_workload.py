"""Prompt lengths: drawn and traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynckv.bench.workload import drawn, traced
from asynckv.errors import ConfigError


def test_one_length_or_a_range() -> None:
    assert drawn("1024", 3, 0).prompt_tokens == (1024, 1024, 1024)
    lengths = drawn("128:130", 200, 0).prompt_tokens
    assert set(lengths) == {128, 129, 130}


def test_a_seed_repeats_its_lengths() -> None:
    assert drawn("1:5000", 50, 7) == drawn("1:5000", 50, 7)
    assert drawn("1:5000", 50, 7) != drawn("1:5000", 50, 8)


@pytest.mark.parametrize("spec", ["", "x", "0", "-5", "5:2", "1:", ":3", "1:2:3", "1e3", "99999999999"])
def test_a_malformed_length_is_named(spec: str) -> None:
    if spec == "1:":  # an open end reads as one length
        assert drawn(spec, 1, 0).prompt_tokens == (1,)
        return
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        drawn(spec, 1, 0)


def test_capping_says_how_many(tmp_path: Path) -> None:
    work = drawn("100", 5, 0)
    assert work.capped(None) is work
    assert work.capped(100).num_capped == 0
    assert (work.capped(60).num_capped, set(work.capped(60).prompt_tokens)) == (5, {60})


def test_a_trace_gives_its_first_requests(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_length": 5, "output_length": 1}\n\n{"prompt_tokens": 7}\n{"input_length": 9}\n')
    assert traced(path, None).prompt_tokens == (5, 7, 9)
    assert traced(path, 2).prompt_tokens == (5, 7)
    with pytest.raises(ConfigError, match="holds 3 requests, fewer than --requests 4"):
        traced(path, 4)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: is not JSON"),
        ("[]", "line 2: is no JSON object"),
        ('{"x": 1}', "line 2: has neither input_length nor prompt_tokens"),
        ('{"input_length": 0}', "line 2: input_length is 0"),
        ('{"input_length": true}', "line 2: input_length is True"),
        ('{"input_length": "5"}', "line 2: input_length is '5'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_length": 5}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        traced(path, None)
    assert complaint in str(caught.value)


def test_a_trace_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, complaint in (("empty", "no requests"), ("binary", "UTF-8"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=complaint):
            traced(tmp_path / name, None)
