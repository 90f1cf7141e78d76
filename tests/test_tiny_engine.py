"""The engine that users copy: what it reads, and what it answers to public clients."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asynckv.tools.proxy.server import COMPLETIONS, Refused
from docs.examples.service import tiny_request
from docs.examples.service.tiny_request import encode


def prompts(path: str = COMPLETIONS[0], **body: Any) -> list[list[int]]:
    return tiny_request.read(msgspec.json.encode(body), path)[1]


def chat(*content: Any) -> list[list[int]]:
    return prompts(COMPLETIONS[1], messages=[{"role": "user", "content": each} for each in content])


def test_it_reads_what_it_is_asked() -> None:
    params = {"do_remote_decode": True}
    body = {"prompt": "one", "max_tokens": 3, "stream": True, "kv_transfer_params": params, "top_p": 1}
    asked, found = tiny_request.read(msgspec.json.encode(body), COMPLETIONS[0])
    assert (found, asked.count, asked.stream, asked.kv_transfer_params) == ([encode("one")], 3, True, params)
    body = {"messages": [{"role": "user", "content": "two"}], "max_tokens": 3, "max_completion_tokens": 4}
    asked, found = tiny_request.read(msgspec.json.encode(body), COMPLETIONS[1])
    assert (found, asked.count, asked.stream) == ([encode("user: two\n")], 4, None)
    assert tiny_request.read(b'{"prompt": "one", "max_tokens": null}', COMPLETIONS[0])[0].count == 16
    assert prompts(prompt="one", stream_options={}) == [encode("one")]  # as vLLM


def test_it_reads_texts_tokens_and_lists_of_either() -> None:
    assert prompts(prompt=["one", "two"]) == [encode("one"), encode("two")]
    assert prompts(prompt=[5, 127]) == [[5, 127]]
    assert prompts(prompt=[[5], [6, 0]]) == [[5], [6, 0]]


def test_parts_of_a_content_are_joined_as_vllm_does() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(parts) == chat("one\ntwo")
    assert chat([parts[0]], "two", None, []) == chat("one", "two", "", "")


@pytest.mark.parametrize("model", ["tiny", "", None])
def test_its_own_model_may_be_named(model: str | None) -> None:
    assert prompts(prompt="a", model=model) == [encode("a")]


def test_another_model_is_refused_as_vllm_does() -> None:
    with pytest.raises(Refused) as refused:
        prompts(prompt="a", model="gpt-9")
    text = "The model `gpt-9` does not exist. Valid aliases: tiny."
    error = {"message": text, "type": "NotFoundError", "param": "model", "code": 404}
    assert (refused.value.status, msgspec.json.decode(refused.value.body)) == (404, {"error": error})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the body is not a request: Input data was truncated"),
        (b"[" * 100_000, "the body is not a request: "),
        (b"[]", "the body is not a request: Expected `object`, got `array`"),
        (b"{}", "prompt is missing or empty"),
        (b'{"prompt": ""}', "prompt is missing or empty"),
        (b'{"prompt": []}', "prompt is missing or empty"),
        (b'{"prompt": ["a", ""]}', "prompt is missing or empty"),
        (b'{"prompt": [[1], []]}', "prompt is missing or empty"),
        (b'{"prompt": 5}', "Expected `str | array | null`, got `int` - at `$.prompt`"),
        (b'{"prompt": [1, "a"]}', "prompt mixes texts, tokens and lists of tokens"),
        (b'{"prompt": [[1], 2]}', "prompt mixes texts, tokens and lists of tokens"),
        (b'{"prompt": [1, 128]}', "Expected `int` <= 127 - at `$.prompt[1]`"),
        (b'{"prompt": [[-1]]}', "Expected `int` >= 0 - at `$.prompt[0][0]`"),
        (b'{"prompt": [true]}', "at `$.prompt[0]`"),
        (msgspec.json.encode({"prompt": [[1]] * 1025}), "1025 prompts are more than 1024"),
        (b'{"prompt": "\\ud800"}', "the body is not a request: "),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens 0 is outside 1 ... 4096"),
        (b'{"prompt": "a", "max_tokens": -1}', "max_tokens -1 is outside 1 ... 4096"),
        (b'{"prompt": "a", "max_tokens": 100000000}', "max_tokens 100000000 is outside 1 ... 4096"),
        (b'{"prompt": "a", "max_tokens": "5"}', "at `$.max_tokens`"),
        (b'{"prompt": "a", "max_completion_tokens": 0}', "max_completion_tokens 0 is outside 1 ... 4096"),
        (b'{"prompt": "a", "kv_transfer_params": 5}', "at `$.kv_transfer_params`"),
        (b'{"prompt": "a", "n": 2}', "at `$.n`"),
        (b'{"prompt": "a", "stream_options": {"include_usage": true}}', "stream_options need a request with stream"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_it_says_what_is_wrong(body: bytes, text: str) -> None:
    with pytest.raises(Refused) as refused:
        tiny_request.read(body, COMPLETIONS[0])
    assert refused.value.status == 400
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"prompt": "a"}', "messages is missing or empty"),
        (b'{"messages": [{"role": "user"}]}', "missing required field `content` - at `$.messages[0]`"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
            "a content part is 'image_url', but the model 'tiny' reads only texts",
        ),
        (b'{"messages": [{"role": "user", "content": [{"text": "a"}]}]}', "missing required field `type`"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_it_says_what_is_wrong_with_a_chat(body: bytes, text: str) -> None:
    with pytest.raises(Refused) as refused:
        tiny_request.read(body, COMPLETIONS[1])
    assert refused.value.status == 400
    assert text in str(refused.value)
