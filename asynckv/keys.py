"""Key files of this engine, and of the engines that it talks to.

The format is ZMQ's own for certificates (`zmq.auth`). A key is 32 bytes; in files it is Z85 text of 40 characters.
No error and no repr contains a secret.
"""

from __future__ import annotations

import base64
import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from asynckv.errors import ConfigError

PUBLIC, SECRET = ".key", ".key_secret"
MOST_BYTES = 64 * 1024  # of one key file
MOST_KEYS = 65_536  # of one allow-list
FRESH_S = 1.0  # seconds for which an allow-list is valid while its directory looks unchanged: a file can change in it
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LINE = re.compile(rb"^[ \t]*(public|secret)-key[ \t]*=[ \t]*[\"']?([^\"'\s]*)[\"']?[ \t\r]*$", re.MULTILINE)
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
"""The alphabets of ZMQ and of Python's `b85decode`, which otherwise are the same code."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One engine's keys, 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)


def decode_z85(text: bytes) -> bytes:
    """Decode one key, or raise `ValueError` if this is not the Z85 text of 32 bytes."""
    if len(text) == 40 and set(text) <= set(_Z85):
        with suppress(ValueError):  # five characters can encode more than four bytes hold
            return base64.b85decode(text.translate(bytes.maketrans(_Z85, _B85)))
    raise ValueError("not a key of 40 Z85 characters")


def encode_z85(key: bytes) -> str:
    """Encode one key of 32 bytes."""
    return base64.b85encode(key).translate(bytes.maketrans(_B85, _Z85)).decode("ascii")


def read_pair(path: Path) -> KeyPair:
    """Read an engine's own key file, or raise `ConfigError`. The caller checks that the two keys belong together."""
    data, mode = _read(path, "the key file")
    found = _parse(path, data)
    if "secret" not in found:
        raise ConfigError(
            f"the key file {str(path)!r} holds no secret key; give the file NAME{SECRET} that asynckv keygen wrote, "
            f"not NAME{PUBLIC}"
        )
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"the key file {str(path)!r} has mode {stat.S_IMODE(mode):04o}, so that other users than its owner can "
            f"read the secret; run chmod 600 {path}, and make new keys if another user may have read it"
        )
    return KeyPair(found["public"], found["secret"])


def read_public(path: Path) -> bytes:
    """Read another engine's public key; raise `ConfigError` if it cannot be read, or holds a secret."""
    found = _parse(path, _read(path, "the public key file")[0])
    if "secret" in found:
        raise ConfigError(
            f"the public key file {str(path)!r} holds a secret key, which belongs on one engine only; make new keys "
            f"with asynckv keygen, and put only NAME{PUBLIC} here"
        )
    return found["public"]


