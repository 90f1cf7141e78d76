"""Ask a service through OpenAI's SDK, and print what it answers: `python openai_sdk.py URL`."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai  # type: ignore[import-not-found,unused-ignore]

COUNT = 6
PARTS = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOKENS = [[0, 79, 110], [7]]


def streamed(events: Any) -> list[dict[str, Any]]:
    return [event.model_dump(exclude_unset=True) for event in events]


def refused(ask: Any) -> list[Any]:
    try:
        ask()
    except openai.APIStatusError as exc:
        return [type(exc).__name__, exc.status_code, exc.body]
    raise AssertionError


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    (model,) = client.models.list().data
    at: Any = {"model": model.id, "max_tokens": COUNT}
    usage: Any = {"stream": True, "stream_options": {"include_usage": True}}

    def chat(*content: Any, **more: Any) -> Any:
        return client.chat.completions.create(messages=[{"role": "user", "content": list(content)}], **at, **more)

    def complete(prompt: Any, **more: Any) -> Any:
        return client.completions.create(prompt=prompt, **at, **more)

    plain = client.chat.completions.create(messages=[{"role": "user", "content": "Once upon\na time"}], **at)
    found = {
        "models": [model.id],
        "chat": [plain.model_dump(), chat(*PARTS).model_dump()],
        "chat streamed": streamed(chat(*PARTS, **usage)),
        "whole": [complete(each).model_dump() for each in ("On", TOKENS[0], ["On", "Off"], TOKENS)],
        "streamed": [streamed(complete(each, **usage)) for each in ("On", ["On", "Off"], TOKENS)],
        "image": refused(lambda: chat(*PARTS, IMAGE)),
        "model": refused(lambda: client.completions.create(prompt="On", model="nobody")),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
