"""What a client asks of a tiny engine, read and checked.

Apart from `docs.examples.service.tiny_engine`, so that it can be tested without loading a model.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asynckv.tools.proxy.server import COMPLETIONS, Refused

MAX_TOKENS = 4096


class Message(msgspec.Struct):
    """Of a chat."""

    role: str
    content: str


class Asked(msgspec.Struct):
    """The body of a request, as far as it is understood; of what OpenAI's API knows besides, nothing is done."""

    prompt: str | None = None
    messages: list[Message] | None = None
    n: Literal[1] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None


def read(data: bytes, path: str) -> tuple[str, int, bool, dict[str, Any]]:
    """Read a request: the text, how many tokens follow it, whether they are streamed, and `kv_transfer_params`.

    Raises:
        Refused: It is none that can be answered, and why not.
    """
    try:
        asked = msgspec.json.decode(data, type=Asked)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise Refused(400, f"the body is no request: {exc}") from None
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
