"""Logs in the forms in which collectors keep and export them, and logs of which only a part is read."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynckv.tools.diagnose import well
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.leaks import find_leaks
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import Logs, read_logs
from tests.lab.leaky import make_leaky
from tests.lab.truth import watch
from tests.test_leaks_records import row, write
from tests.timeline_logs import D, P, Written

LONG = row(history=[[0.0, "}" * 50]] * 600)
"""A line that container runtimes cut into three."""


def ids(logs: Logs) -> list[str]:
    return [x.text("request_id") for x in logs.records]


def zstd_frame(data: bytes) -> bytes:
    """One frame with one raw block, as the format's specification has it."""
    block = (1 | len(data) << 3).to_bytes(3, "little") + data
    return b"\x28\xb5\x2f\xfd\x60" + (len(data) - 256).to_bytes(2, "little") + block


def test_archives_of_xz(tmp_path: Path) -> None:
    lines = [json.dumps(row(request_id=str(i))).encode() + b"\n" for i in range(2000)]
    whole = lzma.compress(b"".join(lines[:1000])) + lzma.compress(b"".join(lines[1000:]))
    (tmp_path / "a.xz").write_bytes(whole)
    logs = read_logs([tmp_path / "a.xz"])
    assert (len(logs.records), logs.skipped) == (2000, [])
    (tmp_path / "a.xz").write_bytes(whole[:-300])
    logs = read_logs([tmp_path / "a.xz"])
    assert len(logs.records) >= 1000
    assert ["compressed, and cut short or damaged" in x.reason for x in logs.skipped] == [True]


def test_archives_of_zstd_are_read_or_say_what_is_missing(tmp_path: Path) -> None:
    lines = [json.dumps(row(request_id=x)).encode() + b"\n" for x in "abcd"]
    (tmp_path / "a.zst").write_bytes(zstd_frame(b"".join(lines[:2])) + zstd_frame(b"".join(lines[2:])))
    logs = read_logs([tmp_path])
    # Nothing that unpacks zstd need be installed.
    assert ids(logs) == ["a", "b", "c", "d"] or "pip install backports.zstd" in logs.nothing


