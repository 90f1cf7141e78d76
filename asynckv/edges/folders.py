"""Folders that no other user may write, and the reasons why one cannot be used."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from asynckv.errors import BackendError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # errors that mean that there is no room


def _check_user(path: Path, *users: int) -> None:
    me, hidden = os.geteuid(), -1
    with suppress(OSError, ValueError):  # a container without root shows all users that it does not know as this one
        number = int(Path("/proc/sys/kernel/overflowuid").read_text())
        known = [[int(x) for x in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
        hidden = -1 if any(first <= number < first + count for first, _, count in known) else number
    if strangers := set(users) - {me, 0, hidden}:
        raise BackendError(
            f"{path} belongs to user {min(strangers)}, and this process is user {me}; the other user could change its "
            f"contents: run as that user, chown it, or name another directory"
        )


def check_parents(folder: Path) -> None:
    """Refuse a directory that another user could replace by another one; it need not exist yet.

    All users may write a mount point: an `emptyDir` of Kubernetes has such a mode, and only its pod sees it.
    """
    for parent in sorted({*folder.absolute().parents, *Path(os.path.realpath(folder)).parents}):
        with suppress(OSError):  # it does not exist, or cannot be reached
            found = parent.lstat()
            _check_user(parent, found.st_uid)
            is_open = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
            if is_open and not os.path.ismount(parent):
                raise BackendError(
                    f"any user may write {parent} (mode {stat.S_IMODE(found.st_mode):o}, of user {found.st_uid}), and "
                    f"replace {folder} by another directory; chmod o-w or +t it, or name another directory"
                )


def check_folder(folder: Path) -> None:
    """Refuse a directory that another user may write: a checksum proves that bytes are whole, not their origin.

    A group may write it if it is set up like a container volume (Kubernetes: `fsGroup`): setgid, for one of our groups.
    """
    check_parents(folder)
    try:
        link, found = folder.lstat(), folder.stat()
        _check_user(folder, link.st_uid, found.st_uid)
        is_volume = found.st_mode & stat.S_ISGID and found.st_gid in (os.getegid(), *os.getgroups())
        for path in () if is_volume else folder.iterdir():
            _check_user(path, path.lstat().st_uid)
    except OSError as exc:
        raise BackendError(f"{folder} cannot be used: {explained(folder, exc)}; or name another directory") from None
    others = "any user" if found.st_mode & stat.S_IWOTH else f"group {found.st_gid}"
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not is_volume):
        raise BackendError(
            f"{others} may write {folder} (mode {stat.S_IMODE(found.st_mode):o}), and put anything into the KV cache; "
            f"chmod {'o' if others == 'any user' else 'g'}-w it if it was not written yet, or name another directory "
            f"(a group may write it if it is setgid, as a container's volume, and this process is in the group)"
        )


def explained(folder: Path, exc: OSError) -> str:
    why = exc.strerror or str(exc)
    for path in [Path(exc.filename or folder), folder] if exc.errno in (errno.EACCES, errno.EPERM) else ():
        with suppress(OSError):
            found = path.stat()
            return (
                f"{why}: {path} belongs to user {found.st_uid} (mode {stat.S_IMODE(found.st_mode):o}), and this "
                f"process is user {os.geteuid()}; run as its user"
            )
    with suppress(OSError):
        if exc.errno == errno.EROFS:
            return f"{why}; mount it so that it can be written"
        if exc.errno in FULL:
            disk = os.statvfs(folder)
            return f"{why}, {disk.f_bavail * disk.f_frsize:,} bytes are free; free some"
    return why
