"""Connectors inside vLLM: what a case means, and what is refused before vLLM is needed."""

from __future__ import annotations

import pytest

from asynckv.errors import ConfigError
from scripts.bench import vllm as bench_vllm
from scripts.bench.vllm import QUICK, Case, Step, chosen, is_wide, quartiles, ratios


def test_a_case_is_written_as_it_is_read() -> None:
    case = Case.parse("32x16384:16:48")
    assert (case.layers, case.block_bytes, case.blocks, case.in_flight) == (32, 16384, 16, 48)
    assert str(case) == "32x16384:16:48"
    assert case.bytes == 8 << 20
    assert str(Case.parse("32x16384:16:48:random")) == "32x16384:16:48:random"


def test_small_requests_are_many_enough_to_be_measured_and_large_ones_fit_into_memory() -> None:
    assert Case.parse("1x4096:1:64").requests == 256
    assert Case.parse("1x4096:1:1").requests == 48
    assert Case.parse("32x16384:16:16").requests == 64
    assert Case.parse("32x16384:16:48").requests == 128


@pytest.mark.parametrize(
    "text",
    ["", "1x4096", "1x4096:1", "1x4096:1:0", "0x4096:1:1", "1x4000:1:1", "axb:c:d", "1x4096:1:1:odd", "1x4096:1:1::"],
)
def test_other_cases_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a case such as"):
        Case.parse(text)


def test_a_step_is_time_in_python_and_outside() -> None:
    assert Step.parse("3:7") == Step(3.0, 7.0)
    assert [str(Step.parse(text)) for text in ("0:0", "0.5:10")] == ["0:0", "0.5:10"]


@pytest.mark.parametrize("text", ["", "3", "3:", "-1:3", "0:0.5", "1:2:3", "a:b", "0:1001", "nan:nan", "inf:1"])
def test_other_steps_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a step such as"):
        Step.parse(text)


def test_all_rows_are_those_of_the_documentation_and_idle_steps_have_no_others() -> None:
    rows = chosen(None, None, True, 4)
    assert len(rows) == 9
    assert all(row.others == (4 if str(row.step) != "0:0" else 0) for row in rows)
    assert [str(row) for row in chosen("1x4096:1:2", "0:0,1:2", False, 3)] == [
        "1x4096:1:2, steps 0:0, 0 others",
        "1x4096:1:2, steps 1:2, 3 others",
    ]
    assert [str(row.step) for row in chosen(None, "0:10", False, 4)] == ["0:10"] * len(QUICK)


BAD = (
    "--contenders mooncake",
    "--windows 0",
    "--cases x",
    "--step x",
    "--others -1",
    "--all --step 3:7",
    "--json /nowhere/x",
)


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_exit_status_two(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_vllm.main(line.split()) == 2
    assert "vllm:" in capsys.readouterr().err


def windows(*rates: float) -> list[dict[str, float]]:
    return [{"requests_per_s": x, "p50_ms": 1.0, "cpu_ms": 2.0, "others_tokens_per_s": 0.0} for x in rates]


def test_ratios_are_taken_window_by_window_and_wide_ones_need_more_windows() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert quartiles([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0}
    found = ratios({"nixl": windows(10, 100, 1), "asynckv": windows(15, 150, 1.5)})
    assert found["requests_per_s"] == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert found["cpu_ms"]["median"] == 1.0
    assert "others_tokens_per_s" not in found
    assert not is_wide(found)
    assert is_wide(ratios({"nixl": windows(1, 1, 1, 1, 1), "asynckv": windows(1, 1.3, 1.5, 1.7, 2)}))
    assert not is_wide(ratios({"nixl": windows(1, 1)}))
