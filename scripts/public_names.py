"""Collect the public names: Python's names and parameters, commands and options, events, metrics, JSON keys.

`docs/compatibility.md` says which of them are stable, and `scripts/record_wire.py` records them. Parameters are
recorded with their kind and whether they have a default, because `f(a, b)` breaks if `b` moves or `c` is required. Keys
of reports come from real reports of small runs, and of the log and the benchmark in `tests/data/`. Reports that would
need a machine are derived from their types.
"""

from __future__ import annotations

import ast
import inspect
import json
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from typer.testing import CliRunner

import asynckv
import asynckv.layout
import asynckv.offload
from asynckv.account.values import Account
from asynckv.core.types import Reason
from asynckv.embed import ledgers
from asynckv.errors import ConfigError
from asynckv.observe.metrics import FAMILIES
from asynckv.told import EVENTS
from asynckv.tools.bench import report, table
from asynckv.tools.bench.driver import Measured
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.options import Options
from asynckv.tools.bench.protocol import Outcome
from asynckv.tools.bench.workload import Workload
from asynckv.tools.cli import app
from asynckv.tools.diagnose import why_report
from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.causes import CAUSE
from asynckv.tools.doctor import show
from asynckv.tools.doctor.catalogue import Finding
from asynckv.tools.doctor.facts import Facts
from asynckv.tools.offload.folder import Folder, Pruned
from asynckv.tools.plan.models import Heads, Model

DATA = Path(__file__).parents[1] / "tests" / "data"
DEFAULT = ", has a default"

BY_DATA: tuple[str, ...] = (
    ".counts",
    ".violations",
    ".causes",
    ".failures",
    ".failed_in",
    ".released",
    ".errors",
    ".overall",
    ".metrics",
    ".inside",
    ".fields",
    ".processes",
    ".peak_rss_bytes",
    ".pool_bytes_per_rank",
    ".gauges",
    ".budgets",
    ".num_peers",
    ".holds[].blocks",
    ".planes",
    ".counters",
    ".environment",
)
"""Objects with data as keys, such as ranks, causes or figures. Their contents are recorded under `*`."""


COMMANDS = {
    "compare": "bench compare ONE OTHER --json OUT",
    "layout": "layout --layers 1 -o OUT",
    "plan": "plan LAYOUTS LAYOUTS --json OUT",
}
"""Commands that need no engine; words in capitals are paths."""


def _parameters(value: Any) -> dict[str, str]:
    """Return a function's parameters in order, each with its kind."""
    found = inspect.signature(value).parameters.values()
    return {x.name: x.kind.description + DEFAULT * (x.default is not x.empty) for x in found}


def _members(value: Any) -> dict[str, Any]:
    """Return the parts of a public name: parameters, and for a class also its public members with theirs."""
    if not isinstance(value, type):
        return {"": _parameters(value)} if callable(value) else {}
    found: dict[str, Any] = dict.fromkeys(sorted(_set_on_self(value)))
    if issubclass(value, BaseException):  # callers catch it by its own name or a base's, but do not create it
        found["is a"] = sorted(x.__name__ for x in value.__mro__[1:] if x is not object)
    else:
        found[""] = _parameters(value)
    for name in dir(value):
        if not name.startswith("_") and not hasattr(BaseException, name):
            member = inspect.getattr_static(value, name)
            if isinstance(member, (classmethod, staticmethod)):
                found[name] = _parameters(getattr(value, name))
            elif inspect.isfunction(member):
                found[name] = {x: kind for x, kind in _parameters(member).items() if x != "self"}
            else:
                found[name] = None
    return found


def _set_on_self(kind: type) -> set[str]:
    """Return the public attributes that `__init__` sets, because the class itself does not have them."""
    found = set()
    for each in kind.__mro__:
        begin = vars(each).get("__init__")
        if (
            inspect.isfunction(begin)
            and begin.__module__.startswith("asynckv")
            and "<" not in begin.__code__.co_filename
        ):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(begin)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr[0] != "_":
                    found.add(node.attr)
    return found


