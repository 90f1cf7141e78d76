"""One declaration of every option: what is made of it, and that nothing in the benchmark goes in a circle."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from asynckv.tools import bench, cli
from asynckv.tools.bench.options import DECLARED, Options, Shape
from tests.commands import Command

COMMANDS: Any = typer.main.get_command(cli.app)
PARAMS = {param.name: param for param in COMMANDS.commands["bench"].params}


def test_the_command_line_has_every_option_and_no_other() -> None:
    assert list(PARAMS) == [field.name for field in dataclasses.fields(Options)]


def test_an_option_says_on_the_command_line_what_was_declared() -> None:
    for name, declared in DECLARED.items():
        param, option = PARAMS[name], declared.metadata["option"]
        assert (param.help, param.rich_help_panel) == (option.help, option.rich_help_panel)
        assert param.default == getattr(Options(), name)


def test_a_worker_is_told_all_options() -> None:
    options = Options(announced=True, posting_threads="2", rate=5.0, log="x", tp="1:2", order="nhd:hnd")
    assert msgspec.json.decode(msgspec.json.encode(options), type=Options) == options


@pytest.mark.parametrize(
    ("option", "value"), [("--concurrency", "0"), ("--warmup", "10001"), ("--prefix-cache", "-1"), ("--rate", "1e7")]
)
def test_what_is_out_of_bounds_is_refused_by_its_name(option: str, value: str, command: Command) -> None:
    assert f"Invalid value for '{option}'" in command.complaint("bench", option, value)


def test_what_is_said_of_one_side_is_for_that_side() -> None:
    options = Options(tp="4:2", pp="1:3", order="hnd:nhd", block_size="32")
    assert options.shape("prefill") == Shape(tp=4, order="hnd", block_size=32)
    assert options.shape("decode") == Shape(tp=2, pp=3, block_size=32)
    options = Options(tp="8", dcp="1:8", cp_interleave="4:2")
    assert options.shape("prefill") == Shape(tp=8, cp_interleave=4)
    assert options.shape("decode") == Shape(tp=8, dcp=8, cp_interleave=2)


def test_no_file_of_the_benchmark_imports_one_that_imports_it() -> None:
    folder = Path(bench.__file__).parent
    arrows: dict[str, set[str]] = {}
    for path in folder.glob("*.py"):
        found = arrows[path.stem] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "asynckv.tools.bench":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asynckv.tools.bench."):
                found.add(str(node.module).split(".")[3])
    order = list(graphlib.TopologicalSorter(arrows).static_order())
    assert order.index("options") < order.index("protocol") < order.index("workers") < order.index("driver")
    # A worker and its driver know nothing of each other.
    assert not arrows["rank"] & {"driver", "report", "workers"}
    assert not arrows["driver"] & {"rank", "worker", "report"}
