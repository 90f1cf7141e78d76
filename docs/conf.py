"""Sphinx configuration. Neither the build nor the built site needs the network."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path

import msgspec
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.util import logging
from sphinx.util.typing import stringify_annotation

from asynckv.version import VERSION

logger = logging.getLogger(__name__)

project = "asynckv"
author = "The asynckv maintainers"
copyright = "the asynckv maintainers"
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "newsfragments"]

# A block without a language is output, not Python.
highlight_language = "none"

html_theme = "furo"
# The title stands above the navigation of every page, so it names the version.
html_title = f"asynckv {VERSION}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# The repository has no public address, so "view page source" opens the copy that is built with the site.
html_copy_source = html_show_sourcelink = True

# A copy of a block with prompts holds only the commands.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# In docstrings, one pair of backticks links a name of asynckv, and shows everything else as code.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_use_ivar = True

# Names of other projects could be resolved only by fetching their inventories.
nitpick_ignore_regex = [
    (r"py:obj", r".*"),
    (r"py:.*", r"(asyncio|collections|contextlib|dataclasses|enum|mmap|os|pathlib|types|typing)(\..*)?"),
    (r"py:.*", r"(anyio|msgspec|nixl|np|npt|numpy|prometheus_client|rich|structlog|torch|typer|zmq)(\..*)?"),
    (r"py:class", r"(Any|Awaitable|Callable|Groups|Iterable|Iterator|Key|Mapping|Path|Sequence|State|TracerProvider)"),
    # Types of arguments that only asynckv's own tests give. A public name is found under both of its names.
    (r"py:class", r"asynckv\.(account|core|edges|embed|engine|geometry|observe|offload|ports|testing|tiers|told)\..*"),
]


def is_data(obj: object) -> bool:
    return inspect.isclass(obj) and (dataclasses.is_dataclass(obj) or issubclass(obj, msgspec.Struct | tuple))


MADE_BY_HAND = ("asynckv.edges", "asynckv.embed", "asynckv.geometry", "asynckv.testing")
"""Packages with the plain data that callers make themselves."""


def write_signature(
    app: Sphinx, what: str, name: str, obj: typing.Any, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None] | None:
    """Leave the types out of signatures of plain data, and leave out signatures that callers never use."""
    if what == "exception" or is_data(obj):
        if not signature or not obj.__module__.startswith(MADE_BY_HAND):
            return signature and "", None
        wanted = [p.replace(annotation=p.empty) for p in inspect.signature(obj).parameters.values()]
        return re.sub(r"=(<factory>|UNSET)", "=...", str(inspect.Signature(wanted))), None
    return None


def write_types(app: Sphinx, what: str, name: str, obj: typing.Any, options: object, lines: list[str]) -> None:
    """Link pages, and write `name (type): ...` in lists of attributes. Configuration has a page of its own."""
    lines[:] = [re.sub(r"`docs/(\w+)\.md`", r":doc:`\1`", line) for line in lines]
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


LEADS_TO_CODE = ("contributing", "design", "reliability", "structure")
"""Pages for contributors: the built site links the files that they name."""


def link_files(app: Sphinx, doctree: nodes.document) -> None:
    """Link the name of a file of the checkout to a copy of that file."""
    if app.env.current_document.docname not in LEADS_TO_CODE:
        return
    root = Path(app.srcdir).parent
    for name in list(doctree.findall(nodes.literal)):
        text = name.astext()
        is_one = text.endswith(".py") and text != "__init__.py"  # many files have this name
        found = [path for path in (root / text, root / "asynckv" / text) if is_one and path.is_file()]
        if found and not isinstance(name.parent, nodes.reference | addnodes.download_reference):
            link = addnodes.download_reference("", "", reftarget=f"/../{found[0].relative_to(root)}", refdoc="")
            link["refdoc"] = app.env.current_document.docname
            name.replace_self(link)
            link += name


def check_that_it_is_complete(app: Sphinx, exception: Exception | None) -> None:
    """Warn if a page loads anything from the network, because the site is read from files too."""
    if exception is not None or app.builder.format != "html":
        return
    loads = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)="(?:https?:)?//[^>]*>""")
    imports = re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//[^;]*""")
    for path in sorted(Path(app.outdir).rglob("*")):
        pattern = {".html": loads, ".css": imports, ".svg": imports}.get(path.suffix)
        for found in pattern.findall(path.read_text(encoding="utf-8")) if pattern else ():
            logger.warning("%s loads from the network: %s", path.name, found)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", write_signature)
    app.connect("autodoc-process-docstring", write_types, priority=400)  # before napoleon reads it
    app.connect("doctree-read", link_files, priority=400)  # before Sphinx collects the files to copy
    app.connect("build-finished", check_that_it_is_complete)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
