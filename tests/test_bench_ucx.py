"""Reading what UCX says it used."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from asynckv.tools.bench import ucx

LOG = """\
[1.0] [vm:1:0]   +-------+--------+-------------+------------+
[1.0] [vm:1:0]   | decode intra-node cfg#1                   |
[1.0] [vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:1:0]   | Count | Range  | Description | Config     |
[1.0] [vm:1:0]   |    40 | 0..inf | zero-copy   | cma/memory |
[1.0] [vm:1:0]   | decode intra-node cfg#2                   |
[1.0] [vm:1:0]   | active message by ucp_am_send             |
[1.0] [vm:1:0]   |    70 | 0..8k  | short       | tcp/lo     |
[1.0] [vm:1:0]   +-------+--------+-------------+------------+
[1.0] [vm:1:0] mpool.c:40 UCX WARN something is amiss
"""


def test_reads_are_named_and_complaints_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ucx.1.log").write_text(LOG)
    assert ucx.read(tmp_path) == {"cma/memory (zero-copy)": 40}
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", ["[1.0] [vm:1:0] mpool.c:40 UCX WARN something is amiss"])


def test_what_was_used_most_is_named_first() -> None:
    assert ucx.named(Counter({"tcp/lo": 2, "cma/memory": 5})) == "cma/memory, tcp/lo"


def test_without_a_table_nothing_is_claimed(tmp_path: Path) -> None:
    assert ucx.named(ucx.read(tmp_path)).startswith("unknown")
