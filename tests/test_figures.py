"""Pages tell measured figures once: between marks, from the recorded runs of docs/figures.json."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from asynckv.tools import cli
from scripts import figures
from scripts.bench.__main__ import CASES
from scripts.draw.drawing import DOCS
from scripts.draw.figures import MARKS, figure, files, origin, shares_of, verdict
from tests.test_docs import BENCH

RECORDED = json.loads(figures.FIGURES.read_text())
UNITS = (
    r"ms|s|µs|us|ns|(?:milli|micro|nano)?seconds?|minutes?|hours?|h|%|percent|[KMGT]i?B(/s)?|bytes|times|fold|[x×]|Gbit/s"
    r"|(?:req|requests?|tokens?|pulls?|reads?)(?:/s| (?:per|a|each) second)"
)
WORDS = "two|three|four|five|six|seven|eight|nine|ten|a hundred|a thousand"
FIGURE = re.compile(
    rf"(?<![-\w.])\d[\d.,]*(?:(?: to |, | and |-)\d[\d.,]*)?[k\s-]?(?:{UNITS})(?!\w)"
    r"|(?<![-\w.])\d+\.\d+(?![\w.]|-\d)|\bfactor of \d|(?<![\w/.])\d/\d+(?![\w/.])"
    rf"|\b(?:{WORDS})[- ](?:{UNITS})(?!\w)|\b(?:two|three|four|five|ten)fold\b"
    r"|\b(?:twice|thrice|half (?:as|of|the)|double[sd]?|halve[sd]?)\b"
    r"|\b(?:two |an? |three )?(?:thirds?|quarters?|eighths?|tenths?)\b",
    re.IGNORECASE,
)
"""A number with a unit, a number with a fraction (a ratio), or one in words."""
CONSTANTS: dict[str, dict[str, str]] = {
    "README.md": {
        "Torch and NIXL take 1.5 GB in": "the size of what pip installs",
        "or 5.2 GB if": "the same with CUDA",
        "takes about 2 minutes": "a wait, for which a reader decides to begin",
        "CI take about 20 minutes": "the same",
        "Python 3.11 or newer": "a version",
    },
    "docs/performance.md": {
        "in 1.69 s, chunks of 8,192 (336 MB per rank)": "a model's prefill, by arithmetic",
        "| 50 GB/s | 1.2 % | | 12.5 GB/s | 4.5 % | | 3 GB/s | 15.7 % |": "the same",
    },
    "docs/versus.md": {
        "after 30 s, or": "asynckv's default lease",
        "last grant of 10 s ends": "asynckv's default grant",
        "After 600 s without": "asynckv's default of `held_s`",
        "of 30 s, prolonged": "vLLM's default lease",
        "of 300 s for": "SGLang's default time-out",
        "waits for 300 s.": "the same",
        "a lease (10 s) are": "Mooncake's default lease",
        "(60 s) |": "TensorRT-LLM's default time-out",
    },
}
"""Numbers in prose that no run of a benchmark changes, in their words, with what they are."""


def prose(page: Path) -> str:
    """Return a page without marks, blocks of code, code and links' targets, on one line."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.sub(r"`[^`\n]*`|(?<=\])\([^)]*\)|[*_]", "", text).replace("&nbsp;", " ").split())


@pytest.mark.parametrize("page", MARKS, ids=lambda page: page.name)
def test_a_measured_figure_is_between_marks(page: Path) -> None:
    text = prose(page)
    for words in CONSTANTS[str(page.relative_to(figures.ROOT))]:
        assert words in text, f"{words!r} is gone from {page.name}: remove it here too"
        text = text.replace(words, "")
    found = [text[max(0, each.start() - 30) : each.end() + 10] for each in FIGURE.finditer(text)]
    assert found == [], "record it (python -m scripts.figures), or name a constant here"


@pytest.mark.parametrize(
    "text",
    [
        "30 ms",
        "0.9 to 1.4 times",
        "12 %",
        "3 GB/s",
        "1.3 of a core",
        "8 MiB",
        "5 s.",
        "200 µs",
        "a tenth",
        "9 requests a second",
        "7 milliseconds",
        "half as much",
        "5 ns",
        "2-ms steps",
        "3× as much",
        "ten times",
        "a factor of 3",
        "1/3",
        "5 percent",
    ],
)
def test_a_figure_is_seen(text: str) -> None:
    assert FIGURE.search(f"It takes {text} here")


@pytest.mark.parametrize("text", ["vLLM 0.33.0", "llama-3.1-8b", "2026-11-28", "two commands", "2 cores", "[#39500]"])
def test_a_name_is_no_figure(text: str) -> None:
    assert not FIGURE.search(f"It is {text} here")


def test_every_section_is_recorded_and_shown() -> None:
    assert set(RECORDED) == set(figures.TRIM)
    assert {name for marks in MARKS.values() for sections, _ in marks.values() for name in sections} == set(RECORDED)
    for page, marks in MARKS.items():
        assert [page.read_text().count(f"<!-- {name} -->\n") for name in marks] == [1] * len(marks)
        assert files()[page] == page.read_text(), "run python -m scripts.draw figures"


