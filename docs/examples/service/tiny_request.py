"""Read and check requests to a tiny engine.

This is separate from `docs.examples.service.tiny_engine`, so that tests need not load a model.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asynckv.tools.proxy.server import COMPLETIONS, Refused

MAX_TOKENS = 4096


class Message(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str


class Asked(msgspec.Struct):
    """The supported fields of a request; other fields of OpenAI's API are ignored."""

    prompt: str | None = None
    messages: list[Message] | None = None
    n: Literal[1] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None


def read(data: bytes, path: str) -> tuple[str, int, bool, dict[str, Any]]:
    """Read a request: its text, the number of tokens to generate, whether to stream, and `kv_transfer_params`.

    Raises:
        Refused: The request cannot be answered; the error says why.
    """
    try:
        asked = msgspec.json.decode(data, type=Asked)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise Refused(400, f"the body is not a request: {exc}") from None
    if path == COMPLETIONS[1]:
        name, text = "messages", "".join(f"{it.role}: {it.content}\n" for it in asked.messages or ())
    else:
        name, text = "prompt", asked.prompt or ""
    if not text:
        raise Refused(400, f"{name} is missing or empty")
    count = 16
    for field, value in (("max_tokens", asked.max_tokens), ("max_completion_tokens", asked.max_completion_tokens)):
        if value is not None and not 1 <= value <= MAX_TOKENS:
            raise Refused(400, f"{field} {value} is outside 1 ... {MAX_TOKENS}")
        count = count if value is None else value
    return text, count, bool(asked.stream), asked.kv_transfer_params or {}
