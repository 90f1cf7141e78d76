"""Destinations of events: the application's logging, a file of the engine's own, or a program's choice.

If the application has configured structlog, events go there; otherwise they go to the standard logger `asynckv`.
`configure_logging` is for programs that are asynckv's own. Control characters in texts from peers are escaped wherever
people read them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Literal, TextIO

import structlog

from asynckv.arguments import each_text, shown, without_control
from asynckv.config import LogConfig, check_choice
from asynckv.errors import ConfigError
from asynckv.observe.sink import FileSink, file_name

_logfmt = structlog.processors.LogfmtRenderer()
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(
    level: Literal["debug", "info", "warning", "error"] = "info",
    *,
    form: Literal["json", "console"] = "json",
    stream: TextIO | None = None,
    file: str | os.PathLike[str] = "",
) -> None:
    """Set up structlog for a program of asynckv's own: JSON lines or a console, on stderr by default.

    Args:
        level: The lowest level that is logged.
        form: The format of a line.
        stream: The stream to write to, if not stderr.
        file: A file to write instead, as `LogConfig.file`: a thread writes it, and it is rotated by default settings.

    Raises:
        ConfigError: The level or form does not exist, or the file cannot be written.
    """
    check_choice("log level", level, *LEVELS)
    check_choice("form", form, "json", "console")
    if stream is not None and not callable(getattr(stream, "write", None)):
        raise ConfigError(f"stream is {shown(stream)}; give a text file, such as sys.stderr")
    config = LogConfig(file=file)
    if stream is not None and config.file:
        raise ConfigError("both stream and file were given; lines go to one of them")
    where: Any = file_sink(config) if config.file else stream or sys.stderr
    renderer: Any = (
        structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer(colors=not config.file)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if form == "json" else _for_terminals,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(where),
        cache_logger_on_first_use=False,
    )


def logger_for(**bound: Any) -> tuple[Any, int]:
    """Return a bound logger and the lowest level that it logs."""
    if structlog.is_configured():
        logger = structlog.get_logger("asynckv", **bound)
        logs = getattr(logger, "is_enabled_for", lambda level: True)
        return logger, next(filter(logs, sorted(LEVELS.values())), logging.CRITICAL)
    standard = logging.getLogger("asynckv")
    logger = structlog.wrap_logger(
        standard,
        processors=[structlog.stdlib.filter_by_level, _to_standard],
        wrapper_class=structlog.stdlib.BoundLogger,
        **bound,
    )
    return logger, standard.getEffectiveLevel()


def file_sink(config: LogConfig, bound: Mapping[str, Any] = MappingProxyType({})) -> FileSink:
    engine_id = str(bound.get("engine_id", ""))
    place = str(bound.get("rank", "")).removeprefix(f"{engine_id}/").partition("@")[0]
    path = file_name(os.fspath(config.file), engine_id, place.replace("/", "-"))
    return FileSink.shared(path, config.max_bytes, config.backups)


def _to_standard(logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Put fields into the message, for formats that show nothing else, and into attributes, for the others."""
    out = structlog.stdlib.render_to_log_kwargs(logger, method, event)
    if fields := out.get("extra"):
        out["msg"] = without_control(f"{out['msg']} {_logfmt(logger, method, dict(fields))}")
    return out


def _for_terminals(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape control characters, because a peer's text must not move a cursor or begin a line."""
    return each_text(event, without_control)