def cri(text: str, stream: str = "stderr", size: int = 16384) -> list[str]:
    """Write a line as containerd does, which cuts it."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    tags = ["P"] * (len(pieces) - 1) + ["F"]
    return [
        f"2026-11-22T15:46:42.{i:09}Z {stream} {tag} {x}" for i, (tag, x) in enumerate(zip(tags, pieces, strict=True))
    ]


def test_kubernetes_cuts_long_lines(tmp_path: Path) -> None:
    first, second = cri(json.dumps(LONG)), cri(json.dumps(LONG | {"request_id": "b"}), "stdout")
    assert len(first) == len(second) == 3
    both = [x for pair in zip(first, second, strict=True) for x in pair]
    logs = read_logs([write(tmp_path / "0.log", *both, *cri("GET /health"), *cri(json.dumps(row(request_id="c"))))])
    assert sorted(ids(logs)) == ["a", "b", "c"]
    assert (len(logs.records[0].fields["history"]), logs.skipped, logs.total.num_others) == (600, [], 1)


def test_a_piece_that_a_rotation_left_behind_is_a_damaged_line(tmp_path: Path) -> None:
    first, *rest = cri(json.dumps(LONG))
    old = write(tmp_path / "0.log.1", json.dumps(row(request_id="b")), first)
    new = write(tmp_path / "0.log", *rest, json.dumps(row(request_id="c")))
    logs = read_logs([old, new])
    assert sorted(ids(logs)) == ["b", "c"]
    [skipped] = logs.skipped
    assert (skipped.lines, skipped.where) == (1, f"{old}:2")
    assert skipped.reason.startswith("cut short: its last piece is missing")


def test_a_piece_of_a_line_need_not_name_a_process(tmp_path: Path) -> None:
    last = {k: v for k, v in LONG.items() if k != "incarnation"} | {"incarnation": LONG["incarnation"]}
    logs = read_logs([write(tmp_path / "0.log", *cri(json.dumps(last)))])
    assert (ids(logs), logs.skipped) == (["a"], [])


def test_docker_cuts_the_lines_of_both_streams(tmp_path: Path) -> None:
    def pieces(stream: str, request_id: str) -> list[dict[str, str]]:
        text = json.dumps(LONG | {"request_id": request_id}) + "\n"
        time = "2026-11-22T15:46:42.5Z"
        return [{"log": text[i : i + 16384], "stream": stream, "time": time} for i in range(0, len(text), 16384)]

    both = [x for pair in zip(pieces("stdout", "a"), pieces("stderr", "b"), strict=True) for x in pair]
    logs = read_logs([write(tmp_path / "a-json.log", *both)])
    assert (sorted(ids(logs)), logs.skipped) == (["a", "b"], [])


LINES = [json.dumps(row(request_id=x)) for x in "ab"]
NANOSECONDS = ["1795362402123456789", "1795362402123456790"]
LABELS = {"app": "vllm", "namespace": "serving"}
FORMS: dict[str, str] = {
    "logcli -o raw": "".join(f"{x}\n" for x in LINES),
    "logcli -o default": "".join(
        f'2026-11-22T15:46:42Z {{app="vllm", namespace="serving"}} {line}\n' for line in LINES
    ),
    "logcli -o jsonl": "".join(
        json.dumps({"labels": LABELS, "line": line, "timestamp": "2026-11-22T15:46:42.123456789Z"}) + "\n"
        for line in LINES
    ),
    "the HTTP API": json.dumps(
        {
            "status": "success",
            "data": {
                "resultType": "streams",
                "result": [
                    {"stream": LABELS, "values": [[NANOSECONDS[0], LINES[0]]]},
                    {"stream": {}, "values": [[NANOSECONDS[1], LINES[1], {"structuredMetadata": {}}]]},
                ],
                "stats": {"summary": {"bytesProcessedPerSecond": 0}},
            },
        }
    ),
    "Explore's JSON": json.dumps(
        [
            {"line": line, "timestamp": at, "date": "2026-11-22T15:46:42.123Z", "fields": LABELS | {"sequence": "7"}}
            for line, at in zip(LINES, NANOSECONDS, strict=True)
        ]
    ),
    "Explore's JSON of a query with a parser": json.dumps(
        [
            {"line": x, "timestamp": at, "fields": {k: str(v) for k, v in json.loads(x).items()}}
            for x, at in zip(LINES, NANOSECONDS, strict=True)
        ],
        indent=2,
    ),
    "Explore's TXT": 'Common labels: {"app":"vllm"}\nLine limit: "1000 (2 returned)"\n\n\n'
    + "".join(f"1795362402123\t2026-11-22T15:46:42.123Z\t{line}\n" for line in LINES),
    "jq -s": json.dumps([json.loads(x) for x in LINES], indent=1),
}


@pytest.mark.parametrize("form", FORMS)
def test_exports_of_loki(tmp_path: Path, form: str) -> None:
    (tmp_path / "export").write_text(FORMS[form])
    logs = read_logs([tmp_path / "export"])
    assert (sorted(ids(logs)), logs.skipped) == (["a", "b"], [])
    assert {x.at for x in logs.records} == {1795362402.123456}
    assert logs.records[0].integer("sequence") == -1


def test_what_only_begins_as_a_document_does_is_lines(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text('[{"x": 1}]\n' + "\n".join(LINES) + "\n")
    assert ids(read_logs([tmp_path / "a.log"])) == ["a", "b"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_last_line_that_is_being_written_is_the_end(tmp_path: Path, wrapped: bool) -> None:
    lines = [json.dumps({"log": x + "\n", "stream": "stderr"}) if wrapped else x for x in LINES]
    text = "\n".join(lines) + "\n"
    for length in range(len(lines[0]) + 1, len(text)):
        (tmp_path / "a.log").write_text(text[:length])
        logs = read_logs([tmp_path / "a.log"])
        assert ids(logs) in (["a"], ["a", "b"])
        assert not logs.skipped


def service(number: int = 60) -> Written:
    written = Written()
    written.begin()
    for i in range(number):
        written.complete(i, 10.0 + i, D[i % 2])
    return written


def lines_of(written: Written) -> str:
    return "".join(x + "\n" for _, x in written.lines)


@pytest.mark.parametrize("name", ["chat-7", "gen-7", f"{D[1][-8:]}{D[1][-8:]}-7", "7", "#7", "chat-7\u00fc"])
@pytest.mark.parametrize(
    "form", [lines_of, lambda x: "".join(json.dumps({"log": y + "\n"}) + "\n" for _, y in x.lines)]
)
def test_the_request_that_is_asked_about_is_in_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: Callable[[Written], str]
) -> None:
    written = service()
    if not name.isascii():
        written.lines = [(at, x.replace('chat-7"', 'chat-7\\u00fc"')) for at, x in written.lines]
    (tmp_path / "a.log").write_text(form(written))
    monkeypatch.setattr(well, "MAX_WELL", 0)
    assert 7 not in [x.sequence for x in join(read_logs([tmp_path / "a.log"])).requests]
    [request] = [x for x in join(read_logs([tmp_path / "a.log"], request=name)).requests if x.sequence == 7]
    assert (request.sequence, [x.request_id for x in request.all_pulls]) == (7, ["gen-7"])
    assert {x.event for x in request.records()} == {"lease_lent", "lease_granted", "pull_ended", "lease_ended"}


def test_requests_that_went_well_are_counted_and_a_sample_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = service(600)
    written.line("lease_lent", 300.0, P, request_id="late", sequence=600, blocks=1, lease_s=30.0)
    written.line("release_refused", 301.0, D[0], request_id="gen-9", prefill_request_id="chat-9", sequence=9,
                 pull_id=f"{D[0][-8:]}{D[0][-8:]}-9", peer="prefill", cause="wrong_request", ranks=[P])  # fmt: skip
    (tmp_path / "a.log").write_text(lines_of(written) * 2)
    whole = read_logs([tmp_path / "a.log"])
    monkeypatch.setattr(well, "MAX_WELL", 100)
    logs = read_logs([tmp_path / "a.log"])
    assert (len(whole.records), whole.num_well) == (len(written.lines), 0)
    assert whole.total.num_repeated == logs.total.num_repeated == len(written.lines)
    assert len(logs.records) + sum(logs.counted.values()) == len(whole.records)
    requests = {x.name: x for x in join(logs).requests}
    assert len(requests) + logs.num_well == 601
    assert 15 < len(requests) < 32
    # What went wrong is there, and whatever else is said of it; of a request all or nothing is.
    assert {"late", "chat-9"} <= set(requests)
    assert all(len(x.records()) >= 4 for name, x in requests.items() if name != "late")
    for one, other in zip(*(join(x).processes.values() for x in (whole, logs)), strict=True):
        seen = [(x.first_at, x.last_at, x.num_records, x.lends, x.pulls, x.says_info) for x in (one, other)]
        assert seen[0] == seen[1]


@pytest.mark.slow
def test_what_is_late_is_found_beside_whatever_sample_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 0
    for seed in range(12):
        paths = watch(make_leaky(seed))[1].write(tmp_path / str(seed))

        def found(paths: list[Path] = paths) -> list[Any]:
            leaks = find_leaks(Presence(Axis(join(read_logs(paths)))))
            return sorted((x.request_id, x.side, x.holders) for x in leaks)

        whole = found()
        monkeypatch.setattr(well, "MAX_WELL", 0)
        assert found() == whole
        monkeypatch.undo()
        late += len(whole)
    assert late > 10