def test_a_load_is_told_where_a_run_recorded_it() -> None:
    """Sections that were taken over from earlier pages know neither the version nor the load."""
    for section in RECORDED.values():
        assert (section["load"] is None) is ("asynckv_source" not in section["machine"]["versions"])


def test_each_page_tells_when_and_where_its_sections_were_recorded() -> None:
    """Those of one list may come from different machines and versions."""
    for page, marks in MARKS.items():
        for name in {name for sections, _ in marks.values() for name in sections}:
            assert origin(RECORDED[name]) in page.read_text()


def test_the_benchmarks_without_figures_are_there() -> None:
    (names,) = re.findall(
        r"^Other benchmarks of `python.*?:(.*?)\.$", (DOCS / "performance.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert {name.split()[0] for name in re.findall(r"`([^`]+)`", names)} <= set(CASES)


def test_engines_that_differ_are_compared_with_equal_ones_as_the_decode_side_is() -> None:
    rates = {"": 100, "--order hnd": 50, "--tp 2": 40, "--tp 4": 20, "--tp 2:1 --order hnd": 25, "--order nhd:hnd": 10}
    rates |= {"--tp 2:1": 60, "--block-size 16:64 --order hnd": 5, "--tp 1:2": 10, "--tp 1:4": 10}
    assert set(rates) == {row["options"] for row in RECORDED["differ"]["report"]["rows"].values()}
    rows = {options: {"options": options, "requests_per_s": [rate, 2 * rate]} for options, rate in rates.items()}
    assert shares_of({"rows": rows}) == {
        "--tp 2:1 --order hnd": 0.5,
        "--order nhd:hnd": 0.2,
        "--tp 2:1": 0.6,
        "--block-size 16:64 --order hnd": 0.1,
        "--tp 1:2": 0.25,
        "--tp 1:4": 0.5,
    }


@pytest.mark.parametrize("name", [name for name, section in RECORDED.items() if section["rounds"]])
def test_the_rows_are_commands_of_asynckv(name: str) -> None:
    commands: Any = typer.main.get_command(cli.app)
    for row in RECORDED[name]["report"]["rows"].values():
        program, bench, *arguments = shlex.split(f"{RECORDED[name]['command']} {row['options']}")
        assert (program, bench) == ("asynckv", "bench")
        assert commands.get_command(None, "bench").make_context("bench", arguments).args == []


def test_the_report_is_that_of_readmes_command() -> None:
    assert BENCH.endswith(f".venv/bin/{RECORDED['report']['command']}")


def test_a_section_that_fails_keeps_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs programs; those of a real recording take minutes."""

    def section(code: str) -> dict[str, Any]:
        about = {"rounds": 0, "minutes": 0, "quick": "", "date": "once", "report": {"text": ["old"]}}
        return {"command": f"python -c {shlex.quote(code)}", **about}

    path = tmp_path / "figures.json"
    bad = section("print('new'); raise SystemExit(3)")
    path.write_text(json.dumps({"report": section("print('new')"), "small": bad}))
    assert figures.main(["--file", str(path)]) == 1
    found = json.loads(path.read_text())
    assert found["small"] == bad
    assert found["report"]["report"] == {"text": ["new"]}
    assert found["report"]["date"] != "once"
    assert {"cpu", "cores", "kernel", "python", "versions"} == set(found["report"]["machine"])
    assert "small keeps its former figures: status 3 of" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["figures.json"]


def test_rows_are_run_in_turns_with_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    rows = {name: {"options": f"--order {name}", "requests_per_s": [0.0]} for name in ("nhd", "hnd")}
    command = f"python -c {shlex.quote('raise SystemExit(4)')}"
    section = {"command": command, "rounds": 3, "minutes": 0, "quick": "--quick", "report": {"rows": rows}}
    path.write_text(json.dumps({"small": section}))
    assert figures.main(["--quick", "--file", str(path)]) == 1
    said = capsys.readouterr().err
    assert "round 1: nhd" in said
    assert said.rstrip().splitlines()[-2].endswith("--order nhd --quick")


@pytest.mark.parametrize("ratio", [(1.0, 2.0, 3.0), (0.9, 0.95, 1.0), (0.5, 1.5, 1.6)])
def test_a_conclusion_follows_from_the_interval(ratio: tuple[float, float, float]) -> None:
    low, median, high = ratio
    text = verdict([("8 MiB, idle", {"low": low, "median": median, "high": high})])
    assert text == f"ahead in 0 of 1 rows, undecided: 8 MiB, idle ({median:.2f})"


def test_more_is_worse_for_a_time() -> None:
    rows = [("a", {"low": 0.5, "median": 0.6, "high": 0.7}), ("b", {"low": 1.1, "median": 1.2, "high": 1.3})]
    assert verdict(rows, is_less_better=True) == "ahead in 1 of 2 rows, behind: b (1.20)"
    assert verdict(rows) == "ahead in 1 of 2 rows, behind: a (0.60)"


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.123"), (12.0, "12"), (123.4, "123"), (1234.5, "1,230"), (11_100.0, "11,100")]
)
def test_a_figure_has_three_digits(value: float, text: str) -> None:
    assert figure(value) == text
