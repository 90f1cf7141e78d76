"""The script that plants bugs plants what it says, and judges it by the tests alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import mutate, tests_of
from scripts.mutate import ROOT, Mutant, Reach, mutants, vllm
from scripts.tests_of import RECORD, kept, known_tests

SOURCE = '''
"""A text: 1 < 2."""
__all__ = ["f"]

def f(a: int = 1, b: int = 2) -> int:
    # größer
    if a < b and not a in (3,):
        raise ValueError(f"{a + 1} is too much")
    self.total += g(a, -b)
    return min(a * 2, b)

class C(Base, frozen=True):
    async def g(self):
        await self.a("größer")
        self.b(
            self
        )
        def inner():
            del self.c
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
        ("removed statement", ["pass"] * 5),
        ("removed check", ["pass"]),
        ("swapped statements", ["self.b(self)", "await self.a('größer')"]),
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
    assert not any("too much" in m.before and not m.kind.startswith("removed") for m in mutants("x.py", SOURCE))
    assert not any(m.line <= 3 for m in mutants("x.py", SOURCE))


def test_a_mutant_of_other_code_is_refused() -> None:
    mutant = mutants("x.py", SOURCE)[0]
    with pytest.raises(ValueError, match=r"x\.py:\d+ is not .* any more"):
        mutant.planted(SOURCE.replace("a", "other"))


def test_a_mutant_says_in_which_function_it_is() -> None:
    named = {m.before.splitlines()[0]: m.function for m in mutants("x.py", SOURCE) if m.kind == "removed statement"}
    assert named == {
        'raise ValueError(f"{a + 1} is too much")': "f",
        "self.total += g(a, -b)": "f",
        'await self.a("größer")': "C.g",
        "self.b(": "C.g",
        "del self.c": "C.g.<locals>.inner",
    }


UNSEEN = {"asynckv/__main__.py", "asynckv/testing/__init__.py"}
"""Tests, and no files of the package, start these: in processes of their own, or among the slow tests."""
LEASE, FLOW = "asynckv/core/lease.py", "asynckv/core/flow.py"
MEASURED = Reach(
    {
        "tests/test_all.py::test_all": (1.0, frozenset({f"{LEASE}:Lease.renew", f"{LEASE}:Lease.end", f"{FLOW}:go"})),
        "tests/test_lease.py::test_slow": (2.0, frozenset({f"{LEASE}:Lease.renew"})),
        "tests/test_lease.py::test_quick[a-1]": (0.01, frozenset({f"{LEASE}:Lease.renew"})),
        "tests/vllm/test_worker.py::test_it": (0.01, frozenset({f"{LEASE}:Lease.renew"})),
    }
)


def test_a_bug_is_judged_by_the_tests_that_run_its_function() -> None:
    first, *others = [tests for tests, _ in MEASURED.stages(LEASE, "Lease.renew")]
    assert first == ["tests/test_lease.py::test_quick[a-1]", "tests/test_lease.py::test_slow"]
    assert others == [["tests/test_all.py::test_all"], ["tests/vllm/test_worker.py::test_it"]]
    assert MEASURED.of(FLOW, "go") == ["tests/test_all.py::test_all"]


def test_a_bug_that_no_test_is_seen_to_run_is_judged_by_those_of_its_file_and_of_what_names_it() -> None:
    assert set(MEASURED.of(FLOW, "nowhere")) >= {"tests/test_all.py::test_all"}
    process = {"tests/test_keeper.py::test_it": (1.0, frozenset({"asynckv/edges/survivor/keeper.py:start"}))}
    assert Reach(process).of("asynckv/edges/survivor/child.py", "Child.run") == [*process]
    assert Reach({}).stages(LEASE, "Lease.renew") == []


def test_only_the_test_files_that_run_something_more_or_often_are_kept_for_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = {f"tests/test_{i}.py::test_it": (60.0, frozenset({f"{LEASE}:Lease.renew"})) for i in range(4)}
    monkeypatch.setattr(tests_of, "MOST", 0)
    some = ["tests/test_all.py", "tests/test_lease.py", "tests/test_0.py"]
    assert kept(Reach({**MEASURED.tests, **others}), [LEASE]) == {LEASE: some}
    # One of another room runs the function in many tests.
    others |= {f"tests/test_3.py::test_{i}": (1.0, frozenset({f"{LEASE}:Lease.renew"})) for i in range(300)}
    monkeypatch.setattr(tests_of, "MOST", 1)
    assert kept(Reach({**MEASURED.tests, **others}), [LEASE]) == {LEASE: [*some, "tests/test_3.py"]}


def test_tests_inside_vllm_are_kept_for_the_connector_alone() -> None:
    worker = "asynckv/integrations/vllm/worker.py"
    tests = {"tests/vllm/test_worker.py::test_it": (1.0, frozenset({f"{worker}:start", f"{FLOW}:go"}))}
    assert kept(Reach({**MEASURED.tests, **tests}), [worker, FLOW]) == {
        worker: ["tests/vllm/test_worker.py"],
        FLOW: ["tests/test_all.py"],
    }


def test_the_tests_of_every_file_of_the_package_are_known() -> None:
    record = json.loads(RECORD.read_text())
    for path in (ROOT / "asynckv").rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        assert record.get(name) or name in UNSEEN, f"{name}: python -m scripts.tests_of --measure"
    assert not [name for tests in record.values() for name in tests if not (ROOT / name).exists()]
    for folder in ("embed", "integrations", "tools/diagnose", "engine", "tiers", "offload"):
        assert known_tests(f"asynckv/{folder}")
    for name in ("mover", "rank"):
        assert "tests/test_offload.py" in known_tests(f"asynckv/tiers/{name}.py")


def test_tests_that_fail_kill_and_tests_that_hang_do_too(tmp_path: Path) -> None:
    for name in ("asynckv", "scripts", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "code.py").write_text("def f(a):\n    return a < 3\n")
    (tmp_path / "test_code.py").write_text(
        "from thing import f\ndef test_it():\n    assert f(2)\n    while f(4): pass\n"
    )
    (tmp_path / "code.py").rename(tmp_path / "thing.py")
    [boundary, *_] = [m for m in mutants("thing.py", (tmp_path / "thing.py").read_text()) if m.kind == "comparison"]
    assert mutate.judge(boundary, tmp_path, [(["test_code.py"], 10.0)])["outcome"] == "survived"
    wrong = Mutant("thing.py", 2, 11, "constant", "a < 3", "a < 2")
    assert mutate.judge(wrong, tmp_path, [(["test_code.py"], 10.0)])["outcome"] == "killed"
    hanging = Mutant("thing.py", 2, 11, "constant", "a < 3", "a < 9")
    assert mutate.judge(hanging, tmp_path, [(["test_code.py"], -9.0)])["outcome"] == "timeout"
    assert "a < 3" in (tmp_path / "thing.py").read_text()


def test_it_lists_and_explains_itself() -> None:
    ask = [sys.executable, "-m", "scripts.mutate"]
    listed = subprocess.run(
        [*ask, "--paths", "asynckv/geometry/strides.py", "--list"], cwd=ROOT, check=True, capture_output=True
    )
    assert json.loads(listed.stdout)["files"].keys() == {"asynckv/geometry/strides.py"}
    helped = subprocess.run([*ask, "--help"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "A survivor needs your judgement" in helped.stdout


def test_the_variables_of_vllms_environment_are_those_of_its_newest_version() -> None:
    _, variables = vllm(ROOT)
    assert variables["PYTHONPATH"].startswith(f"{ROOT}:")
    assert variables["PYTHONPATH"].endswith("/vllm-source/vllm-0.33.0")
    assert variables["VLLM_TARGET_DEVICE"] == "cpu"
