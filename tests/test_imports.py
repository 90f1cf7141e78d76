"""Arrows point inward and make no circle: pure rooms below, one door per library, and importing asynckv is cheap."""

from __future__ import annotations

import ast
import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import asynckv
import asynckv.offload
from tests.commands import python

PACKAGE = Path(asynckv.__file__).parent

CORE_MAY_IMPORT = {
    "__future__",
    "asynckv.arguments",  # what callers give: pure checks
    "asynckv.config",  # durations and bounds: frozen values, checked once
    "asynckv.core",
    "asynckv.geometry",
    "asynckv.errors",
    "asynckv.told",  # the events of the log, as types
    "bisect",
    "collections",
    "contextlib",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "numpy",
    "operator",
    "re",
    "types",
    "typing",
}
DOORS = {"nixl": "edges/nic/nixl.py", "zmq": "edges/control/zmq.py", "torch": "edges/torch.py"}


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


@functools.cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Those at a file's top and those inside functions; the rest of what was parsed is not kept."""
    return tuple(node for node in nodes(path) if isinstance(node, ast.Import | ast.ImportFrom))


def imports(path: Path) -> Iterator[str]:
    for node in import_statements(path):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, level=0) if module:
                yield module
            case ast.ImportFrom():
                raise AssertionError(f"relative import in {path}")


ROOMS = {
    "geometry": CORE_MAY_IMPORT - {"asynckv.core", "asynckv.config"},
    "core": CORE_MAY_IMPORT,
    "account": CORE_MAY_IMPORT | {"asynckv.account"},
    "offload": CORE_MAY_IMPORT | {"asynckv.offload"},
}
PUBLIC = PACKAGE / "offload" / "__init__.py"
"""The public names of offload; it loads when it is asked for, so that the room itself knows nothing of an engine."""

