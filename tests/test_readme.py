"""README's commands can be run, its names are the code's, and its links lead somewhere."""

from __future__ import annotations

import ast
import configparser
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import asynckv
from asynckv.engine.lent import LentRequest
from asynckv.tools import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
BENCH, CHECKS = (text.strip() for language, text in FENCES if not language)
"""The two commands that do everything. A third one has no place in README."""
((_, REPORT),) = (fence for fence in FENCES if fence[0] == "text")
((_, CODE),) = (fence for fence in FENCES if fence[0] == "python")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FRONT = ["README.md", "docs/index.md", "docs/versus.md", "docs/glossary.md"]


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_first_command_is_one_that_the_command_line_takes() -> None:
    install, bench = BENCH.split(" && ")[1:]
    assert install.startswith(".venv/bin/pip install -q -c constraints.txt -e .")
    program, *arguments = shlex.split(bench)
    assert program == ".venv/bin/asynckv"
    commands: Any = typer.main.get_command(cli.app)
    parsed = commands.get_command(None, arguments[0]).make_context("bench", arguments[1:])
    assert parsed.params["requests"] == 200
    assert parsed.args == []


def test_the_second_command_has_all_environments() -> None:
    tox = configparser.ConfigParser()
    tox.read(ROOT / "tox.ini")
    (wanted,) = re.findall(r"tox run -e (\S+)$", CHECKS)
    known = {section.removeprefix("testenv:") for section in tox.sections()}
    assert set(wanted.split(",")) <= known | set(re.split(r"[,\s]+", tox["tox"]["env_list"]))


def labels(report: str) -> set[str]:
    lines = [line for line in report.splitlines() if re.match(r" {0,2}\S", line)]
    found = {re.sub(r"[\d,.]+", "#", re.split(r" {2,}", line.strip())[0]) for line in lines}
    return found - {"handshake", "queue", "plan", "post", "read", "detect", "confirm"}


@pytest.mark.nixl
@pytest.mark.slow
def test_the_report_is_what_a_run_prints() -> None:
    command = [sys.executable, "-m", "asynckv", *shlex.split(BENCH.rpartition("asynckv ")[2])]
    small = {"1024": "64"}
    done = subprocess.run(
        [small.get(argument, argument) for argument in command],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert labels(done.stdout) == labels(REPORT), "run README's first command and paste what it prints"
    assert max(map(len, REPORT.splitlines())) <= 80


def test_the_code_calls_what_there_is() -> None:
    program = ast.parse("async def main():\n" + "".join(f"    {line}\n" for line in CODE.splitlines()))
    calls = [node for node in ast.walk(program) if isinstance(node, ast.Call)]
    called: dict[str, Any] = {
        "Engine": asynckv.Engine,
        "EngineConfig": asynckv.EngineConfig,
        "lend": asynckv.Engine.lend,
        "pull": asynckv.Engine.pull,
        "wait_released": LentRequest.wait_released,
    }
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        known = inspect.signature(called[name]).parameters
        assert {keyword.arg for keyword in call.keywords} <= set(known), name


@pytest.mark.parametrize("name", FRONT)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_glossary_says_every_word_once() -> None:
    words = re.findall(r"^### (.*)$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(words) > 50
    assert len(words) == len(set(words))


def test_what_is_said_of_others_has_a_source_with_a_version() -> None:
    """A link to a branch says tomorrow what nobody has checked."""
    links = [x for x in LINK.findall((ROOT / "docs" / "versus.md").read_text()) if x.startswith("https://github.com")]
    floating = [x for x in links if re.search(r"/(blob|tree)/(main|master|HEAD)/", x)]
    assert not floating