def _commands(found: Any, name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every command with its options, and whether these are required."""
    options: dict[str, str] = {}
    for each in found.params:
        words = [x for x in (*each.opts, *each.secondary_opts) if x[:2] == "--"] or [f"argument {each.name}"]
        options |= dict.fromkeys(words, "required" if each.required else f"option{DEFAULT}")
    yield name, dict(sorted(options.items()))
    for word, each in getattr(found, "commands", {}).items():
        yield from _commands(each, f"{name} {word}")


def _python() -> dict[str, dict[str, Any]]:
    """Return every public Python name as it is imported."""
    found = {
        asynckv: asynckv._HOME,
        asynckv.layout: asynckv.layout.__all__,
        asynckv.offload: asynckv.offload.__all__,
        ledgers: ("Fetch", "Loan", "Outcome"),  # what ledgers return
    }
    inside = {module: module.__name__.removeprefix("asynckv").lstrip(".") for module in found}
    return {
        f"{inside[module]}.{name}".lstrip("."): _members(getattr(module, name))
        for module, names in found.items()
        for name in sorted(names)
    }


def names() -> dict[str, Any]:
    """Return all public names; see docs/compatibility.md."""
    return {
        "python": _python(),
        "commands": dict(_commands(typer.main.get_command(app), "asynckv")),
        "events": {name: sorted(event.__struct_fields__) for name, event in EVENTS.items()},
        "metrics": sorted(FAMILIES),
        "reasons": sorted(Reason),
        "causes": sorted(CAUSE),
    }


def reports(account: Account) -> dict[str, list[str]]:
    """Return the keys of JSON reports by schema. `account` is an account of an engine with every field set."""
    answers = [Answer(address="tcp://h:1", account=account), Answer(address="tcp://h:2", error="x")]
    with tempfile.NamedTemporaryFile() as out:
        why = _run("why late LOG --json OUT", {"LOG": str(DATA / "leaks.jsonl"), "OUT": out.name})
    why["engines"] = [why_report.engine(x) for x in answers]
    keys = {each["schema"]: set(_keys(each)) for each in (_bench(), why)}
    doctor = show.as_json(Facts(), (), 1.0)
    keys[doctor["schema"]] = {*_keys(doctor), *_fields(Facts, ".facts"), *_fields(Finding, ".findings[]")}
    for kind in (Folder, Pruned, table.Head):
        (schema,) = (field.default for field in msgspec.structs.fields(kind) if field.name == "schema")
        keys[str(schema)] = set(_fields(kind))
    keys[table.SCHEMA] |= set(_fields(table.Row))
    return {schema: sorted(found) for schema, found in keys.items()}


def commanded(name: str) -> dict[str, list[str]]:
    """The same of what a command writes that needs no engine."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {each: str(Path(folder) / each) for each in ("ONE", "OTHER", "LAYOUTS", "OUT")}
        for each in ("ONE", "OTHER"):
            Path(paths[each]).write_bytes((DATA / "bench.json").read_bytes())
        if name == "plan":
            _run(COMMANDS["layout"], paths | {"OUT": paths["LAYOUTS"]})
        document = _run(COMMANDS[name], paths)
    return {document["schema"]: sorted(set(_keys(document)))}


def _run(command: str, paths: dict[str, str]) -> dict[str, Any]:
    argv = [paths.get(word, word) for word in command.split()]
    done = CliRunner().invoke(app, argv)
    if done.exit_code not in (0, 1) or not isinstance(done.exception, SystemExit | None):
        raise ConfigError(f"asynckv {' '.join(argv)} failed: {done.exception or done.output}")
    found: dict[str, Any] = json.loads(Path(paths["OUT"]).read_bytes())
    return found


def _bench() -> dict[str, Any]:
    """Return the report of a run that did not take place."""
    outcome = Outcome(0, seconds=0.1, num_bytes=100, planned=8, posted=2, phases={"read": 0.05})
    experiment = Experiment(Options(), Model("tiny", (Heads(4, 16),) * 2), Workload("fixed 32", (32, 32)))
    return report.make(experiment, Measured(submitted=1, windows_s=[0.5], outcomes={0: [outcome]}))


def _keys(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all keys in a document, such as `.requests[].lanes[].rank`."""
    if isinstance(value, dict):
        is_data = path.endswith(BY_DATA)
        for name, each in value.items():
            here = f"{path}.{'*' if is_data else name}"
            yield here
            yield from _keys(each, here)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _keys(each, f"{path}[]")


def _fields(kind: Any, path: str = "") -> Iterator[str]:
    """Yield the same keys for a type with documents as values."""
    match kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind):
        case msgspec.inspect.StructType(fields=fields):
            for field in fields:
                yield f"{path}.{field.encode_name}"
                yield from _fields(field.type, f"{path}.{field.encode_name}")
        case msgspec.inspect.UnionType(types=types):
            for each in types:
                yield from _fields(each, path)
        case msgspec.inspect.VarTupleType(item_type=item) | msgspec.inspect.ListType(item_type=item):
            yield from _fields(item, f"{path}[]")
        case msgspec.inspect.DictType(value_type=item):
            yield f"{path}.*"
            yield from _fields(item, f"{path}.*")
        case _:
            return
