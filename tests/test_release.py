"""A release as its users get it: built from the checkout, installed into an empty environment, run from elsewhere.

`python -m build` makes the source distribution and, from that, the wheel, each in an environment of its own. The wheel
goes into a new environment that has not even pip, with the versions that `constraints.txt` pins. pip has to reach a
package index for that; where it does not, these tests fail and say so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

from asynckv.version import VERSION

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[1]
PACKED = f"asynckv-{VERSION}"

WHEEL_BYTES = 1_500_000
SDIST_BYTES = 3_000_000
FILE_BYTES = 200_000
"""Bounds: more than a third above what there is. Whatever exceeds one is probably not meant to be shipped."""

LEFT_OUT = ("docs/newsfragments/",)
"""Of what is tracked: it is in CHANGELOG.md, or belongs to a checkout."""

LOOK = """
import importlib, json, pkgutil, sys
import asynckv, asynckv.testing
absent = {}
for name in asynckv.__all__:
    try:
        getattr(asynckv, name)
    except ImportError as exc:
        absent[name] = str(exc)
for name in asynckv.testing.__all__:
    getattr(asynckv.testing, name)
for module in pkgutil.walk_packages(asynckv.__path__, "asynckv."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as exc:
            absent[module.name] = str(exc)
installed = sorted(x.name for x in importlib.metadata.distributions())
print(json.dumps({"home": asynckv.__file__, "absent": absent, "installed": installed}))
"""


class Built(NamedTuple):
    wheel: Path
    sdist: Path


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ASYNCKV"))}


def call(argv: Sequence[str | Path], cwd: Path, timeout_s: float = 200, env: dict[str, str] | None = None) -> str:
    """Run a command to its end and return its stdout."""
    done = subprocess.run(
        argv, cwd=cwd, env=env or clean(), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    needs = "this needs a package index, see PIP_INDEX_URL\n" if {"pip", "build"} & {*map(str, argv)} else ""
    assert done.returncode == 0, f"{' '.join(map(str, argv))}: exit status {done.returncode}\n{needs}{said}"
    return done.stdout


def tracked() -> set[str]:
    """The files of this checkout: what git tracks, and what it will once it is added."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git: what belongs to a release cannot be compared")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = call(listed, ROOT).split("\0")
    return {name for name in names if name and (ROOT / name).is_file() and not name.startswith(LEFT_OUT)}