PURE = [path for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py")) if path != PUBLIC]


@pytest.mark.parametrize("path", PURE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_the_rooms_are_pure(path: Path) -> None:
    allowed = ROOMS[path.parent.name]
    assert {n for n in imports(path) if not any(n == ok or n.startswith(f"{ok}.") for ok in allowed)} == set()


@pytest.mark.parametrize("path", PURE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_they_never_print_opens_or_awaits(path: Path) -> None:
    for node in nodes(path):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"print", "open", "input", "exec", "eval", "__import__"}


# -- rooms, and the arrows between them ---------------------------------------------------------------

ORDER = (
    "version",
    "public",
    "errors",
    "arguments",
    "config",
    "told",
    "geometry",
    "core",
    "account",
    "offload",
    "keys",
    "ports",
    "results",
    "scheduler",
    "hashes",
    "observe",
    "edges",
    "engine",
    "tiers",
    "embed",
    "layout",
    "asynckv",  # the public names
    "integrations",
    "testing",
    "tools",
    "__main__",
)
"""The rooms, the lowest first. A module imports from its own room and from lower ones."""

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def arrows(path: Path) -> set[str]:
    """Modules of ours that one imports: at its top, inside functions, and for types alone."""
    if path == PUBLIC:
        return set()
    found = set()
    for node in import_statements(path):
        match node:
            case ast.Import(names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {name if (name := f"{module}.{alias.name}") in MODULES else module for alias in names}
            case ast.ImportFrom():
                raise AssertionError(f"relative import in {path}")
    return found & MODULES.keys()


def all_arrows() -> set[tuple[str, str]]:
    return {(module, other) for module, path in MODULES.items() for other in arrows(path) - {module}}


def upward(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(a, b) for a, b in arrows if ORDER.index(room(a)) < ORDER.index(room(b))}


def circles(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    while arrows:
        importers, imported = {a for a, _ in arrows}, {b for _, b in arrows}
        inner = {(a, b) for a, b in arrows if a in imported and b in importers}
        if inner == arrows:
            break
        arrows = inner
    return arrows


def test_the_edges_families_do_not_know_each_other() -> None:
    may_use = {"": "", "choice": "nic survivor", "control": "", "nic": "", "survivor": "nic", "files": "nic"}

    def family(module: str) -> str:
        name = module.removeprefix("asynckv.edges").strip(".").partition(".")[0]
        return name if name in may_use else ""

    inside = {(a, b) for a, b in all_arrows() if room(a) == room(b) == "edges"}
    crossed = {(family(a), family(b)) for a, b in inside if family(b) not in {"", family(a)}}
    assert crossed == {(a, b) for a, others in may_use.items() for b in others.split()}


def test_every_module_is_in_a_room() -> None:
    assert {room(module) for module in MODULES} == set(ORDER)


def test_no_arrow_points_to_a_higher_room() -> None:
    assert upward(all_arrows()) == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(all_arrows()) == set()


def test_circles_and_upward_arrows_are_seen() -> None:
    below = {("asynckv.core.a", "asynckv.geometry.b"), ("asynckv.core.c", "asynckv.core.a")}
    assert circles(below) == upward(below) == set()
    assert circles({*below, ("asynckv.core.a", "asynckv.core.c")}) == {
        ("asynckv.core.a", "asynckv.core.c"),
        ("asynckv.core.c", "asynckv.core.a"),
    }
    assert upward({*below, ("asynckv.geometry.b", "asynckv.core.c")}) == {("asynckv.geometry.b", "asynckv.core.c")}


# -- three zones: the engine, its tools, the laboratory ---------------------------------------------------------

ENGINE = {module for module in MODULES if room(module) not in {"tools", "__main__"}}


def test_the_engine_imports_none_of_its_tools() -> None:
    assert {(a, b) for a, b in all_arrows() if a in ENGINE and b not in ENGINE} == set()


def test_the_package_imports_nothing_of_the_laboratory_or_the_scripts() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not {n for n in imports(path) if n.split(".")[0] in {"tests", "scripts", "docs"}}


LOADING = {
    "the package": ("asynckv", frozenset({"asynckv"})),
    "an engine": ("asynckv; asynckv.Engine", ROOMS.keys() - {"offload"} | {"asynckv", "edges", "engine", "observe"}),
    "a thread": (
        "asynckv; asynckv.EngineThread",
        ROOMS.keys() | {"asynckv", "edges", "embed", "engine", "observe", "tiers"},
    ),
    "what tests are written with": ("asynckv.testing", {"asynckv", "geometry", "core", "testing"}),
}
GROUND = {
    *("version", "public", "errors", "arguments", "config", "told"),
    *("keys", "ports", "results", "scheduler", "hashes"),
}


@pytest.mark.parametrize("what", LOADING)
def test_what_is_loaded(what: str) -> None:
    """Whole rooms; vLLM's connector is in `tests/vllm`, where there is a vLLM to load it into."""
    code, rooms = LOADING[what]
    code = f"import sys, {code}; print(*(x for x in sys.modules if x.partition('.')[0] == 'asynckv'))"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert {room(module) for module in done.stdout.split()} - GROUND == rooms - GROUND


SAME_NAME = {
    "BytesDiffer": "the public error, and the event that logs it, whose name in logs is the class's",
    "Difference": "of two layouts, and of bytes that were read twice",
    "BlocksRetired": "the public error, and the event that logs it, whose name in logs is the class's",
    "Refused": "the message between ranks and the event; counters, and logs, have the names of the classes",
}
"""Classes of one name in modules that an engine loads, and why."""


def test_a_class_name_means_one_thing_in_what_an_engine_loads() -> None:
    rooms = LOADING["an engine"][1] | GROUND | {"offload", "tiers"}
    loaded = (path for module, path in MODULES.items() if room(module) in rooms)
    names = Counter(node.name for path in loaded for node in nodes(path) if isinstance(node, ast.ClassDef))
    assert {name for name, number in names.items() if number > 1} == SAME_NAME.keys()


# -- libraries -------------------------------------------------------------------------------------------------


def test_each_library_has_one_door() -> None:
    for path in PACKAGE.rglob("*.py"):
        for name in imports(path):
            door = DOORS.get(name.split(".")[0].removesuffix("_cu12").removesuffix("_cu13"))
            # vLLM hands tensors in.
            is_inside = name == "torch" and PACKAGE / "integrations/vllm" in path.parents
            assert door is None or path == PACKAGE / door or is_inside, f"{path} imports {name}"


def test_nothing_pickles() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not {n for n in imports(path) if n.split(".")[0] in {"pickle", "marshal", "shelve", "multiprocessing"}}


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, asynckv\n"
        "heavy = {'torch', 'nixl', 'nixl_cu12', 'nixl_cu13', 'numpy', 'zmq', 'structlog'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "assert asynckv.Engine and asynckv.PrefillRanks\n"
        "heavy = {'torch', 'nixl', 'nixl_cu12', 'nixl_cu13', 'zmq'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_every_public_name_loads() -> None:
    assert {name for name, _ in inspect.getmembers(asynckv)} >= set(asynckv._HOME) >= set(asynckv.__all__)
    for name in asynckv.offload.__all__:
        assert getattr(asynckv.offload, name).__name__ == name
    for module in (asynckv, asynckv.offload):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'Missing'"):
            _ = module.Missing


def test_what_needs_an_extra_can_be_named_without_it() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import inspect, asynckv; from asynckv import *; from asynckv import Metrics\n"
        "assert inspect.getmembers(asynckv) and hasattr(asynckv, 'Metrics') and 'Metrics' not in asynckv.__all__\n"
        "try: Metrics()\n"
        "except ImportError as exc: print(exc)"
    )
    done = python("-c", code)
    says = "metrics need prometheus_client: pip install 'asynckv[metrics]'\n"
    assert (done.returncode, done.stdout) == (0, says), done.stderr
