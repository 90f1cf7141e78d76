"""Connectors inside vLLM: what a case means, and what is refused before vLLM is needed."""

from __future__ import annotations

import pytest

from asynckv.errors import ConfigError
from scripts.bench import vllm as bench_vllm
from scripts.bench.vllm import Case


def test_a_case_is_written_as_it_is_read() -> None:
    case = Case.parse("32x16384:16:48")
    assert (case.layers, case.block_bytes, case.blocks, case.in_flight) == (32, 16384, 16, 48)
    assert str(case) == "32x16384:16:48"
    assert case.bytes == 8 << 20


def test_small_requests_are_many_enough_to_be_measured_and_large_ones_fit_into_memory() -> None:
    assert Case.parse("1x4096:1:64").requests == 256
    assert Case.parse("1x4096:1:1").requests == 48
    assert Case.parse("32x16384:16:48").requests == 48


@pytest.mark.parametrize("text", ["", "1x4096", "1x4096:1", "1x4096:1:0", "0x4096:1:1", "1x4000:1:1", "axb:c:d"])
def test_other_cases_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a case such as"):
        Case.parse(text)


@pytest.mark.parametrize("arguments", [["--contenders", "mooncake"], ["--rounds", "0"], ["--cases", "x"]])
def test_bad_input_is_exit_status_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_vllm.main(arguments) == 2
    assert "vllm:" in capsys.readouterr().err


def test_a_quantile_is_one_of_the_values() -> None:
    assert bench_vllm.quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert bench_vllm.quantile([1.0], 0.99) == 1.0