class AllowList:
    """The public keys (`*.key`) in a directory; added, removed and changed files count at the next lookup."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.errors = 0  # failures to read a file or the directory; a file that cannot be read admits no key
        self._files: dict[str, tuple[tuple[int, ...], bytes]] = {}
        self._keys: frozenset[bytes] = frozenset()
        self._stamp: tuple[int, ...] = ()
        self._fresh_until = -1.0
        try:
            # A ConfigMap is mounted with mode 0777, but read-only.
            if os.stat(directory).st_mode & stat.S_IWOTH and not os.statvfs(directory).f_flag & os.ST_RDONLY:
                raise ConfigError(
                    f"every user may write into the directory of authorized keys {str(directory)!r}, and so admit "
                    f"any key; run chmod o-w {directory}"
                )
            self._load(is_start=True)
        except (OSError, ValueError) as exc:
            cause = exc.strerror if isinstance(exc, OSError) else exc
            raise ConfigError(
                f"the directory of authorized keys {str(directory)!r:.300} cannot be read: {cause}; make it, and copy "
                f"into it the {PUBLIC} file of every engine that this one talks to (asynckv keygen NAME)"
            ) from exc
        if not self._keys:
            raise ConfigError(
                f"the directory of authorized keys {str(directory)!r} has no *{PUBLIC} file, so no engine could "
                f"connect; copy into it the {PUBLIC} file of every engine that this one talks to (asynckv keygen NAME)"
            )

    def __contains__(self, public: bytes) -> bool:
        self.refresh()
        return public in self._keys

    def refresh(self) -> None:
        """Read the directory again if it has changed, unless that was checked just now."""
        try:
            if time.monotonic() >= self._fresh_until or _stamp(os.stat(self.directory)) != self._stamp:
                self._load(is_start=False)
        except OSError:
            # Removing the list removes the permission.
            self._files, self._keys, self._stamp = {}, frozenset(), ()
            self.errors += 1

    def __len__(self) -> int:
        return len(self._keys)

    def _load(self, is_start: bool) -> None:
        # The stamp is read before the entries, so that a file that is added meanwhile is seen the next time.
        self._stamp = _stamp(os.stat(self.directory))
        self._fresh_until = time.monotonic() + FRESH_S
        known, self._files = self._files, {}
        for name in sorted(x for x in os.listdir(self.directory) if x.endswith(PUBLIC))[:MOST_KEYS]:
            path = self.directory / name
            try:
                stamp = _stamp(path.stat())
                if name not in known or known[name][0] != stamp:
                    known[name] = stamp, read_public(path)
                self._files[name] = known[name]
            except (OSError, ConfigError):
                if is_start:
                    raise
                self.errors += 1
        self._keys = frozenset(public for _, public in self._files.values())


def write_pair(directory: Path, name: str, pair: KeyPair) -> tuple[Path, Path]:
    """Write `NAME.key_secret`, readable by its owner only from its first moment on, and `NAME.key`; return both paths.
    If that raises `ConfigError`, nothing is left behind.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.120} is not a valid name for keys; use up to 100 letters, digits, dots, dashes and underscores, "
            f"such as prefill-0"
        )
    public = f'curve\n    public-key = "{encode_z85(pair.public)}"\n'
    texts = {
        SECRET: (
            0o600,
            f"# Secret key of {name}: keep it on that engine, readable by its user only.\n{public}"
            f'    secret-key = "{encode_z85(pair.secret)}"\n',
        ),
        PUBLIC: (0o644, f"# Public key of {name}: goes into the authorized directory of its peers.\n{public}"),
    }
    paths = [directory / f"{name}{suffix}" for suffix in texts]
    written: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, (mode, text) in zip(paths, texts.values(), strict=True):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as file:
                written.append(path)
                file.write(text)
    except OSError as exc:
        for done in written:
            done.unlink(missing_ok=True)
        if isinstance(exc, FileExistsError) and not directory.is_dir():
            raise ConfigError(f"{str(directory)!r} is not a directory; choose another one with --dir") from exc
        if isinstance(exc, FileExistsError):
            raise ConfigError(
                f"{str(path)!r} exists and is not overwritten, because its engine would lose its identity; "
                f"choose another name or --dir, or remove both {name}{SECRET} and {name}{PUBLIC} first"
            ) from exc
        raise ConfigError(f"keys cannot be written into {str(directory)!r}: {exc.strerror or exc}") from exc
    return paths[0], paths[1]


def _read(path: Path, what: str) -> tuple[bytes, int]:
    """Return a small regular file's bytes and mode."""
    remedy = "make one with asynckv keygen NAME, and check that this user may read it"
    try:
        # Never waits, even if the path is a pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{what} {str(path)!r} is not a regular file; {remedy}")
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as exc:
        cause = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"{what} {str(path)!r:.300} cannot be read: {cause}; {remedy}") from exc
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{what} {str(path)!r} is longer than {MOST_BYTES >> 10} KiB, so it is no key file; {remedy}")
    return data, mode


def _parse(path: Path, data: bytes) -> dict[str, bytes]:
    """Return the keys in a file, by kind; there is a public one."""
    found: dict[str, bytes] = {}
    for kind, text in _LINE.findall(data):
        name = kind.decode()
        try:
            key = decode_z85(text)
        except ValueError as exc:
            raise ConfigError(f"{str(path)!r}: its {name} key is {exc}; make new keys with asynckv keygen") from exc
        if found.setdefault(name, key) != key:
            raise ConfigError(f"{str(path)!r} holds two {name} keys; one file is for one engine")
    if "public" not in found:
        raise ConfigError(f"{str(path)!r} holds no public key; make new keys with asynckv keygen NAME")
    return found


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
