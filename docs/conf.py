"""Sphinx configuration. Nothing here needs the network."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from importlib.metadata import version as installed_version

import msgspec
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

project = "asynckv"
author = "The asynckv maintainers"
copyright = "the asynckv maintainers"
version = release = installed_version("asynckv")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "newsfragments"]

html_theme = "furo"
html_title = "asynckv"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# In docstrings, one pair of backticks: a name of ours is linked, everything else is shown as code.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_use_ivar = True

# Other projects' names cannot be resolved without fetching their inventories.
nitpick_ignore_regex = [
    (r"py:obj", r".*"),
    (r"py:.*", r"(asyncio|collections|contextlib|dataclasses|enum|mmap|os|pathlib|types|typing)(\..*)?"),
    (r"py:.*", r"(anyio|msgspec|nixl|np|npt|numpy|prometheus_client|rich|structlog|torch|typer|zmq)(\..*)?"),
    (r"py:class", r"(Any|Awaitable|Callable|Iterable|Iterator|Mapping|Path|Sequence|TracerProvider)"),
    # Types of arguments that nobody but asynckv's own tests gives. Public names are found under both of theirs.
    (r"py:class", r"asynckv\.(core|edges|embed|engine|geometry|observe|offload|ports|testing)\..*"),
]


def is_data(obj: object) -> bool:
    return inspect.isclass(obj) and (dataclasses.is_dataclass(obj) or issubclass(obj, msgspec.Struct | tuple))


def write_signature(
    app: Sphinx, what: str, name: str, obj: typing.Any, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None] | None:
    """Say of plain data no types, which stand below, and of errors and configuration nothing."""
    if signature and (what == "exception" or obj.__module__ == "asynckv.config"):
        return "", None
    if is_data(obj):
        wanted = [p.replace(annotation=p.empty) for p in inspect.signature(obj).parameters.values()]
        text = str(inspect.Signature(wanted))
        return re.sub(r"=(<factory>|UNSET)", "=...", text), None
    return None


def write_types(app: Sphinx, what: str, name: str, obj: typing.Any, options: object, lines: list[str]) -> None:
    """Write `name (type): ...` in lists of attributes; of configuration, say where its fields are listed."""
    if "Attributes:" not in lines or not inspect.isclass(obj):
        return
    start = lines.index("Attributes:")
    if obj.__module__ == "asynckv.config":
        lines[start:] = [f"`Every field <configuration.html#{obj.__name__.lower()}>`__ with its default and meaning."]
        return
    try:
        types = typing.get_type_hints(obj)
    except NameError:
        types = {}
    for at, line in enumerate(lines[start + 1 :], start + 1):
        found = re.fullmatch(r"    (\w+): (.*)", line)
        if found and found[1] in types:
            lines[at] = f"    {found[1]} ({stringify_annotation(types[found[1]], 'smart')}): {found[2]}"


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", write_signature)
    app.connect("autodoc-process-docstring", write_types, priority=400)  # before napoleon reads it