def shipped(package: Path) -> dict[str, int]:
    """The files of a wheel or a source distribution, the latter without its folder, and their bytes."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return {info.filename: info.file_size for info in wheel.infolist()}
    with tarfile.open(package) as sdist:
        return {str(PurePosixPath(x.name).relative_to(PACKED)): x.size for x in sdist.getmembers() if x.isfile()}


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    with tempfile.TemporaryDirectory(prefix="akv-dist-") as out:
        call([sys.executable, "-m", "build", "--outdir", out, ROOT], cwd=Path(out), timeout_s=180)
        yield Built(Path(out, f"{PACKED}-py3-none-any.whl"), Path(out, f"{PACKED}.tar.gz"))


@pytest.fixture(scope="module")
def unpacked(built: Built) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="akv-sdist-") as folder:
        call(["tar", "-xzf", built.sdist], cwd=Path(folder))  # filters of `tarfile` came with Python 3.11.4
        yield Path(folder, PACKED)


@pytest.fixture(scope="module")
def installed(built: Built) -> Iterator[Path]:
    """The wheel in an environment that had nothing; its folder of programs. It takes 1.5 GB, and is removed at once."""
    with tempfile.TemporaryDirectory(prefix="akv-env-") as folder:
        venv.create(folder, symlinks=True)
        python = Path(folder, "bin", "python")
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
        constraints = ROOT / "constraints.txt"
        call([*pip, "install", "-q", "--no-compile", "-c", constraints, built.wheel], cwd=Path(folder), timeout_s=300)
        call([*pip, "check"], cwd=Path(folder))
        yield python.parent


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="akv-") as folder:
        yield Path(folder)


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    files = shipped(built.wheel)
    home = f"{PACKED}.dist-info"
    meant = {name for name in tracked() if name.startswith("asynckv/")}
    meta = {f"{home}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    assert set(files) == meant | meta
    data = {
        "py.typed",
        "integrations/vllm/words.toml",
        "observe/metrics.toml",
        *(
            f"tools/{x}"
            for x in (
                "diagnose/why.html",
                "diagnose/causes.toml",
                "diagnose/phases.toml",
                "doctor/findings.toml",
                "help.toml",
                "plan/models.toml",
            )
        ),
    }
    assert {f"asynckv/{name}" for name in data} <= set(files)
    assert built.wheel.stat().st_size < WHEEL_BYTES
    assert {name: size for name, size in files.items() if size > FILE_BYTES} == {}


def test_the_source_distribution_holds_the_checkout(built: Built) -> None:
    files = shipped(built.sdist)
    assert set(files) == tracked() | {"PKG-INFO"}
    assert {"LICENSE", "CHANGELOG.md"} <= set(files)
    assert built.sdist.stat().st_size < SDIST_BYTES
    assert {name: size for name, size in files.items() if size > FILE_BYTES} == {}


def test_the_source_distribution_has_what_its_tests_and_its_documentation_need(unpacked: Path) -> None:
    env = clean() | {"PYTHONPATH": str(unpacked), "PYTHONDONTWRITEBYTECODE": "1"}
    pytest_too = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-qq"]
    collected = call([*pytest_too, "-m", "not gpu"], unpacked, env=env)
    assert "tests/test_release.py" in collected
    sphinx = [sys.executable, "-m", "sphinx", "-n", "-W", "-q", "-b", "dummy", "docs", "docs/_build"]
    call(sphinx, unpacked, env=env)


def test_the_wheel_runs_in_an_empty_environment(installed: Path, elsewhere: Path) -> None:
    asynckv = installed / "asynckv"
    assert call([asynckv, "--version"], elsewhere).startswith(f"asynckv {VERSION}, ")

    found = json.loads(call([installed / "python", "-I", "-c", LOOK], elsewhere))
    assert Path(found["home"]).is_relative_to(installed.parent)
    assert (Path(found["home"]).parent / "py.typed").is_file()
    extra = "metrics need prometheus_client: pip install 'asynckv[metrics]'"
    needs_extra = {"asynckv.observe.endpoint", "asynckv.observe.metrics"}
    absent = {name: why for name, why in found["absent"].items() if not name.startswith("asynckv.integrations.vllm.")}
    of_proxy = {f"asynckv.tools.proxy.{name}" for name in ("engines", "router", "server")}
    assert absent.keys() == needs_extra | of_proxy
    assert {absent[name] for name in needs_extra} == {extra}
    command = [str(asynckv), "proxy", "--prefill", "http://a", "--decode", "http://b"]
    no_proxy = subprocess.run(command, cwd=elsewhere, env=clean(), capture_output=True, text=True)
    needs = "asynckv: the router needs aiohttp: pip install 'asynckv[proxy]'\n"
    assert (no_proxy.returncode, no_proxy.stderr) == (2, needs)
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    assert {re.sub(r"[-_.]+", "-", name).lower() for name in found["installed"]} - normal == {"asynckv"}

    call(
        [asynckv, "layout", "--model", "llama-3.1-8b", "--tp", "4", "--role", "prefill", "-o", "prefill.json"],
        elsewhere,
    )
    call(
        [asynckv, "layout", "--model", "llama-3.1-8b", "--tp", "2", "--role", "decode", "-o", "decode.json"], elsewhere
    )
    plan = json.loads(call([asynckv, "plan", "prefill.json", "decode.json", "--json", "-"], elsewhere))
    assert len(plan["ranks"]) == 2


@pytest.mark.nixl
def test_the_installed_bench_moves_and_verifies_bytes(installed: Path, elsewhere: Path) -> None:
    asynckv = installed / "asynckv"
    small = ["--layers", "2", "--requests", "4", "--prompt-tokens", "64"]
    call([asynckv, "bench", *small, "--json", "bench.json", "--log", "bench.log"], elsewhere)
    report = json.loads((elsewhere / "bench.json").read_text())
    assert (report["requests"]["completed"], report["requests"]["failed"]) == (4, 0)
    assert (report["bytes"]["verified"], report["bytes"]["wrong"]) == (4 * 64 * 8192, 0)

    call([asynckv, "why", "bench.log", "--html", "why.html"], elsewhere)
    page = (elsewhere / "why.html").read_text()
    assert "<canvas" in page
    assert "<p>All is well.</p>" in page
