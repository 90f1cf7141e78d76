"""The script that plants bugs plants what it says, and judges it by the tests alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import mutate
from scripts.mutate import ROOT, Mutant, known_tests, mutants

SOURCE = '''
"""A text: 1 < 2."""
__all__ = ["f"]

def f(a: int = 1, b: int = 2) -> int:
    # größer
    if a < b and not a in (3,):
        raise ValueError(f"{a + 1} is too much")
    self.total += g(a, -b)
    return min(a * 2, b)
'''


def planted(kind: str) -> list[str]:
    """The lines that the mutants of one kind change, as they are then."""
    out = []
    for mutant in mutants("x.py", SOURCE):
        if mutant.kind == kind:
            assert mutant.is_code(SOURCE)
            out += [line[1:].strip() for line in mutant.diff(SOURCE).splitlines() if line.startswith("+")]
    return out


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("comparison", ["if (a <= b) and not a in (3,):", "if a < b and not (a not in (3,)):"]),
        ("and, or", ["if (a < b or (not a in (3,))):"]),
        ("negated condition", ["if (not (a < b and (not a in (3,)))):"]),
        ("arithmetic", ["return min((a // 2), b)"]),
        ("exchanged function", ["return (max(a * 2, b))"]),
        ("swapped arguments", ["self.total += (g(-b, a))"]),
        ("removed statement", ["pass", "pass"]),
        ("sign", ["if a < b and (a in (3,)):", "self.total += g(a, (b))"]),
        (
            "constant",
            [
                *(f"def f(a: int = {a}, b: int = {b}) -> int:" for a, b in ((2, 2), (0, 2), (1, 3), (1, 1))),
                *(f"if a < b and not a in ({n},):" for n in (4, 2)),
                *(f"return min(a * {n}, b)" for n in (3, 1)),
            ],
        ),
    ],
)
def test_every_kind_of_bug_is_one_change(kind: str, changed: list[str]) -> None:
    def plain(lines: list[str]) -> list[str]:
        return sorted(
            line.replace("not a in", "a not in").replace("(a not in (3,))", "a not in (3,)") for line in lines
        )

    assert plain(planted(kind)) == plain(changed)


def test_texts_annotations_and_lists_of_names_stay() -> None:
    assert not any("too much" in m.before and m.kind != "removed statement" for m in mutants("x.py", SOURCE))
    assert not any(m.line <= 3 for m in mutants("x.py", SOURCE))


def test_a_mutant_of_other_code_is_refused() -> None:
    mutant = mutants("x.py", SOURCE)[0]
    with pytest.raises(ValueError, match=r"x\.py:\d+ is not .* any more"):
        mutant.planted(SOURCE.replace("a", "other"))


def test_every_file_of_geometry_has_tests() -> None:
    for path in (ROOT / "asynckv/geometry").glob("*.py"):
        assert path.stem == "__init__" or known_tests(path.relative_to(ROOT).as_posix())


def test_tests_that_fail_kill_and_tests_that_hang_do_too(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def f(a):\n    return a < 3\n")
    (tmp_path / "test_code.py").write_text(
        "from thing import f\ndef test_it():\n    assert f(2)\n    while f(4): pass\n"
    )
    (tmp_path / "code.py").rename(tmp_path / "thing.py")
    [boundary, *_] = [m for m in mutants("thing.py", (tmp_path / "thing.py").read_text()) if m.kind == "comparison"]
    assert mutate.judge(boundary, tmp_path, [["test_code.py"]], 60.0)["outcome"] == "survived"
    wrong = Mutant("thing.py", 2, 11, "constant", "a < 3", "a < 2")
    assert mutate.judge(wrong, tmp_path, [["test_code.py"]], 60.0)["outcome"] == "killed"
    hanging = Mutant("thing.py", 2, 11, "constant", "a < 3", "a < 9")
    assert mutate.judge(hanging, tmp_path, [["test_code.py"]], 2.0)["outcome"] == "timeout"
    assert "a < 3" in (tmp_path / "thing.py").read_text()


def test_it_lists_and_explains_itself() -> None:
    ask = [sys.executable, "-m", "scripts.mutate"]
    listed = subprocess.run(
        [*ask, "--paths", "asynckv/geometry/strides.py", "--list"], cwd=ROOT, check=True, capture_output=True
    )
    assert json.loads(listed.stdout)["files"].keys() == {"asynckv/geometry/strides.py"}
    helped = subprocess.run([*ask, "--help"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "A survivor is a question to you" in helped.stdout
