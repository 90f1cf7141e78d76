"""Sphinx configuration. Nothing here needs the network."""

from __future__ import annotations

from importlib.metadata import version as installed_version

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

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
napoleon_use_ivar = True

# Other projects' names cannot be resolved without fetching their inventories.
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|contextlib|dataclasses|enum|pathlib|types|typing)(\..*)?"),
    (r"py:.*", r"(anyio|msgspec|nixl|np|npt|numpy|rich|structlog|torch|typer|zmq)(\..*)?"),
    (r"py:class", r"(Any|Awaitable|Callable|Iterable|Iterator|Mapping|Path|Sequence)"),
]
