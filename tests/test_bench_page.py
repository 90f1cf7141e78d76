"""The page of a sweep: everything is inside, every figure is there, and nothing in a sweep can become markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv.tools import frame
from asynckv.tools.bench import journal, page
from asynckv.tools.bench.floor import NAMES
from tests.test_bench_compare import floored, made
from tests.test_bench_sweep import head, row
from tests.test_cli import complaint


class Found(HTMLParser):
    """Tags, what they load, plots and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.plots: list[dict[str, Any]] = []
        self.labels: list[str] = []
        self._is_plot = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [str(v) for k, v in attrs if k in ("src", "href")]
        found = dict(attrs)
        self._is_plot = found.get("type") == "application/json"
        if found.get("role") == "img":
            self.labels.append(str(found["aria-label"]))

    def handle_data(self, data: str) -> None:
        if self._is_plot:
            self.plots.append(json.loads(data))
            self._is_plot = False


RAW = f"floor: {NAMES['raw_nixl']}"


def sweep(*rows: journal.Row, **changes: Any) -> journal.Sweep:
    return journal.Sweep([head(keys=("1", "16", "64"), **changes)], list(rows))


def traces(text: str, title: str) -> dict[str, Any]:
    """The lines of the plot with this y axis."""
    plot = next(p for p in Found(text).plots if p["layout"]["yaxis"]["title"]["text"].startswith(title))
    return {trace["name"]: trace for trace in plot["data"]}


def test_the_page_loads_nothing_and_forbids_it() -> None:
    text = page.make(sweep(row("1", report=made()), row("16", report=made()), row("64", report=made())), "s.jsonl")
    found = Found(text)
    assert found.loads == []
    assert "default-src 'none'" in text
    assert found.tags.count("figure") == len(found.plots) == len(found.labels) == 4
    assert "@@" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert all("against pulls in flight per decode rank" in label for label in found.labels)


def test_lines_are_medians_with_bars_from_lowest_to_highest_of_few_rounds() -> None:
    rows = [row(k, n, report=made(rate + n)) for k, rate in (("1", 10), ("16", 100)) for n in (1, 2, 5)]
    (trace,) = traces(page.make(sweep(*rows, rounds=5), "s"), "requests/s").values()
    assert (trace["x"], trace["y"]) == ([1.0, 16.0], [12.0, 102.0])
    assert trace["error_y"]["array"] == [3.0, 3.0]
    assert trace["error_y"]["arrayminus"] == [1.0, 1.0]


def test_other_axes_make_lines_of_their_own() -> None:
    points = [
        journal.Place(f"{c}-{t}", {"concurrency": c, "prompt-tokens": t}) for c in ("1", "16") for t in ("128", "1024")
    ]
    axes = {"concurrency": ["1", "16"], "prompt-tokens": ["128", "1024"]}
    rows = [row(p.key, report=made(i + 1.0)) for i, p in enumerate(points)]
    text = page.make(journal.Sweep([head(points=points, axes=axes)], rows), "s")
    found = traces(text, "requests/s")
    wanted = {"prompt-tokens 128": [1, 3], "prompt-tokens 1024": [2, 4]}
    assert {name: trace["y"] for name, trace in found.items()} == wanted
    assert set(traces(text, "ms")) == {f"prompt-tokens {t} {q}" for t in (128, 1024) for q in ("p50", "p99")}


def test_an_axis_of_words_is_drawn_as_words() -> None:
    points = [journal.Place(t, {"transport": t}) for t in ("auto", "tcp")]
    found = journal.Sweep(
        [head(points=points, axes={"transport": ["auto", "tcp"]})],
        [row(p.key, report=made(), axes=p.axes) for p in points],
    )
    (trace,) = traces(page.make(found, "s"), "requests/s").values()
    assert trace["x"] == ["auto", "tcp"]


def test_floors_stand_beside_the_lines_and_shares_in_the_table() -> None:
    report = made() | floored(0.95)
    text = page.make(sweep(row("1", report=report)), "s")
    for unit in ("GB/s", "requests/s"):
        found = traces(text, unit)
        assert found.keys() == {"asynckv", RAW}
        assert found[RAW]["line"]["dash"] == "dot"
    assert traces(text, "GB/s")[RAW]["y"] == [6.0]
    assert traces(text, "ms")[f"{RAW} p50"]["y"] == [1.0]
    assert traces(text, "µs").keys() == {"asynckv", RAW}
    assert traces(text, "ratio")["asynckv"]["y"] == [0.95]
    assert "GB/s / raw NIXL</th>" in text
    assert "<td>95.0%</td>" in text


def test_an_unfinished_or_faulty_sweep_says_so() -> None:
    text = page.make(sweep(row("1", report=made()), row("16", status="failed", reason="no memory")), "s")
    assert "Unfinished: 2 of 3 runs are there." in text
    assert "failed: no memory" in text
    assert "Points are medians" not in text  # of one round
    assert "Look here:</strong> <ul><li>2 runs of 2 points; 1 with faults.</li>" in text


def test_texts_of_a_sweep_never_become_markup() -> None:
    evil = "</script><img src=x onerror=alert(1)>@@title@@"
    report = made()
    report["config"]["model"] = evil
    report["environment"]["backend"] = evil
    place = journal.Place("1", {"concurrency": "1", "model": evil})
    rows = [row("1", report=report, axes=place.axes, command=evil), row("1", status="bad", reason=evil, report=report)]
    axes = {"concurrency": ["1", "2"], "model": [evil, "b"]}
    found = Found(page.make(journal.Sweep([head(points=[place], axes=axes, environment={evil: evil})], rows), evil))
    assert "img" not in found.tags
    assert any(evil in trace["name"] for plot in found.plots for trace in plot["data"])


def test_what_is_no_sweep_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(made()))
    assert "is no sweep" in complaint(["bench", "page", str(path)], monkeypatch, capsys)
    path.write_bytes(msgspec.json.encode(head()))
    assert "holds no sweep yet" in complaint(["bench", "page", str(path)], monkeypatch, capsys)


def test_without_plotly_the_page_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frame, "is_installed", lambda: False)
    text = complaint(["bench", "page", str(tmp_path / "s.jsonl")], monkeypatch, capsys)
    assert "pip install 'asynckv[plots]'" in text
