"""Pages that are made from code are what the code says."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import importlib
import inspect
import json
import re
import shlex
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import typer

import asynckv
import asynckv.testing
from asynckv import layout, offload
from asynckv.core import wire
from asynckv.core.types import Reason
from asynckv.engine.caller import ERRORS
from asynckv.engine.lent import LentRequest
from asynckv.errors import ConfigError
from asynckv.integrations.vllm.offload import options as offload_options
from asynckv.integrations.vllm.options import OF_NIXL_CONNECTOR, Options
from asynckv.tools import cli
from scripts.draw import configuration, states
from scripts.draw.__main__ import MADE
from scripts.draw.drawing import PAPER, PICTURES, THEMES
from tests.commands import python

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "asynckv"


@pytest.mark.parametrize("what", MADE)
def test_what_is_made_from_code_is_fresh(what: str) -> None:
    for path, text in MADE[what][0]().items():
        assert path.read_text() == text, f"run python -m scripts.draw {what}"


def test_the_reference_has_every_public_name_once() -> None:
    blocks = re.split(r"^\.\. currentmodule:: (.*)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    listed: dict[str, list[str]] = {}
    for module, block in zip(blocks[1::2], blocks[2::2], strict=True):
        listed.setdefault(module, []).extend(re.findall(r"^\.\. auto\w+:: (\w+)$", block, re.MULTILINE))
    assert {module: sorted(names) for module, names in listed.items()} == {
        "asynckv": sorted(asynckv._HOME),
        "asynckv.layout": sorted(layout.__all__),
        "asynckv.offload": sorted(offload.__all__),
        "asynckv.testing": sorted(asynckv.testing.__all__),
    }


def test_every_reason_is_explained_once_with_the_error_that_it_raises() -> None:
    text = (DOCS / "api.md").read_text().partition("\n### Reasons\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\| .+ \|$", text, re.MULTILINE)
    errors = {**dict.fromkeys(wire.REFUSED, "LeaseRefused"), **{r: e.__name__ for r, e in ERRORS.items()}}
    errors |= {Reason.QUEUE_FULL: "Overloaded", Reason.NO_OFFER: "NoOffer", Reason.COMPLETE: "", Reason.DISCHARGED: ""}
    told = {
        Reason(reason): error or ("LeaseRefused" if Reason(reason) in wire.REFUSED else "") for reason, error in rows
    }
    assert len(rows) == len(told)
    assert told == errors
    assert set(Reason) - set(told) == {Reason.RELEASED}
    assert f"`{Reason.RELEASED}`" in text.splitlines()[-2]


DATA = [
    kind
    for kind in (getattr(asynckv, name) for name in asynckv._HOME)
    if inspect.isclass(kind)
    and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))
    and not issubclass(kind, asynckv.Order)
]
"""Public plain data, but orders: their fields are the arguments of the methods that they name."""


@pytest.mark.parametrize("kind", DATA, ids=lambda kind: kind.__name__)
def test_every_field_of_public_data_is_explained(kind: type) -> None:
    names = {x.name for x in fields(kind)} if is_dataclass(kind) else set(kind.__struct_fields__)  # type: ignore[attr-defined]
    listed = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    assert set(re.findall(r"^    (\w+): ", listed, re.MULTILINE)) == names


def test_the_configuration_page_refuses_a_field_without_explanation() -> None:
    @dataclass
    class Forgotten:
        """A part.

        Attributes:
            told: Explained.
        """

        told: int = 0
        untold: int = 0

    with pytest.raises(ConfigError, match="explains told; it has told, untold"):
        configuration.explained(Forgotten)


def test_every_picture_is_made_from_code() -> None:
    made = {path for files, _ in MADE.values() for path in files()} | {PICTURES / x.picture for x in states.MACHINES}
    assert made >= set(PICTURES.iterdir())


@pytest.mark.parametrize("path", sorted(PICTURES.iterdir()), ids=lambda path: path.stem)
def test_a_picture_is_read_on_light_and_on_dark_pages(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    spaces = {"": "http://www.w3.org/2000/svg"}
    assert root.get("class") == "picture"
    assert THEMES in (root.findtext("style", "", spaces))
    paper = root.find("rect", spaces)
    assert paper is not None
    assert (paper.get("fill"), paper.get("width"), paper.get("height")) == (PAPER, "100%", "100%")


def test_columns_of_tables_stay_wide_enough_on_a_phone() -> None:
    """A browser would make them as narrow as their longest word. Two columns of text fit 400 px; others scroll."""
    css = (DOCS / "_static" / "site.css").read_text()
    phone = css.partition("@media (max-width: 46em) {")[2].partition("\n}\n")[0]
    rules = dict(re.findall(r"^  \.content (table\S*(?: :is\(td, th\))?) \{\n    (.*);\n  \}$", phone, re.MULTILINE))
    assert rules == {
        "table.docutils": "width: max-content",
        "table.docutils :is(td, th)": "max-width: 10.5em",
        "table.docutils:has(td:nth-child(3)) :is(td, th)": "max-width: 15em",
    }


def test_the_map_names_files_that_exist_and_every_folder() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    named = {word for word in re.findall(r"`([^`\s]+)`", text) if re.search(r"\.(py|html|md)$|/$", word)}
    assert len(named) > 90
    assert not [word for word in sorted(named) if not (ROOT / word).exists() and not (PACKAGE / word).exists()]
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= named


@pytest.mark.nixl
@pytest.mark.slow
def test_the_embedding_example_runs() -> None:
    text = (DOCS / "embedding.md").read_text()
    (program,) = re.findall(r"```python\n(import asyncio.*?)```", text, re.DOTALL)
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert "released {'decode/tp0': 'complete'}" in done.stdout


# -- The configuration behind vLLM ------------------------------------------------------------------------------------

VLLM = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text()


def test_the_first_steps_behind_vllm_are_taken() -> None:
    given = re.findall(r"--kv-transfer-config '(\{.*?\})'\n", VLLM, re.DOTALL)
    before, after, dual, offloading = (json.loads(each) for each in given)
    assert after.keys() > before.keys()
    assert dual["kv_connector"] in importlib.import_module(dual["kv_connector_module_path"]).__all__
    assert Options.parse(dual["kv_connector_extra_config"]["asynckv"]).advertise == "tcp://10.0.0.2:0"
    assert Options.parse(after["kv_connector_extra_config"]).advertise == "tcp://10.0.0.1:0"
    extra = offloading["kv_connector_extra_config"]
    assert offload_options.parse(extra, "MODEL", 16).file_bytes == 10**12
    assert extra["spec_name"] in importlib.import_module(extra["spec_module_path"]).__all__


def test_every_option_behind_vllm_is_in_the_docs() -> None:
    (table,) = re.findall(r"^## Options\n(.*?)^## ", VLLM, re.DOTALL | re.MULTILINE)
    options = {each.name for each in dataclasses.fields(Options)} - {"engine_id"}
    for name in (*OF_NIXL_CONNECTOR, *options):
        assert re.search(rf"`{name}\b", table), name
    (table,) = re.findall(r"^## Offloading.*?\n(\| option.*?)\n\n", VLLM, re.DOTALL | re.MULTILINE)
    for name in {*offload_options.OURS, *offload_options.THEIRS} - {"spec_name", "spec_module_path"}:
        assert re.search(rf"`{name}\b", table), name


# -- README -----------------------------------------------------------------------------------------------------------

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
    small = {"1024": "64"}
    argv = [small.get(argument, argument) for argument in shlex.split(BENCH.rpartition("asynckv ")[2])]
    done = python("-m", "asynckv", *argv, COLUMNS="80")
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
