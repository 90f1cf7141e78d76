"""Sources of engines: URLs in options, a file that is read repeatedly, and names that DNS resolves repeatedly."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog

from asynckv.edges.aside import Aside
from asynckv.errors import ConfigError

T = TypeVar("T")
Found = dict[tuple[str, str], None]
DNS = "dns+"
URL = re.compile(r"(https?|dns\+http)://[^\s/?#@]+(/[^\s?#]*)?")
"""URLs without a password, because it would appear in log and metrics."""
MOST_BYTES = 2**20  # of a file
PATIENCE_S = 2.0
"""Time that a source may take. If a disk or a resolver hangs, only its thread waits for it."""
ASIDE = Aside("asynckv-source")

log = structlog.get_logger()


def checked(url: str) -> str:
    """Return a URL without a slash at its end."""
    try:
        if not URL.fullmatch(url) or not urlsplit(url).hostname or urlsplit(url).port == 0:
            raise ValueError
        (urlsplit(url).hostname or "").encode("idna")  # resolvers do the same
    except ValueError:
        example = "such as http://10.0.0.7:8100, or dns+http://prefill:8100 for every address of a name"
        raise ConfigError(f"{url!r} is not a URL, {example}") from None
    return url.rstrip("/")


def parse(text: str) -> Found:
    """Read the lines of a file, such as `prefill http://10.0.0.7:8100`; text after a # is ignored."""
    found: Found = {}
    for number, line in enumerate(text.splitlines(), 1):
        match line.partition("#")[0].split():
            case []:
                pass
            case [("prefill" | "decode") as role, url]:
                found[role, checked(url)] = None
            case _:
                raise ConfigError(f"line {number} is {line.strip()!r}; write prefill URL, or decode URL")
    return found


class Sources:
    def __init__(self, prefill: Sequence[str], decode: Sequence[str], file: Path | None = None) -> None:
        given = [*(("prefill", url) for url in prefill), *(("decode", url) for url in decode)]
        self._given: Found = {(role, checked(url)): None for role, url in given}
        self._file = file
        self._lines: Found = {} if file is None else self._read(file)
        self._addresses: dict[str, list[str]] = {}
        self._troubles: dict[str, str] = {}
        self._asked: dict[str, asyncio.Future[Any]] = {}

    async def look(self) -> Found:
        """Return the current engines. A source that fails keeps its earlier ones, and is logged once."""
        if self._file is not None:
            try:
                lines = await self._answer(str(self._file), self._read, self._file)
                if gone := {role for role, _ in self._lines} - {role for role, _ in lines}:
                    raise ConfigError(f"--engines {self._file}: no longer names a {min(gone)} engine")
                self._lines = lines
                self._found(str(self._file), "")
            except (ConfigError, TimeoutError) as exc:
                self._found(str(self._file), str(exc))
        urls = [(role, url) for role, url in self._given | self._lines]
        await asyncio.gather(*(self._resolve(url) for url in {url for _, url in urls if url.startswith(DNS)}))
        return {(role, each): None for role, url in urls for each in self._addresses.get(url, [url])}

    async def _answer(self, place: str, work: Callable[..., T], *args: Any) -> T:
        """Return the answer of a source, or raise TimeoutError. A source that hangs is not asked again meanwhile."""
        if place not in self._asked:
            self._asked[place] = asyncio.get_running_loop().run_in_executor(ASIDE, work, *args)
        answer: asyncio.Future[T] = self._asked[place]
        if not (await asyncio.wait([answer], timeout=PATIENCE_S))[0]:
            raise TimeoutError(f"there was no answer within {PATIENCE_S:g} s")
        del self._asked[place]
        return answer.result()

    @staticmethod
    def _read(file: Path) -> Found:
        try:
            # Opening a FIFO would wait for its writer, and some devices have no end.
            with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
                if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                    raise ConfigError("it is not a regular file")
                data = opened.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise ConfigError(f"it is larger than {MOST_BYTES >> 20} MiB")
            text = data.decode()
            if not text.endswith("\n"):
                raise ConfigError("the last line has no newline, so the file may be cut off")
            return parse(text)
        except OSError as exc:
            raise ConfigError(f"--engines {file}: cannot be read: {exc.strerror}") from exc
        except (ConfigError, ValueError) as exc:
            raise ConfigError(f"--engines {file}: {exc}") from exc

    async def _resolve(self, url: str) -> None:
        parts = urlsplit(url.removeprefix(DNS))
        port = parts.port or 80
        try:
            found = await self._answer(url, socket.getaddrinfo, parts.hostname, port, 0, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as exc:  # a TimeoutError is an OSError
            self._addresses.setdefault(url, [])
            return self._found(url, str(exc))
        # Use one address family only, because an engine with IPv4 and IPv6 would count twice.
        hosts = sorted({str(address[0]) for family, *_, address in found if family == found[0][0]})
        where = (f"[{host}]" if ":" in host else host for host in hosts)
        self._addresses[url] = [f"http://{host}:{port}{parts.path}" for host in where]
        self._found(url, "")

    def _found(self, place: str, trouble: str) -> None:
        if trouble and trouble != self._troubles.get(place, ""):
            log.warning("engines_not_found", place=place, trouble=trouble, remedy="the engines known before are kept")
        self._troubles[place] = trouble
