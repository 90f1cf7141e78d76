"""Write docs/configuration.md from the configuration's dataclasses and their docstrings; a test compares.

A field that its docstring does not explain is refused here, and so is an explained field that does not exist.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from asynckv import config
from scripts import command
from scripts.draw.drawing import DOCS, between, table

KIB, MIB = 1024, 1024 * 1024

VARIABLES = (
    (
        "`UCX_NET_DEVICES`",
        "the network devices that carry KV, such as `mlx5_0:1` or `eth0`; all that UCX finds if unset. Set it on every "
        "host with several networks",
        "[devices](deploy.md#which-devices-ucx-uses)",
    ),
    (
        "`UCX_TLS`",
        "the transports that UCX may use. Leave it unset: a list would have to name those of the GPU, and those within "
        "a host, as well",
        "[devices](deploy.md#which-devices-ucx-uses)",
    ),
    (
        "`UCX_TCP_PORT_RANGE`",
        "the ports on which UCX listens, such as `20000-20100`; any if unset. Set it behind a firewall",
        "[ports](deploy.md#ports)",
    ),
    (
        "`UCX_TCP_TX_SEG_SIZE`, `UCX_TCP_RX_SEG_SIZE`",
        "asynckv gives its own agents 64k. A variable that is set wins: set none, or 64k",
        "[two hosts](bench.md#two-hosts-measure-the-wire-then-asynckv)",
    ),
    (
        "`UCX_PROTO_INFO`",
        "with `used`, UCX prints what it used when a connection ends",
        "[devices](deploy.md#which-devices-ucx-uses)",
    ),
    (
        "`UCX_LOG_FILE`",
        "where UCX logs; by itself to stdout. asynckv sets `/dev/stderr` if it is unset",
        "[logging](logging.md)",
    ),
    ("`NIXL_LOG_LEVEL`", "what NIXL logs. asynckv sets `WARN` if it is unset", "[logging](logging.md)"),
    (
        "`NIXL_PLUGIN_DIR`",
        "the folder of NIXL's plug-ins. Leave it unset, unless you have built NIXL yourself",
        "[doctor](doctor.md)",
    ),
)

ENVIRONMENT = """## Environment variables

asynckv has none of its own. NIXL and UCX read these when the first engine of the process starts:

"""
DOCTOR = """
[`asynckv doctor`](doctor.md) reads them, and says which are unknown, contradict each other or cost speed.
"""


def environment() -> str:
    """Return the section on the variables of NIXL and UCX that matter."""
    return f"{ENVIRONMENT}{table('| variable | meaning | read on |', VARIABLES)}{DOCTOR}"


def explained(owner: type) -> tuple[str, dict[str, str]]:
    """Return the summary of a class, and the meaning of each of its fields.

    Raises:
        ConfigError: The docstring explains other fields than the class has.
    """
    about, _, listed = (inspect.getdoc(owner) or "").partition("\n\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    found = {name: re.sub(r"\s+", " ", text) for name, text in entries}
    names = [field.name for field in fields(owner)]
    command.check(list(found) == names, f"{owner.__name__} explains {', '.join(found)}; it has {', '.join(names)}")
    return about, found


def default(field: Field[Any]) -> str:
    """Return a default in readable form, with its unit."""
    if field.default_factory is not MISSING:
        return "`{}`" if field.default_factory is dict else f"`{getattr(field.default_factory, '__name__', '')}()`"
    value = field.default
    if value is MISSING:
        return "required"
    if isinstance(value, bool) or value is None:
        return f"`{value}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if "bytes" in field.name and isinstance(value, int) and value >= size and value % size == 0:
            return f"{value // size:,} {unit}"
    text = (
        f"{value:,.3g}" if isinstance(value, float) and value < 1 else f"{value:,g}" if value < 1e5 else f"{value:,.0f}"
    )
    unit = " / s" if field.name.endswith("_per_s") and value else " s" if field.name.endswith("_s") else ""
    return text + unit


def section(owner: type) -> str:
    """Return the section of one class, with a table of its fields."""
    about, found = explained(owner)
    about = re.sub(r" \(`docs/(\w+)\.md`\)", r" ([\1](\1.md))", about)
    rows = []
    for field in fields(owner):
        kind = str(field.type).replace("os.PathLike[str]", "PathLike")
        kind = kind.removeprefix("Literal[").removesuffix("]") if kind.startswith("Literal") else kind
        rows.append((f"`{field.name}`", f"`{kind}`<br>{default(field)}", found[field.name]))
    return f"## {owner.__name__}\n\n{about}\n\n{table('| field | type, default | meaning |', rows)}"


def page() -> str:
    """Return all sections."""
    classes = {name for name, kind in vars(config).items() if is_dataclass(kind)}
    first = ["EngineConfig", "PullConfig", "LeaseConfig", "NixlConfig", "KeysConfig", "LogConfig", "InspectConfig"]
    names = [*first, *(name for name in sorted(classes) if name not in first)]
    return "\n".join((*(section(getattr(config, name)) for name in names), environment()))


def files() -> dict[Path, str]:
    """Return the page with its sections made anew."""
    return between(DOCS / "configuration.md", "fields", page())
