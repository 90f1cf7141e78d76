"""Read and check requests to a tiny engine.

This is separate from `docs.examples.service.tiny_engine`, so that tests need not load a model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from asynckv.tools.proxy.server import COMPLETIONS, Refused

MODEL = "tiny"
MAX_TOKENS, MAX_PROMPTS, VOCABULARY = 4096, 1024, 128
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=VOCABULARY)]


class Part(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a chat; vLLM joins the texts of several parts by line ends too."""

    role: str
    content: str | list[Part] | None

    def text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise Refused(400, f"a content part is {part.type!r}, but the model {MODEL!r} reads only texts")
        return "\n".join(part.text or "" for part in self.content)


class StreamOptions(msgspec.Struct):
    """Which events of a stream tell numbers of tokens: one more at its end, and with it all others too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Asked(msgspec.Struct):
    """The supported fields of a request; other fields of OpenAI's API are ignored."""

    model: str | None = None
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    messages: list[Message] | None = None
    n: Literal[1] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def count(self) -> int:
        """Tokens to generate for each prompt."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return 16 if given is None else given


def encode(text: str) -> list[int]:
    """Return one token per byte, after a token that begins every prompt."""
    return [0, *(byte % VOCABULARY for byte in text.encode(errors="replace"))]


def read(data: bytes, path: str) -> tuple[Asked, list[list[int]]]:
    """Read a request, and return it with the tokens of each prompt.

    Raises:
        Refused: The request cannot be answered; the error says why.
    """
    try:
        asked = msgspec.json.decode(data, type=Asked)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise Refused(400, f"the body is not a request: {exc}") from None
    if asked.model and asked.model != MODEL:
        text = f"The model `{asked.model}` does not exist. Valid aliases: {MODEL}."
        error = {"message": text, "type": "NotFoundError", "param": "model", "code": 404}
        raise Refused(404, text, body=msgspec.json.encode({"error": error}))
    if asked.stream_options not in (None, StreamOptions()) and not asked.stream:
        raise Refused(400, "stream_options need a request with stream")
    for field, value in (("max_tokens", asked.max_tokens), ("max_completion_tokens", asked.max_completion_tokens)):
        if value is not None and not 1 <= value <= MAX_TOKENS:
            raise Refused(400, f"{field} {value} is outside 1 ... {MAX_TOKENS}")
    if path == COMPLETIONS[1]:
        name, prompts = "messages", ["".join(f"{it.role}: {it.text()}\n" for it in asked.messages or ())]
    else:
        name, prompts = "prompt", _prompts(asked.prompt)
    if not all(prompts):
        raise Refused(400, f"{name} is missing or empty")
    if len(prompts) > MAX_PROMPTS:
        raise Refused(400, f"{len(prompts)} prompts are more than {MAX_PROMPTS}")
    return asked, [encode(it) if isinstance(it, str) else it for it in prompts]


def _prompts(given: Any) -> list[Any]:
    """Return the prompts of a text, of tokens, or of a list of one of these."""
    kinds = {type(it) for it in given} if isinstance(given, list) else set()
    if len(kinds) > 1:
        raise Refused(400, "prompt mixes texts, tokens and lists of tokens")
    return given if kinds - {int} else [given]
