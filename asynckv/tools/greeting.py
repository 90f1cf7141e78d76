"""Find out what listens at a port: nothing, or ZMQ with or without keys, which its greeting shows."""

from __future__ import annotations

import errno
import socket
from typing import NamedTuple

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""A greeting up to the version (ZMTP 3, RFC 23). The peer answers with its mechanism before it has seen ours."""

MECHANISM_END = 32


class Greeted(NamedTuple):
    """Result of a look: whether a process listens, and the mechanism in ZMQ's greeting, or the error instead."""

    connected: bool
    mechanism: str = ""
    error: str = ""
    errno: int = 0


def look_at_port(host: str, port: int, connect_s: float, greet_s: float) -> Greeted:
    connected, waits_s, data = False, connect_s, b""
    try:
        with socket.create_connection((host, port), connect_s) as there:
            connected, waits_s = True, greet_s
            there.settimeout(greet_s)
            there.sendall(GREETING)
            while len(data) < MECHANISM_END and (more := there.recv(64 - len(data))):
                data += more
    except TimeoutError:
        return Greeted(connected, "", f"no answer within {waits_s:g} s", errno.ETIMEDOUT)
    except OSError as exc:
        return Greeted(connected, "", exc.strerror or str(exc), exc.errno or 0)
    if len(data) >= MECHANISM_END and data[0] == 0xFF and data[9] == 0x7F:
        return Greeted(True, data[12:MECHANISM_END].rstrip(b"\0").decode("ascii", "replace"))
    return Greeted(True, "", f"it answered {data[:MECHANISM_END]!r}" if data else "it closed the connection")
